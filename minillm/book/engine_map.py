"""The map of the engine at the head of every chapter: what stands, what comes now, what is still to build.
Built in chapter 00."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minillm.book.style import Picture, canvas, colour, picture


@dataclass(frozen=True)
class Part:
    """One box: its name, the chapters that work on it (the first one builds it), its place."""

    name: str
    chapters: tuple[int, ...]
    x: float
    y: float
    width: float = 1.0
    height: float = 0.62

    def state(self, chapter: int) -> str:
        if chapter in self.chapters:
            return "current"
        return "finished" if min(self.chapters) < chapter else "later"


_STEP = 1.3
_PATH = ("request", "scheduler", "KV cache\nmanager", "runner", "decoder", "attention", "sampler", "text")
_BUILT = ((4, 5), (5, 8, 9), (3, 6, 7, 17), (4, 14, 18), (2, 16, 21), (2, 12, 13), (1, 19), (1, 4))
PARTS = (
    *(Part(name, chapters, i * _STEP, 1.0) for i, (name, chapters) in enumerate(zip(_PATH, _BUILT, strict=True))),
    Part("server", (22, 23, 24), 0.0, 1.98, width=7 * _STEP + 1, height=0.36),
    Part("machine", (0, 20), 0.0, 0.28, width=3 * _STEP + 1, height=0.36),
    Part("kernels", (10, 11, 12, 13, 15), 4 * _STEP, 0.28, width=3 * _STEP + 1, height=0.36),
)
_LOOK = {  # face, edge, text, line style
    "current": ("other", "other", "text", "solid"),
    "finished": ("sky", "sky", "text", "solid"),
    "later": ("paper", "limit", "limit", (0, (3, 2))),
}


def you_are_here(chapter: int) -> Picture:
    """The engine, one request's way through it from left to right, as far as chapter `chapter` has built it.

    Filled parts stand, the highlighted ones are this chapter's, dashed ones come later; the small numbers are chapters.
    """
    if not 0 <= chapter <= 99:
        raise ValueError(f"chapter={chapter}: a number from 0 to 99")
    fig, ax = canvas(width=9.2, height=2.15)
    ax.set(xlim=(-0.1, 7 * _STEP + 1.1), ylim=(0.05, 2.38), aspect="auto")
    ax.axis("off")
    for left, right in pairwise(PARTS[:8]):
        ax.add_patch(
            FancyArrowPatch(
                (left.x + 1.02, 1.31),
                (right.x - 0.02, 1.31),
                arrowstyle="-|>",
                mutation_scale=9,
                color=colour("limit"),
                linewidth=1,
                shrinkA=0,
                shrinkB=0,
            )
        )
    for part in PARTS:
        _box(ax, part, part.state(chapter))
    return picture(fig, _in_words(chapter))


def _box(ax, part: Part, state: str) -> None:
    face, edge, ink, line = _LOOK[state]
    ax.add_patch(
        FancyBboxPatch(
            (part.x, part.y),
            part.width,
            part.height,
            boxstyle="round,pad=0,rounding_size=0.08",
            mutation_aspect=1.0,
            facecolor=colour(face),
            edgecolor=colour(edge),
            linewidth=1.1,
            linestyle=line,
            alpha=0.55 if state == "finished" else 1.0,
        )
    )
    two_lines = "\n" in part.name
    ax.text(
        part.x + part.width / 2,
        part.y + part.height / 2,
        part.name,
        ha="center",
        va="center",
        linespacing=1.15,
        fontsize=9 if two_lines else 9.5,
        color=colour(ink),
        weight="bold" if state == "current" else "normal",
    )
    chapters = "  ".join(f"{c:02d}" for c in part.chapters)
    ax.text(part.x + part.width / 2, part.y - 0.04, chapters, ha="center", va="top", fontsize=7, color=colour("limit"))


def _in_words(chapter: int) -> str:
    plain = {part: part.name.replace("\n", " ") for part in PARTS}
    said = [
        (
            f"Map of the engine at chapter {chapter:02d}; a request runs from "
            f"{' to '.join(plain[part] for part in PARTS[:8])}."
        )
    ]
    for state, label in (("finished", "Already built"), ("current", "In this chapter"), ("later", "Still to come")):
        names = [plain[part] for part in PARTS if part.state(chapter) == state]
        said += [f"{label}: {', '.join(names)}."] * bool(names)
    return " ".join(said)
