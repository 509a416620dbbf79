"""Widgets, static first: a pure function, its figure saved, its controls live. Built in chapter 00."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Control:
    """One knob of `explore`: the value drawn in the saved page, and how to turn it."""

    default: Any
    options: tuple = ()
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0
    label: str | None = None


def slider(low: float, high: float, default: float, *, step: float | None = None, label: str | None = None) -> Control:
    """A number from `low` to `high`; whole numbers when all three are whole and no step says otherwise."""
    if not low <= default <= high:
        raise ValueError(f"default={default}: must lie within low={low} and high={high}")
    whole = all(isinstance(value, int) for value in (low, high, default))
    return Control(default, low=low, high=high, step=step or (1 if whole else _round_step(high - low)), label=label)


def choice(options: Sequence, default: Any = None, *, label: str | None = None) -> Control:
    """One of several values; the first unless `default` says otherwise."""
    default = options[0] if default is None else default
    if default not in options:
        raise ValueError(f"default={default!r}: must be one of {list(options)}")
    return Control(default, options=tuple(options), label=label)


def explore(function: Callable, **controls: Control) -> None:
    """Show `function(**values)` with knobs for its arguments.

    `function` is pure and returns a `picture(...)`, an object with HTML (`token_strip`, `table`), or a list of these.
    Where no kernel runs (GitHub, paper), the page shows the result for the defaults; live, the knobs redraw it.
    """
    from IPython.display import display

    defaults = {name: control.default for name, control in controls.items()}
    shown = _as_list(function(**defaults))
    live = _live_views(function, controls, shown)
    for i, piece in enumerate(shown):
        data, metadata = _bundle(piece)
        if live:
            # A live page prefers the widget of the two; the saved page keeps the picture only.
            data |= {k: v for k, v in _bundle(live[i])[0].items() if k.startswith("application/vnd.jupyter.widget")}
        display(data, metadata=metadata, raw=True)


def _live_views(function: Callable, controls: dict[str, Control], shown: list) -> list:
    """One widget for each shown piece, the first with the knobs above it; nothing without ipywidgets."""
    try:
        import ipywidgets
    except ImportError:  # the page is complete without the knobs
        return []
    knobs = {name: _knob(ipywidgets, name, control) for name, control in controls.items()}
    panes = [_pane(ipywidgets, piece) for piece in shown]

    def redraw(_change) -> None:
        pieces = _as_list(function(**{name: knob.value for name, knob in knobs.items()}))
        for pane, piece in zip(panes, pieces, strict=True):
            pane.value = piece.png if hasattr(piece, "png") else piece._repr_html_()

    for knob in knobs.values():
        knob.observe(redraw, names="value")
    row = ipywidgets.HBox(list(knobs.values()), layout=ipywidgets.Layout(flex_flow="row wrap"))
    return [ipywidgets.VBox([row, panes[0]]), *panes[1:]]


def _knob(ipywidgets, name: str, control: Control):
    label = control.label or name.replace("_", " ")
    wide = {"description_width": "initial"}
    if control.options:
        return ipywidgets.Dropdown(options=list(control.options), value=control.default, description=label, style=wide)
    common = {
        "value": control.default,
        "min": control.low,
        "max": control.high,
        "step": control.step,
        "description": label,
        "continuous_update": False,
        "style": wide,
    }
    if isinstance(control.default, int) and float(control.step).is_integer():
        return ipywidgets.IntSlider(**common)
    digits = max(0, -math.floor(math.log10(control.step)))
    return ipywidgets.FloatSlider(**common, readout_format=f".{digits}f")


def _round_step(span: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that gives 50 positions or somewhat more."""
    power = 10.0 ** math.floor(math.log10(span / 50))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= span / 50 * (1 + 1e-9))


def _pane(ipywidgets, piece):
    if hasattr(piece, "png"):
        return ipywidgets.Image(value=piece.png, format="png", width=piece.width)
    return ipywidgets.HTML(value=piece._repr_html_())


def _bundle(piece) -> tuple[dict, dict]:
    if hasattr(piece, "_repr_mimebundle_"):
        made = piece._repr_mimebundle_()
        return made if isinstance(made, tuple) else (dict(made), {})
    return {"text/html": piece._repr_html_(), "text/plain": repr(piece)}, {}


def _as_list(result) -> list:
    pieces = list(result) if isinstance(result, (list, tuple)) else [result]
    for piece in pieces:
        if not (hasattr(piece, "png") or hasattr(piece, "_repr_html_")):
            raise TypeError(
                f"explore shows pictures and HTML, but the function returned {type(piece).__name__}: "
                "end it with `return picture(fig, alt)`"
            )
    return pieces
