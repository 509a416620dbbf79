"""The chapters as they stand: what each needs, how long it takes, drawn from the notebooks themselves. Built in chapter 00."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minillm.book import nbfile
from minillm.book.paths import chapter_number, notebooks
from minillm.book.style import Picture, canvas, colour, picture


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
    """Chapters as boxes, an arrow from each to those that need it; the appendix stands below, for whenever it is wanted."""
    listed = chapters(root)
    main = [c for c in listed if c.number < 90]
    appendix = [c for c in listed if c.number >= 90]
    fig, ax = canvas(width=9, height=2.6)
    place = {c.number: (i * 2.3, 0.9) for i, c in enumerate(main)} | {c.number: (1.15 + i * 2.3, -0.6) for i, c in enumerate(appendix)}
    for chapter in listed:
        x, y = place[chapter.number]
        ax.text(x, y, f"{chapter.number:02d}\n{_broken(chapter.title)}\n{chapter.minutes} min", ha="center", va="center", fontsize=9, linespacing=1.35,
                bbox={"boxstyle": "round,pad=0.5", "facecolor": colour("paper" if chapter.number < 90 else "background"), "edgecolor": colour("ours"), "linewidth": 1.2})
        for need in chapter.needs:
            if need in place and chapter.number < 90:
                far = chapter.number - need > 1
                ax.annotate("", (x - (0 if far else 0.85), y + (0.42 if far else 0)), (place[need][0] + (0 if far else 0.85), place[need][1] + (0.42 if far else 0)),
                            arrowprops={"arrowstyle": "-|>", "color": colour("limit"), "linewidth": 1.2, "connectionstyle": "arc3,rad=-0.25" if far else "arc3"})
    ax.set(xlim=(-1.1, max(x for x, _ in place.values()) + 1.1), ylim=(-1.2, 2.3))
    ax.axis("off")
    said = "; ".join(f"{c.number:02d} {c.title}, {c.minutes} minutes" + (f", after {', '.join(f'{n:02d}' for n in c.needs)}" if c.needs else "") for c in listed)
    return picture(fig, f"Map of the chapters: {said}.")


def _read(path: Path) -> Chapter:
    nb = nbfile.read(path)
    book = nb.metadata.get("book", {})
    title = nb.cells[0].source.splitlines()[0].lstrip("# ").partition("·")[2].strip()
    return Chapter(chapter_number(path), title, tuple(int(n) for n in book.get("needs", ())), int(book.get("minutes", 0)), path)


def _broken(title: str) -> str:
    """The title over two lines of about equal length."""
    words = title.split()
    if len(words) < 3:
        return title
    cut = min(range(1, len(words)), key=lambda i: abs(len(" ".join(words[:i])) - len(" ".join(words[i:]))))
    return " ".join(words[:cut]) + "\n" + " ".join(words[cut:])
