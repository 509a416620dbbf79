"""The guide as tables and figures for the notebook. Built in chapter 25."""

from __future__ import annotations

import html
from collections.abc import Sequence

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minillm.book.chips import Html
from minillm.book.reading.guide import PATH, ROWS, Row
from minillm.book.reading.index import load
from minillm.book.reading.scheduler import NEW, Stretch
from minillm.book.style import Picture, canvas, colour, picture

_COLUMNS = (("idea", 17), ("minillm", 19), ("vLLM", 20), ("SGLang", 20), ("what differs", 24))
_REPOSITORY = "https://github.com/minillm-book/minillm/blob/main/minillm"


def guide(first: int, last: int) -> Html:
    """The rows of chapters `first` to `last`; each name is a link to its lines. Raises LookupError for a lost name."""
    rows = [row for row in ROWS if first <= row.chapter <= last]
    if not rows:
        raise ValueError(f"chapters {first} to {last} have no row; the guide has chapters 1 to {ROWS[-1].chapter}")
    cell = "padding:4px 8px;border-bottom:1px solid #e6e9ed;text-align:left;vertical-align:top;white-space:normal"
    head = "".join(f'<th style="{cell};width:{width}%">{name}</th>' for name, width in _COLUMNS)
    lines = [f"<tr>{head}</tr>", *(_line(row, cell) for row in rows)]
    style = "font:13px sans-serif;border-collapse:collapse;background:#fff;color:#24292f;width:100%;table-layout:fixed"
    text = "\n".join(f"{row.chapter:02d} {row.idea}: {row.ours or '-'} | {row.vllm} | {row.sglang}" for row in rows)
    return Html(f'<table style="{style}">{"".join(lines)}</table>', text)


def _line(row: Row, cell: str) -> str:
    ours = _link(f"{_REPOSITORY}/{row.ours.partition('::')[0]}", row.ours) if row.ours else "–"
    theirs = [_link(load(name).url(one), one) for name in ("vllm", "sglang") if (one := getattr(row, name))]
    cells = [f"<b>{row.chapter:02d}</b> {html.escape(row.idea)}", ours, *theirs, _marked(row.differs)]
    return "<tr>" + "".join(f'<td style="{cell}">{text}</td>' for text in cells) + "</tr>"


def _link(url: str, reference: str) -> str:
    """The name, with its file in small letters; long ones may break."""
    path, _, name = reference.partition("::")
    file = "/".join(path.split("/")[-2:])
    shown = html.escape(name or file).replace("_", "_<wbr>").replace(".", ".<wbr>")
    small = html.escape(file).replace("_", "_<wbr>").replace("/", "/<wbr>")
    style = "white-space:normal;overflow-wrap:anywhere"
    return f'<a href="{url}"><code style="{style}">{shown}</code></a><br><small>{small}</small>'


def _marked(text: str) -> str:
    parts = html.escape(text, quote=False).split("`")
    return "".join(
        f'<code style="white-space:normal">{one}</code>' if odd % 2 else one for odd, one in enumerate(parts)
    )


def rooms() -> Picture:
    """One request's way: our functions on the left, vLLM's on the right, with the code lines of each of vLLM's."""
    index = load("vllm")
    fig, ax = canvas(width=9.2, height=0.62 * len(PATH) + 0.5)
    ax.set(xlim=(0, 10), ylim=(-len(PATH) + 0.4, 0.9))
    ax.axis("off")
    ax.text(2.35, 0.62, "minillm", ha="center", weight="bold", color=colour("ours"))
    ax.text(7.35, 0.62, f"vLLM {index.version}", ha="center", weight="bold", color=colour("other"))
    said = []
    for place, (what, ours, theirs) in enumerate(PATH):
        _room(ax, 0.7, -place, ours, "ours")
        _room(ax, 5.6, -place, theirs, "other")
        ax.text(4.8, -place, what, ha="center", va="center", fontsize=8, color=colour("text"))
        ax.text(9.35, -place, f"{index.num_code_lines(theirs):,}", ha="center", va="center", fontsize=8,
                color=colour("limit"))  # fmt: skip
        for x in (2.35, 7.25):
            if place + 1 < len(PATH):
                arrow = FancyArrowPatch((x, -place - 0.3), (x, -place - 0.7), arrowstyle="-|>", mutation_scale=8,
                                        color=colour("limit"), linewidth=1)  # fmt: skip
                ax.add_patch(arrow)
        said.append(f"{what}: {ours.partition('::')[2]} and {theirs.partition('::')[2]}")
    ax.text(9.35, 0.62, "lines of\ncode", ha="center", va="center", fontsize=7.5, color=colour("limit"))
    return picture(fig, f"One request's way through minillm and through vLLM, room by room. {'; '.join(said)}.")


def _room(ax, x: float, y: float, reference: str, role: str) -> None:
    path, _, name = reference.partition("::")
    box = FancyBboxPatch((x, y - 0.27), 3.3, 0.54, boxstyle="round,pad=0.02,rounding_size=0.08", linewidth=1.1,
                         facecolor=colour("paper"), edgecolor=colour(role))  # fmt: skip
    ax.add_patch(box)
    ax.text(x + 1.65, y + 0.08, name, ha="center", va="center", fontsize=7.6)
    ax.text(x + 1.65, y - 0.14, "/".join(path.split("/")[-2:]), ha="center", va="center", fontsize=6.2,
            color=colour("limit"))  # fmt: skip


def method(parts: Sequence[Stretch]) -> Picture:
    """A method from top to bottom, wrapped into columns; a stretch is coloured by whether a chapter explains it."""
    rows, wide = 100, 1.0
    total = parts[-1].last - parts[0].first + 1
    columns = -(-total // rows)
    fig, ax = canvas(width=9.2, height=3.9)
    labelled = []
    for part in parts:
        face = colour("wasted" if part.chapter == NEW else "prediction" if part.chapter == 25 else "ours")
        for column, top, height in _runs(part.first - parts[0].first, part.last - parts[0].first, rows):
            ax.bar(
                (column + 0.43) * wide,
                -height,
                0.86 * wide,
                bottom=-top,
                color=face,
                alpha=0.75,
                edgecolor="white",
                linewidth=0.6,
            )
        column, row = divmod(part.first - parts[0].first, rows)
        if part.last - part.first >= 5 and row < rows - 4:
            text = "new" if part.chapter == NEW else f"{part.chapter:02d}"
            ax.text((column + 0.43) * wide, -row - 2.6, text, ha="center", va="center", fontsize=6.5, color="white")
        labelled.append(part.chapter)
    for name, role in (("chapters 01 to 24", "ours"), ("chapter 25", "prediction"), ("not in the book", "wasted")):
        ax.bar(0, 0, color=colour(role), alpha=0.75, label=name)
    ax.set(xlim=(-0.1, columns * wide), ylim=(-rows, 1), title="Scheduler.schedule of vLLM, line by line")
    ax.axis("off")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=3)
    known = sum(chapter not in (NEW, 25) for chapter in labelled)
    alt = f"""The {total} lines of vLLM's Scheduler.schedule in {columns} columns, coloured by the chapter that explains
        them: {known} of {len(labelled)} stretches belong to chapters 01 to 24."""
    return picture(fig, alt)


def _runs(first: int, last: int, rows: int) -> list[tuple[int, int, int]]:
    """(column, top row, height) of the lines `first` to `last`, wrapped after `rows` lines."""
    columns = range(first // rows, last // rows + 1)
    bounds = [(column, max(first, column * rows), min(last, (column + 1) * rows - 1)) for column in columns]
    return [(column, low - column * rows, high - low + 1) for column, low, high in bounds]
