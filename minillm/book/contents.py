"""The chapters as they stand: what each needs, how long it takes, drawn from the notebooks themselves.
Built in chapter 00."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.patches import FancyBboxPatch

from minillm.book import nbfile
from minillm.book.paths import chapter_number, notebooks
from minillm.book.style import Picture, canvas, colour, picture

PARTS = (
    ("I\nOne request", 0, 3),
    ("II\nMany requests", 4, 9),
    ("III\nKernels", 10, 14),
    ("IV\nFewer bytes", 15, 17),
    ("V\nFewer steps", 18, 19),
    ("VI\nMany GPUs", 20, 22),
    ("VII\nA service", 23, 25),
    ("Appendix", 90, 99),
)


@dataclass(frozen=True)
class Chapter:
    """What a notebook says of itself in its metadata and its title."""

    number: int
    title: str
    needs: tuple[int, ...]
    minutes: int
    path: Path


def chapters(root: Path | None = None) -> list[Chapter]:
    """Every notebook of `chapters/`, in order."""
    return [_read(path) for path in notebooks("chapters", root)]


def chapter_map(root: Path | None = None) -> Picture:
    """A row for each part: its chapters as boxes, in order, each with those it needs beside the one before it."""
    listed = chapters(root)
    rows = [(name, [c for c in listed if first <= c.number <= last]) for name, first, last in PARTS]
    rows = [(name, row) for name, row in rows if row]
    longest = max(len(row) for _, row in rows)
    fig, ax = canvas(width=9, height=0.5 + 0.92 * len(rows))
    for line, (name, row) in enumerate(rows):
        y = -line
        ax.text(-0.62, y, name, ha="right", va="center", fontsize=8.5, color=colour("limit"), linespacing=1.4)
        for place, chapter in enumerate(row):
            text = f"{chapter.number:02d} · {chapter.minutes} min\n{_broken(chapter.title)}"
            ax.add_patch(
                FancyBboxPatch(
                    (place - 0.42, y - 0.3),
                    0.84,
                    0.6,
                    boxstyle="round,pad=0.04,rounding_size=0.06",
                    linewidth=1.2,
                    facecolor=colour("paper" if chapter.number < 90 else "background"),
                    edgecolor=colour("ours"),
                )
            )
            ax.text(place, y + 0.06, text, ha="center", va="center", fontsize=7.4, linespacing=1.35)
            if others := [need for need in chapter.needs if need != chapter.number - 1]:
                ax.text(
                    place,
                    y - 0.26,
                    "after " + ", ".join(f"{n:02d}" for n in others),
                    ha="center",
                    va="center",
                    fontsize=6.2,
                    color=colour("limit"),
                )
            if place and chapter.number < 90:
                ax.annotate(
                    "",
                    (place - 0.45, y),
                    (place - 0.55, y),
                    arrowprops={"arrowstyle": "-|>", "color": colour("limit"), "linewidth": 1},
                )
    ax.set(xlim=(-1.55, longest - 0.4), ylim=(-len(rows) + 0.55, 0.45))
    ax.axis("off")
    said = "; ".join(
        f"{c.number:02d} {c.title}, {c.minutes} minutes"
        + (f", after {', '.join(f'{n:02d}' for n in c.needs)}" if c.needs else "")
        for c in listed
    )
    return picture(fig, f"Map of the chapters: {said}.")


def _read(path: Path) -> Chapter:
    nb = nbfile.read(path)
    book = nb.metadata.get("book", {})
    title = nb.cells[0].source.splitlines()[0].lstrip("# ").partition("·")[2].strip()
    return Chapter(
        chapter_number(path), title, tuple(int(n) for n in book.get("needs", ())), int(book.get("minutes", 0)), path
    )


def _broken(title: str) -> str:
    """The title over two lines of about equal length."""
    words = title.split()
    if len(words) < 2 or len(title) < 14:
        return title
    cut = min(range(1, len(words)), key=lambda i: abs(len(" ".join(words[:i])) - len(" ".join(words[i:]))))
    return " ".join(words[:cut]) + "\n" + " ".join(words[cut:])
