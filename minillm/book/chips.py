"""Small HTML for notebooks: tokens as chips, tables with bars. Built in chapter 00."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minillm.book.style import colour

# Pale enough for dark text; neighbours differ in lightness too, for readers who do not see the hue.
_CHIP_COLOURS = ("#D6EAF8", "#FCE8C3", "#D2F0E4", "#F6DDEB", "#E6E9ED")


@dataclass(frozen=True)
class Html:
    """HTML for the notebook, and the same content as plain text for everywhere else."""

    html: str = field(repr=False)
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def token_strip(
    tokens: Sequence[str],
    *,
    ids: Sequence[int] | None = None,
    marks: Mapping[int, str] | None = None,
    struck: Sequence[int] = (),
    caption: str = "",
) -> Html:
    """Tokens as coloured chips, one beside the other, spaces shown as "␣".

    ids:    token ids, shown under each chip.
    marks:  index -> colour or role ("ours", "wasted", ...), in place of the alternating colours.
    struck: indices drawn struck out, for tokens that were rejected or are not allowed.
    """
    if ids is not None and len(ids) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens but {len(ids)} ids")
    marks, chips, plain = marks or {}, [], []
    for i, token in enumerate(tokens):
        shown = token.replace(" ", "␣").replace("\n", "⏎") or "∅"
        shade = f"{colour(marks[i])}40" if i in marks else _CHIP_COLOURS[i % len(_CHIP_COLOURS)]
        line = ";text-decoration:line-through;opacity:.6" if i in struck else ""
        number = f'<br><small style="color:#57606a;font-size:10px">{int(ids[i])}</small>' if ids is not None else ""
        chips.append(
            f'<span style="display:inline-block;background:{shade};color:#24292f;border-radius:4px;'
            f'padding:2px 5px;margin:2px;text-align:center{line}">{html.escape(shown)}{number}</span>'
        )
        plain.append((f"~{shown}~" if i in struck else shown) + (f":{int(ids[i])}" if ids is not None else ""))
    head = (
        f'<div style="font:12px sans-serif;color:#57606a;margin:0 2px 2px">{html.escape(caption)}</div>'
        if caption
        else ""
    )
    style = "font:13px/1.5 monospace;background:#fff;padding:6px;border-radius:6px"
    body = f'<div style="{style}">{head}{" ".join(chips)}</div>'
    return Html(body, (caption + "\n" if caption else "") + " ".join(plain))


def ladder_table(rows: Sequence[Mapping[str, object]], *, value: str = "tokens/s", name: str = "rung") -> Html:
    """A table whose last column draws `row[value]` as a bar against the largest; further columns in their order."""
    if not rows:
        raise ValueError("rows is empty: give at least one mapping with a name and a value")
    columns = [name, *(c for c in rows[0] if c not in (name, value)), value]
    top = max(float(row[value]) for row in rows) or 1.0
    bars = [_bar(float(row[value]) / top) for row in rows]
    return table([[row[c] for c in columns] for row in rows], columns, bars)


def table(rows: Sequence[Sequence[object]], header: Sequence[str], bars: Sequence[str] | None = None) -> Html:
    """A plain table: text to the left, numbers to the right with thousands separated."""
    cell = "padding:3px 12px;border-bottom:1px solid #e6e9ed"
    numeric = [all(isinstance(row[c], (int, float)) for row in rows) for c in range(len(header))]
    align = ["right" if n else "left" for n in numeric]
    texts = [[_text(value) for value in row] for row in rows]
    lines = [
        "<tr>"
        + "".join(
            f'<th style="{cell};text-align:{a}">{html.escape(str(h))}</th>' for h, a in zip(header, align, strict=True)
        )
        + (f'<th style="{cell}"></th>' if bars else "")
        + "</tr>"
    ]
    bar_style = (
        f"{cell};text-align:left;color:{colour('ours')};font-family:monospace;letter-spacing:-.3px;white-space:pre"
    )
    for i, row in enumerate(texts):
        cells = "".join(
            f'<td style="{cell};text-align:{a}">{html.escape(v)}</td>' for v, a in zip(row, align, strict=True)
        )
        bar = f'<td style="{bar_style}">{bars[i]}</td>' if bars else ""
        lines.append(f"<tr>{cells}{bar}</tr>")
    style = "font:13px sans-serif;border-collapse:collapse;background:#fff;color:#24292f"
    body = f'<table style="{style}">{"".join(lines)}</table>'
    widths = [max(len(str(h)), *(len(row[c]) for row in texts)) for c, h in enumerate(header)]
    plain = [
        "  ".join(v.rjust(w) if n else v.ljust(w) for v, w, n in zip(row, widths, numeric, strict=True))
        + (f"  {bars[i - 1]}" if bars and i else "")
        for i, row in enumerate([[str(h) for h in header], *texts])
    ]
    return Html(body, "\n".join(line.rstrip() for line in plain))


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def _bar(share: float, width: int = 28) -> str:
    """A bar of block characters, so that it survives where styles are stripped."""
    eighths = max(1, round(share * width * 8))
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
