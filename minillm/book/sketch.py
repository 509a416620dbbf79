"""Boxes and arrows, the vocabulary of the book's schematic drawings. Built in chapter 00."""

from __future__ import annotations

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minillm.book.style import canvas, colour

_DARK = ("ours", "wasted", "good", "blue", "red", "green")  # a label on these is white


def sheet(width: float, height: float, across: float, up: float):
    """`(fig, ax)` without axes: `width` by `height` inches, coordinates from 0 to `across` and from 0 to `up`."""
    fig, ax = canvas(width=width, height=height)
    ax.set(xlim=(0, across), ylim=(0, up))
    ax.axis("off")
    return fig, ax


def box(ax, x: float, y: float, width: float, height: float, text: str, role: str = "background", size: float = 10):
    """A rounded box around its centre (x, y), with a label."""
    ax.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=colour(role), edgecolor=colour("limit"), linewidth=0.8, zorder=2,
        )
    )  # fmt: skip
    ink = colour("paper" if role in _DARK else "text")
    ax.text(x, y, text, ha="center", va="center", fontsize=size, color=ink, zorder=3, linespacing=1.25)


def arrow(ax, start: tuple[float, float], end: tuple[float, float], role: str = "limit", bend: float = 0.0):
    """An arrow from point to point; `bend` curves it."""
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=12, linewidth=1.3, color=colour(role), shrinkA=0, shrinkB=0,
            connectionstyle=f"arc3,rad={bend}", zorder=1,
        )
    )  # fmt: skip


def path(ax, points: list[tuple[float, float]], role: str = "limit"):
    """A line through points at right angles, with an arrowhead on its last stretch."""
    xs, ys = zip(*points[:-1], strict=True)
    ax.plot(xs, ys, color=colour(role), lw=1.3, solid_capstyle="butt", zorder=1)
    arrow(ax, points[-2], points[-1], role)
