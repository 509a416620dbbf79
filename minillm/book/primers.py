"""The drawings of the primers: views of one memory, float formats, an automaton, a profile. Built in chapter 90."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from minillm.book.style import Picture, canvas, colour, picture

_HUES = ("blue", "orange", "green", "purple")


def memory_and_views(memory: torch.Tensor, views: Mapping[str, torch.Tensor], *, chunk: int) -> Picture:
    """A strip of memory, and each two-dimensional view of it as a grid; equal colours are the same cell of memory.

    chunk: after how many cells the hue changes, so that rows of the original tensor can be told apart.
    """
    tallest = max(view.shape[0] for view in views.values())
    fig, axes = canvas(
        width=9.6,
        height=3.4,
        rows=2,
        cols=len(views),
        height_ratios=[1, tallest],
        width_ratios=[view.shape[1] for view in views.values()],
    )
    grid = axes[0, 0].get_gridspec()
    for ax in axes[0]:
        ax.remove()
    strip = fig.add_subplot(grid[0, :])
    _cells(strip, [list(range(memory.numel()))], chunk, 1)
    strip.set_title("memory: one row of cells, numbered by address", fontsize=10)
    for ax, (name, view) in zip(axes[1], views.items(), strict=True):
        _cells(ax, addresses(view), chunk, tallest)
        ax.set_title(name, fontsize=10, family="monospace")
        ax.text(0.04, view.shape[0] + 0.1, f"strides {tuple(view.stride())}", va="top", fontsize=9)
    words = "; ".join(f"{name} shows addresses {addresses(view)}" for name, view in views.items())
    return picture(fig, f"One strip of memory and several views of it, each cell labelled with its address: {words}.")


def addresses(view: torch.Tensor) -> list[list[int]]:
    """Where in memory each element of a two-dimensional view lies: offset + i * stride(0) + j * stride(1)."""
    rows, cols = view.shape
    return [[view.storage_offset() + i * view.stride(0) + j * view.stride(1) for j in range(cols)] for i in range(rows)]


def _cells(ax, numbers: Sequence[Sequence[int]], chunk: int, height: int) -> None:
    for i, row in enumerate(numbers):
        for j, address in enumerate(row):
            hue = colour(_HUES[address // chunk % len(_HUES)])
            shade = 0.25 + 0.5 * (address % chunk) / max(1, chunk - 1)
            ax.add_patch(Rectangle((j + 0.04, i + 0.04), 0.92, 0.92, facecolor=hue, alpha=shade))
            ax.text(j + 0.5, i + 0.5, str(address), ha="center", va="center", fontsize=9.5)
    ax.set(xlim=(0, max(map(len, numbers))), ylim=(height, 0), aspect="equal", anchor="NW", xticks=[], yticks=[])
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(False)


def float_formats(dtypes: Sequence[torch.dtype], *, near: float = 256.0, width: float = 8.0) -> Picture:
    """What the bits of each format are, how far it reaches, and which numbers it has from `near` on."""
    fig, (bits, reach, ticks) = canvas(width=10, height=2.7, cols=3, width_ratios=[1.15, 1, 1.15])
    names = []
    for row, dtype in enumerate(dtypes):
        info = torch.finfo(dtype)
        mantissa = -round(math.log2(info.eps))
        names.append(str(dtype).removeprefix("torch."))
        _bits(bits, row, {"other": 1, "ours": info.bits - 1 - mantissa, "good": mantissa})
        low, high = math.log10(info.tiny), math.log10(info.max)
        reach.barh(row, high - low, left=low, height=0.42, color=colour("sky"))
        largest = f"{info.max:,.0f}" if info.max < 1e6 else f"{info.max:.3g}"
        reach.text(high, row - 0.3, f"up to {largest}", ha="right", va="bottom", fontsize=8.5)
        step = info.eps * 2.0 ** math.floor(math.log2(near))
        if step < width / 400:
            ticks.add_patch(Rectangle((near, row - 0.21), width, 0.42, facecolor=colour("ours")))
        else:
            ticks.vlines(
                [near + i * step for i in range(int(width / step) + 1)],
                row - 0.21,
                row + 0.21,
                color=colour("ours"),
                linewidth=1,
            )
        ticks.text(
            near,
            row - 0.3,
            f"step {step:.2g}" if step < 0.01 else f"step {step:g}",
            ha="left",
            va="bottom",
            fontsize=8.5,
        )
    for ax, title in (
        (bits, "bits: sign, exponent, mantissa"),
        (reach, "range: powers of ten"),
        (ticks, f"every number from {near:g} to {near + width:g}"),
    ):
        ax.set(ylim=(len(dtypes) - 0.5, -0.7), title=title)
        ax.set_yticks(range(len(dtypes)), names if ax is bits else [""] * len(dtypes), family="monospace")
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False, axis="y")
        ax.title.set_fontsize(10)
    reach.set(xlim=(-42, 42))
    bits.set(xlim=(0, 32.5), xticks=[0, 8, 16, 24, 32])
    bits.grid(visible=False)
    return picture(
        fig,
        f"Three panels for {', '.join(names)}: the split of the bits into sign, exponent and mantissa; "
        "the range from the smallest normal number to the largest; and tick marks at all the numbers between "
        f"{near:g} and {near + width:g}.",
    )


def _bits(ax, row: int, parts: Mapping[str, int]) -> None:
    left = 0
    for role, count in parts.items():
        for i in range(count):
            ax.add_patch(Rectangle((left + i + 0.06, row - 0.21), 0.88, 0.42, facecolor=colour(role)))
        if count > 1:
            ax.text(left + count / 2, row - 0.3, str(count), ha="center", va="bottom", fontsize=8.5)
        left += count


def automaton(
    places: Mapping[int, tuple[float, float]], arrows: Mapping[tuple[int, int], str], accepting: Sequence[int], alt: str
) -> Picture:
    """States as circles (double where the text may end), labelled arrows for what may be read; state 0 is the start."""
    fig, ax = canvas(width=7.2, height=2.0)
    for (start, end), label in arrows.items():
        (x0, y0), (x1, y1) = places[start], places[end]
        if start == end:
            loop = FancyArrowPatch(
                (x0 - 0.16, y0 + 0.25), (x0 + 0.16, y0 + 0.25), connectionstyle="arc3,rad=-1.9", shrinkA=0, shrinkB=0
            )
            text = (x0, y0 + 0.6)
        else:
            bend = 0.0 if y0 == y1 and abs(x1 - x0) < 1.6 else 0.28
            loop = FancyArrowPatch((x0, y0), (x1, y1), connectionstyle=f"arc3,rad={bend}", shrinkA=20, shrinkB=20)
            text = ((x0 + x1) / 2, (y0 + y1) / 2 + (0.09 if not bend else -0.5 * bend * abs(x1 - x0) - 0.06))
        loop.set(arrowstyle="-|>", mutation_scale=12, color=colour("limit"), linewidth=1.2)
        ax.add_patch(loop)
        ax.text(
            *text,
            label,
            ha="center",
            va="bottom" if text[1] >= min(y0, y1) else "top",
            fontsize=10,
            family="monospace",
            color=colour("red"),
        )
    for state, (x, y) in places.items():
        ends = state in accepting
        ax.add_patch(Circle((x, y), 0.28, facecolor="white", edgecolor=colour("ours"), linewidth=1.6))
        if ends:
            ax.add_patch(Circle((x, y), 0.225, facecolor="#D6EAF8", edgecolor=colour("ours"), linewidth=1.2))
        ax.text(x, y, str(state), ha="center", va="center", fontsize=11)
    x, y = places[0]
    ax.add_patch(
        FancyArrowPatch(
            (x - 0.75, y),
            (x - 0.29, y),
            arrowstyle="-|>",
            mutation_scale=12,
            color=colour("limit"),
            linewidth=1.2,
            shrinkA=0,
            shrinkB=0,
        )
    )
    ax.set(xlim=(x - 0.85, max(p[0] for p in places.values()) + 0.45), ylim=(-0.78, 0.88), aspect="equal")
    ax.axis("off")
    return picture(fig, alt)


def flame_chart(events: Sequence, *, roles: Mapping[str, str], alt: str) -> Picture:
    """Operations of a profile over time, what calls above what is called. `roles`: name -> colour or role;
    the rest is grey.

    events: what `torch.profiler.profile(...).events()` holds, those of one stretch of time.
    """
    origin = min(event.time_range.start for event in events)
    fig, ax = canvas(width=9.6, height=2.5)
    total = max(event.time_range.end for event in events) - origin
    events = [event for event in events if event.time_range.elapsed_us() > total / 500]  # thinner than a line
    depths = [_depth(event) for event in events]
    for event, depth in zip(events, depths, strict=True):
        left, length = event.time_range.start - origin, event.time_range.elapsed_us()
        name = event.name.removeprefix("aten::")
        shade = colour(roles.get(name, "background"))
        ax.add_patch(
            Rectangle((left, depth - min(depths)), length, 0.86, facecolor=shade, edgecolor="white", linewidth=0.6)
        )
        if length > total * 0.0078 * len(name):
            ax.text(
                left + length / 2,
                depth - min(depths) + 0.43,
                name,
                ha="center",
                va="center",
                fontsize=8,
                color="white" if name in roles else colour("text"),
            )
    ax.set(
        xlim=(0, total),
        ylim=(max(depths) - min(depths) + 1, -0.05),
        yticks=[],
        xlabel="microseconds since the step began",
    )
    ax.set_title("time runs to the right, calls go down", fontsize=10)
    ax.grid(visible=False, axis="y")
    return picture(fig, alt)


def _depth(event) -> int:
    depth = 0
    while event.cpu_parent is not None:
        event, depth = event.cpu_parent, depth + 1
    return depth
