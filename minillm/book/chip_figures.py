"""The drawings of what GPUs since Ampere changed: a tile's way, turns dealt to SMs, exponentials, launch gaps.
Built in chapter 11."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from minillm.book.style import COLOURS, Picture, canvas, colour, picture

# (the generation, its copy, whether operands pass through registers, its product, where the sums are)
_WAYS = (
    ("Ampere", "cp.async\n16 bytes a thread", True, "mma.sync\na warp", "registers"),
    ("Hopper", "TMA\none thread, a whole tile", False, "wgmma\n4 warps", "registers"),
    ("Blackwell", "TMA\none thread, a whole tile", False, "tcgen05.mma\none thread", "tensor memory"),
)


def tile_ways() -> Picture:
    """The way of one tile from memory to a tensor core, on three generations."""
    fig, ax = canvas(width=9.6, height=6.0)
    ax.set(xlim=(0, 15.4), ylim=(-0.7, 9.2))
    ax.axis("off")
    for x, name in ((0.9, "memory"), (5.6, "shared memory"), (9.4, "registers"), (13.7, "tensor core")):
        ax.text(x, 8.9, name, ha="center", fontsize=9.5, fontweight="bold")
    for row, (generation, copy, through, product, sums) in enumerate(_WAYS):
        y = 6.3 - 2.9 * row
        ax.text(0.0, y + 1.95, generation, fontsize=11, fontweight="bold")
        _box(ax, 0.2, y, 1.4, "A, B", "other")
        _box(ax, 4.9, y, 1.4, "tiles", "other")
        _box(ax, 13.0, y, 1.4, "A x B", "good")
        _arrow(ax, (1.75, y + 0.65), (4.75, y + 0.65), copy)
        if through:
            _box(ax, 8.7, y, 1.4, "tiles", "other")
            _arrow(ax, (6.45, y + 0.65), (8.55, y + 0.65), "ldmatrix")
            _arrow(ax, (10.25, y + 0.65), (12.85, y + 0.65), product)
        else:
            _arrow(ax, (6.45, y + 0.95), (12.85, y + 0.95), product)
        if sums == "registers":
            _box(ax, 8.7, y - 0.95, 1.4, "sums", "ours", 0.7)
            _arrow(ax, (12.9, y + 0.1), (10.25, y - 0.6), "")
        else:
            _box(ax, 12.6, y - 0.95, 2.2, "sums, in\ntensor memory", "ours", 0.7)
            _arrow(ax, (12.45, y - 0.6), (10.25, y - 0.6), "tcgen05.ld, at the end")
            _box(ax, 8.7, y - 0.95, 1.4, "result", "background", 0.7)
    told = "; ".join(
        f"{generation}: {copy.replace(chr(10), ', ')}; {'through registers; ' if through else ''}"
        f"{product.replace(chr(10), ', ')}; sums in {sums}"
        for generation, copy, through, product, sums in _WAYS
    )
    return picture(fig, f"The way of one tile from memory over shared memory to a tensor core. {told}.")


def dealt_out(schedules: Mapping[str, Sequence[Sequence[tuple[int, int, int]]]]) -> Picture:
    """Lanes of SMs, with the pieces (tile, first turn, end) that each computes, one schedule under the other."""
    shades = ("blue", "orange", "green", "sky", "purple", "red", "yellow", "grey")
    height = sum(0.32 * len(lanes) + 0.75 for lanes in schedules.values())
    fig, axes = canvas(width=9, height=height, rows=len(schedules), sharex=True, squeeze=False)
    most = max(sum(end - begin for _, begin, end in lane) for lanes in schedules.values() for lane in lanes)
    said = []
    for ax, (name, lanes) in zip(axes[:, 0], schedules.items()):
        busy = 0
        for y, lane in enumerate(lanes):
            at = 0
            for tile, begin, end in lane:
                ax.barh(
                    y,
                    end - begin,
                    left=at,
                    height=0.82,
                    color=COLOURS[shades[tile % len(shades)]],
                    edgecolor="white",
                    lw=1.2,
                )
                ink = colour("text") if shades[tile % len(shades)] in ("yellow", "sky") else "white"
                ax.text(at + (end - begin) / 2, y, tile, ha="center", va="center", fontsize=8, color=ink)
                at += end - begin
            busy += at
        longest = max(sum(end - begin for _, begin, end in lane) for lane in lanes)
        said.append(f"{name}: {longest} turns, SMs busy {busy / longest / len(lanes):.0%}")
        ax.set_yticks(range(len(lanes)), [f"SM {y}" for y in range(len(lanes))])
        ax.set(xlim=(0, most), ylim=(len(lanes) - 0.4, -0.6), title=said[-1])
        ax.tick_params(axis="y", length=0), ax.grid(visible=False)
    axes[-1, 0].set_xlabel("turns of the loop over k")
    return picture(fig, f"Turns of tiles on SMs, a lane for each SM, a colour for each tile. {'; '.join(said)}.")


def two_groups(cycles: Mapping[str, tuple[float, float]], tiles: int = 3) -> Picture:
    """Products and exponentials of tiles: one group of warps in turns, and two groups that alternate.

    cycles: name of the GPU -> (cycles of a tile's products, cycles of its exponentials).
    """
    fig, axes = canvas(width=9, height=1.35 * len(cycles) + 0.6, rows=len(cycles), sharex=True, squeeze=False)
    said, most = [], max(2 * tiles * (p + e) for p, e in cycles.values())
    for ax, (name, (product, exponential)) in zip(axes[:, 0], cycles.items()):
        alone, both = product + exponential, max(product, exponential)
        for at in range(2 * tiles):
            _bars(ax, 0, at * alone, product, exponential)
        for group in (0, 1):
            for at in range(tiles):
                start = (2 * at + group) * both
                _bars(ax, 1 + group, start, product, exponential)
        said.append(f"{name}: {alone:,.0f} cycles a tile in turns, {both:,.0f} in ping-pong, {alone / both:.2f} times")
        ax.set_yticks(range(3), ["one group", "group 1 of two", "group 2 of two"])
        ax.set(ylim=(2.6, -0.6), xlim=(0, most), title=said[-1])
        ax.tick_params(axis="y", length=0), ax.grid(visible=False)
    axes[-1, 0].set_xlabel("cycles")
    marks = [Patch(color=colour("ours"), label="products"), Patch(color=colour("other"), label="exponentials")]
    fig.legend(handles=marks, loc="outside lower center", ncols=2)
    return picture(fig, f"Timelines of {2 * tiles} tiles, products and exponentials. {'; '.join(said)}.")


def launch_gaps(bars: Mapping[str, Sequence[tuple[str, float, float]]], title: str) -> Picture:
    """A device's lane for each way of launching: (what, start, end) in µs, `what` is "kernel" or "fetch"."""
    fig, ax = canvas(width=9, height=0.6 * len(bars) + 1.3)
    shades, said = {"kernel": "ours", "fetch": "sky"}, []
    until = max(end for lane in bars.values() for _, _, end in lane)
    for y, (name, lane) in enumerate(bars.items()):
        ax.barh(y, until, height=0.7, color=colour("wasted"), alpha=0.18, zorder=0)
        for what, start, end in lane:
            ax.barh(y, end - start, left=start, height=0.7 if what == "kernel" else 0.35, color=colour(shades[what]),
                    edgecolor="white", lw=1)  # fmt: skip
        said.append(f"{name}: {max(end for _, _, end in lane):.1f} µs")
    ax.set_yticks(range(len(bars)), [f"{name}" for name in bars])
    ax.set(xlim=(0, until), ylim=(len(bars) - 0.5, -0.5), xlabel="time (µs)", title=title)
    ax.tick_params(axis="y", length=0), ax.grid(visible=False)
    marks = [
        Patch(color=colour("ours"), label="kernel computes"),
        Patch(color=colour("sky"), label="weights of the next one"),
    ]
    marks.append(Patch(color=colour("wasted"), alpha=0.18, label="nothing moves"))
    fig.legend(handles=marks, loc="outside lower center", ncols=3)
    return picture(fig, f"A device's lane under several ways of launching the same kernels. {'; '.join(said)}.")


def _bars(ax, y: int, start: float, product: float, exponential: float) -> None:
    for left, width, role in ((start, product, "ours"), (start + product, exponential, "other")):
        ax.barh(y, width, left=left, height=0.75, color=colour(role), edgecolor="white", lw=1)


def _box(ax, x: float, y: float, width: float, text: str, role: str, height: float = 1.3) -> None:
    style = "round,pad=0.02,rounding_size=0.12"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=colour(role), alpha=0.75, lw=0))
    ink = "white" if role in ("ours", "good") else colour("text")
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5, color=ink)


def _arrow(ax, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=colour("text"), lw=1.2))
    ax.text((start[0] + end[0]) / 2, max(start[1], end[1]) + 0.12, text, ha="center", va="bottom", fontsize=8.5)
