"""The drawings of matrix multiplication: a tile and its strips, waves, buffers, intensities, a cache's effect.
Built in chapter 11."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle

from minillm.book.style import Picture, canvas, colour, picture

Places = Sequence[tuple[int, int]]  # the row and the column of each program's tile, in the order of the programs
Turns = Sequence[tuple[float, float, float, float]]  # (load begins, load ends, product begins, product ends)


def tile_picture(size: int, tile: int, tile_k: int, program: int, turn: int) -> Picture:
    """A to the left of C, B above it; what `program` reads in all, and in this turn."""
    fig, ax = canvas(width=6.2, height=5.2)
    row, column = program // (size // tile) * tile, program % (size // tile) * tile
    gap, k = size * 0.12, turn * tile_k
    corners = {"A": (-size - gap, 0), "B": (0, -size - gap), "C": (0, 0)}
    strips = {"A": (0, row, size, tile), "B": (column, 0, tile, size), "C": (column, row, tile, tile)}
    now = {"A": (k, row, tile_k, tile), "B": (column, k, tile, tile_k), "C": (column, row, tile, tile)}
    for name, (x, y) in corners.items():
        ink = colour("ours" if name == "C" else "other")
        ax.add_patch(Rectangle((x, y), size, size, fc=colour("background"), ec=colour("limit"), lw=1))
        for (dx, dy, width, height), alpha in ((strips[name], 0.35), (now[name], 1)):
            ax.add_patch(Rectangle((x + dx, y + dy), width, height, facecolor=ink, alpha=alpha))
        ax.text(x + size / 2, y - size * 0.03, name, ha="center", va="bottom", fontweight="bold", fontsize=12)
    said = f"program {program} of 0 to {(size // tile) ** 2 - 1}, turn {turn} of 0 to {size // tile_k - 1}"
    counted = f"{2 * tile * size:,} numbers loaded\nfor {tile * tile:,} numbers of C"
    ax.text(-size / 2 - gap, -size / 2 - gap, counted, ha="center", va="center", fontsize=12)
    ax.set(xlim=(-size - 1.5 * gap, size + gap / 2), ylim=(size + gap / 2, -size - 2 * gap))
    ax.set(aspect="equal", title=said), ax.axis("off")
    return picture(fig, f"Matrices of {size} x {size} in tiles of {tile} x {tile}; {said}: {counted}.")


def wave_picture(orders: Mapping[int, Places], tiles: int, running: int, wave: int) -> Picture:
    """For each group height, the output in tiles, and the strips of A and B that the programs of one wave load."""
    fig, axes = canvas(width=10, height=3.7, cols=len(orders), squeeze=False)
    said = []
    for ax, (group, places) in zip(axes[0], orders.items()):
        now = places[wave * running : (wave + 1) * running]
        wanted = {row for row, _ in now}, {column for _, column in now}
        for number, (row, column) in enumerate(places):
            shade = "ours" if (row, column) in now else "sky" if number < wave * running else "background"
            ax.add_patch(Rectangle((column, row), 0.92, 0.92, facecolor=colour(shade)))
            ink = "white" if shade == "ours" else colour("text")
            ax.text(column + 0.46, row + 0.46, number, ha="center", va="center", fontsize=72 / tiles, color=ink)
        for at in range(tiles):
            for strip, corner, size in ((0, (-1.6, at), (1.2, 0.92)), (1, (at, -1.6), (0.92, 1.2))):
                ax.add_patch(Rectangle(corner, *size, fc=colour("other" if at in wanted[strip] else "background")))
        ax.text(-1.0, -0.3, "A", ha="center", fontweight="bold")
        ax.text(-0.5, -1.0, "B", va="center", fontweight="bold")
        said.append(f"groups of {group}: {len(wanted[0])} + {len(wanted[1])} strips")
        ax.set(xlim=(-1.8, tiles), ylim=(tiles, -1.8), aspect="equal", title=said[-1]), ax.axis("off")
    return picture(fig, f"{tiles} x {tiles} tiles, {running} at a time, wave {wave}. " + "; ".join(said) + ".")


def pipeline_picture(timelines: Mapping[int, Turns], load: float, product: float) -> Picture:
    """Loads and products of the loop, for each number of buffers."""
    fig, ax = canvas(width=9, height=2.0 + 0.32 * sum(timelines))
    lanes, said = [], []
    for count, timeline in timelines.items():
        top = len(lanes)
        for turn, (begins, ends, starts, done) in enumerate(timeline):
            bars = (top + turn % count, begins, ends, "other"), (top + count, starts, done, "ours")
            for lane, left, right, ink in bars:
                ax.barh(lane, right - left, left=left, color=colour(ink), edgecolor="white", lw=1, height=0.8)
                ax.text((left + right) / 2, lane, turn, ha="center", va="center", color="white", fontsize=8)
        lanes += [*(f"load to buffer {i}" for i in range(count)), "products", ""]
        pace = max(product, (load + product) / count)
        said.append(f"{count} buffer{'s' * (count > 1)}: {pace:.3g} per turn, products busy {product / pace:.0%}")
    ax.set_yticks(range(len(lanes)), lanes), ax.tick_params(axis="y", length=0), ax.grid(False, axis="y")
    ax.set(ylim=(len(lanes) - 1.4, -0.6), xlim=(0, len(timeline) * (load + product)))
    ax.set(xlabel="time", title=" · ".join(said))
    return picture(fig, f"Timelines of {len(timeline)} turns of the loop. {'; '.join(said)}.")


def offered(rows: Sequence[int], products: Mapping[str, Sequence[float]], ridges: Mapping[str, float]) -> Picture:
    """FLOP/byte that products offer, against their rows, and the ridge points of GPUs."""
    fig, ax = canvas(width=8, height=3.7)
    for (name, intensity), ink, width in zip(products.items(), ("ours", "good", "other", "purple"), (7, 5, 3, 1.2)):
        ax.plot(rows, intensity, color=colour(ink), lw=width, label=name)  # they lie on one another at first
    _ridge_lines(ax, ridges)
    ax.set(xscale="log", yscale="log", xlabel="rows m (tokens of the step)", ylabel="intensity (FLOP/byte)")
    ax.set_title("Llama-3.1-8B, 16 bits: the intensity that products offer")
    ax.legend(loc="lower right")
    told = "; ".join(f"{name}: {intensity[0]:.1f} to {intensity[-1]:,.0f}" for name, intensity in products.items())
    return picture(
        fig,
        f"Arithmetic intensity of products against the number of rows, from {rows[0]} to {rows[-1]:,}. {told} "
        f"FLOP/byte. Ridge points: {', '.join(f'{name} {ridge:.0f}' for name, ridge in ridges.items())}.",
    )


def taken(sides: Sequence[int], counted: Mapping[int, float], ridges: Mapping[str, float]) -> Picture:
    """FLOP/byte loaded against the side of a square tile: half the side in 16 bits, and what was counted."""
    fig, ax = canvas(width=8, height=3.6)
    ax.plot(sides, [side / 2 for side in sides], "--", color=colour("prediction"), label="on paper: T / 2")
    ax.plot(list(counted), list(counted.values()), "o", ms=8, color=colour("ours"), label="counted")
    _ridge_lines(ax, ridges)
    ax.set(xscale="log", yscale="log", xlabel="side T of a square tile", ylabel="FLOP per byte loaded")
    ax.set(ylim=(0.3, 1000), title="16 bits: the intensity that a tile reaches")
    ax.set_xticks(sides, sides), ax.minorticks_off(), ax.legend(loc="lower right")
    told = ", ".join(f"{value:g} at {side}" for side, value in counted.items())
    return picture(
        fig,
        f"FLOP per byte loaded against the side of a square tile. On paper half the side, up to {max(sides) / 2:g}; "
        f"counted {told}. The lowest ridge point is at {min(ridges.values()):.0f}.",
    )


def cache_effect(by_group: Mapping[int, float], by_size: Mapping[int, Sequence[float]], lines: Mapping) -> Picture:
    """Left: GB from memory against the group. Right: FLOP per byte from memory, row by row and in groups of 8.

    lines: "without a cache" and "each number once" in GB; "ridge" and "no cache" in FLOP per byte.
    """
    fig, (left, right) = canvas(width=10, height=3.7, cols=2)
    groups, sizes = list(by_group), list(by_size)
    left.plot(groups, list(by_group.values()), "o-", color=colour("ours"), label="from memory")
    left.axhline(lines["without a cache"], color=colour("prediction"), ls="--", lw=1.2, label="without a cache")
    left.axhline(lines["each number once"], color=colour("limit"), lw=1.4, label="each number once")
    left.set(xscale="log", yscale="log", xlabel="rows of tiles in a group", ylabel="GB", ylim=(0.18, 27))
    left.set_title("8,192 x 8,192 x 8,192"), left.legend(loc="center", bbox_to_anchor=(0.5, 0.28))
    left.set_xticks(groups, groups), left.set_yticks((0.25, 1, 4, 16), (0.25, 1, 4, 16)), left.minorticks_off()
    said = []
    for at, (name, ink) in enumerate((("row by row", "wasted"), ("groups of 8", "ours"))):
        intensity = [values[at] for values in by_size.values()]
        right.plot(sizes, intensity, "o-", color=colour(ink), label=name)
        said.append(f"{name} {intensity[0]:,.0f} to {intensity[-1]:,.0f}")
    right.axhline(lines["ridge"], color=colour("limit"), lw=1.2)
    right.text(sizes[0], lines["ridge"] * 1.08, "ridge point of an A100", fontsize=8.5)
    right.axhline(lines["no cache"], color=colour("prediction"), ls="--", lw=1.2, label="T / 2, without a cache")
    right.set(xscale="log", yscale="log", xlabel="size", ylabel="FLOP per byte from memory")
    right.set_title("Tile, order and cache together"), right.legend(loc="upper right")
    right.set_xticks(sizes, [f"{size // 1024}k" for size in sizes])
    right.set_yticks((64, 128, 512, 2048), (64, 128, 512, "2,048")), right.minorticks_off()
    best = min(by_group, key=by_group.get)
    return picture(
        fig,
        f"Left: bytes from memory of a product of 8,192 against the group, least at {best}. Right: FLOP per byte from "
        f"memory, sizes {sizes[0]:,} to {sizes[-1]:,}: {'; '.join(said)}; the ridge point is at {lines['ridge']:.0f}.",
    )


def _ridge_lines(ax, ridges: Mapping[str, float]) -> None:
    """The ridge points of GPUs, lowest first, named in the right margin."""
    for i, (name, ridge) in enumerate(sorted(ridges.items(), key=lambda item: item[1])):
        nudge = 2.5 * (i - (len(ridges) - 1) / 2) / 1.5
        ax.axhline(ridge, color=colour("limit"), lw=0.9)
        ax.annotate(f"{name}: {ridge:.0f}", (1, ridge), (5, nudge), xycoords=ax.get_yaxis_transform(),
                    textcoords="offset points", va="center", fontsize=8)  # fmt: skip
