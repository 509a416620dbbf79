"""What the notebooks use: quoted source, figures, widgets, checks. Built in chapter 00.

Every name below is loaded on first use, so that `from minillm.book import show` costs no more than `show` does.
"""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "show": "quote",
    "Picture": "style", "canvas": "style", "colour": "style", "figure": "style", "picture": "style",
    "token_bars": "charts", "roofline": "charts",
    "ladder_table": "chips", "table": "chips", "token_strip": "chips",
    "you_are_here": "engine_map",
    "show_glossary": "glossary",
    "chapter_map": "contents",
    "predict": "prediction",
    "blank": "blanks",
    "fill_in": "holes",
    "choice": "widgets", "explore": "widgets", "slider": "widgets",
    "side_by_side_stream": "streams",
}  # fmt: skip
__all__ = sorted(_HOME)  # noqa: PLE0605  (it is a list)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f"minillm.book.{_HOME[name]}"), name)
    raise AttributeError(f"minillm.book has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
