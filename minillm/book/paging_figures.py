"""The drawings of chapter 06: tables and a pool, memory maps, block sizes, beams, a crossover. Built in chapter 06."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from minillm.book.style import Picture, canvas, colour, picture

# What a KV slot of a memory map can be, by number: 0 is live.
SLOT_INKS = {
    "live": colour("ours"),
    "reserved": colour("other"),
    "internal waste": colour("wasted"),
    "admitted now": colour("good"),
    "free": colour("background"),
}
REQUEST_SHADES = dict(zip("ABCD", map(colour, ("sky", "orange", "green", "purple"))))


def table_and_pool() -> Picture:
    """The idea: tables name blocks of a pool; a shared block is copied when one of its owners writes."""
    fig, (tables, fork) = canvas(width=6.4, height=5.0, rows=2)
    for ax, title in ((tables, "Two block tables, one pool"), (fork, "Copy on write: B, a fork of A, writes")):
        ax.set(xlim=(-0.1, 13.3), ylim=(-1.4, 4.6), title=title)
        ax.axis("off")
    _pool(tables, {1: ("B", 4), 2: ("A", 4), 4: ("A", 1), 5: ("A", 4), 6: ("B", 2)})
    _table(tables, 0.6, "A", {2: "sky", 5: "sky", 4: "sky"})
    _table(tables, 8.0, "B", {1: "orange", 6: "orange"})
    _pool(fork, {1: ("shared", 4), 2: ("A", 2), 3: ("B", 3)})
    _table(fork, 0.6, "A", {1: "good", 2: "sky"})
    _table(fork, 8.0, "B", {1: "good", 3: "orange"})
    fork.add_patch(Rectangle((_left(3) + 0.96, 0), 0.44, 0.9, facecolor="none", edgecolor=colour("text"), lw=2.0))
    _arrow(fork, (_left(2) + 0.5, -0.1), (_left(3) + 0.5, -0.1), colour("text"), bend=0.45)
    fork.text((_left(2) + _left(3)) / 2 + 0.5, -1.15, "copy", ha="center", fontsize=11)
    return picture(
        fig,
        "Above: the table of request A lists blocks 2, 5 and 4 of a pool of six, that of request B blocks 1 and 6; "
        "block 3 is free, and only the last block of each request has empty KV slots. Below, copy on write: A and its "
        "fork B share the full block 1; the block that was not full, 2, stays A's, and B writes into a copy, block 3.",
    )


def _left(block: int) -> float:
    return 2.22 * (block - 1)


def _pool(ax, blocks: Mapping[int, tuple[str, int]]) -> None:
    """Six blocks of four KV slots in a row; `blocks`: block -> (whose, how many are filled), the others are free."""
    for block in range(1, 7):
        whose, filled = blocks.get(block, ("", 0))
        shade = colour("good") if whose == "shared" else REQUEST_SHADES.get(whose, colour("background"))
        for i in range(4):
            face = shade if i < filled else colour("background")
            ax.add_patch(Rectangle((_left(block) + 0.48 * i, 0), 0.44, 0.9, facecolor=face))
        ax.text(_left(block) + 1.75, -0.5, block, ha="center", va="center", fontsize=11, color=colour("limit"))


def _table(ax, x: float, name: str, blocks: Mapping[int, str]) -> None:
    """The table of a request; `blocks`: block -> the colour of the arrow to it."""
    ax.text(x, 3.9, name, va="center", fontsize=13, fontweight="bold")
    for i, (block, role) in enumerate(blocks.items()):
        left = x + 0.75 + 1.2 * i
        ax.add_patch(Rectangle((left, 3.4), 1.0, 1.0, facecolor="white", edgecolor=colour("text"), lw=1.2))
        ax.text(left + 0.5, 3.88, block, ha="center", va="center", fontsize=12)
        _arrow(ax, (left + 0.5, 3.35), (_left(block) + 0.94, 0.95), colour(role))


def _arrow(ax, start, end, ink: str, bend: float = 0.0) -> None:
    style = f"arc3,rad={bend}"
    ax.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=ink, lw=1.6, connectionstyle=style)
    )


def memory_maps(maps: Mapping[str, Sequence[int]], alt: str, width: int = 256) -> Picture:
    """Each map: title -> for each KV slot its state, an index into SLOT_INKS; from top to bottom, row by row."""
    fig, axes = canvas(width=9.5, height=3.9, cols=len(maps))
    inks = np.array([to_rgb(ink) for ink in SLOT_INKS.values()])
    for ax, (title, states) in zip(axes, maps.items()):
        image = np.ones((-(-len(states) // width) * width, 3))
        image[: len(states)] = inks[np.asarray(states)]
        ax.imshow(image.reshape(-1, width, 3), aspect="auto", interpolation="nearest")
        ax.grid(visible=False)
        ax.set(xticks=(), yticks=(), xlabel=f"{width} KV slots in a row")
        ax.set_title(title, fontsize=9.5)
    patches = [Patch(color=ink, label=state) for state, ink in SLOT_INKS.items()]
    fig.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    return picture(fig, alt)


def pool_and_tables(
    blocks: Mapping[int, tuple[str, Sequence[str]]], tables: Mapping[str, Sequence[int]], told: Mapping[str, str],
    title: str, block_size: int = 4, columns: int = 4, num_blocks: int = 12,
) -> Picture:  # fmt: skip
    """Left the pool, block -> (request, its words); right the block table of each request, or `told` of it."""
    fig, (left, right) = canvas(width=9.5, height=2.4, cols=2, width_ratios=[2.3, 1])
    for block in range(1, num_blocks + 1):
        x, y = (block - 1) % columns * (block_size + 0.9), (block - 1) // columns
        left.text(x - 0.08, y, block, ha="right", va="center", fontsize=8, color=colour("limit"))
        request, words = blocks.get(block, ("", ()))
        for i in range(block_size):
            shade = REQUEST_SHADES[request] if i < len(words) else colour("background")
            left.barh(y, 0.96, left=x + i, height=0.8, align="center", color=shade)
        for i, word in enumerate(words):
            left.text(x + i + 0.48, y, word, ha="center", va="center", fontsize=7)
    left.set(xlim=(-0.6, columns * (block_size + 0.9)), ylim=(2.6, -0.6), title="The pool")
    for row, (request, block_table) in enumerate(tables.items()):
        right.text(0, row, request, va="center", weight="bold")
        for i, block in enumerate(block_table):
            right.text(0.9 + 0.95 * i, row, block, ha="center", va="center", fontsize=9,
                       bbox={"boxstyle": "square,pad=0.3", "fc": REQUEST_SHADES[request], "ec": "none"})  # fmt: skip
        right.text(0.6, row, told[request], va="center", color=colour("limit"))
    right.set(xlim=(0, 8.5), ylim=(3.6, -0.6), title=title)
    for ax in (left, right):
        ax.axis("off")
    said = "; ".join(f"{request} {list(table) or told[request]}" for request, table in tables.items())
    return picture(
        fig, f"{num_blocks} blocks of {block_size} KV slots, and {len(tables)} block tables. {title}: {said}."
    )


def block_sizes(
    sizes: Sequence[int],
    live: Sequence[float],
    predicted: Sequence[float],
    running: Sequence[float],
    pieces: Mapping[str, tuple[float, float]],
) -> Picture:
    """Live share (%) and requests at a time over block size; `pieces`: name -> both, of a contiguous cache."""
    fig, (left, right) = canvas(width=9.5, height=3.5, cols=2)
    for ax, values, which in ((left, live, 0), (right, running, 1)):
        for name, both in pieces.items():
            ax.axhline(both[which], color=colour("wasted"), lw=1.2, ls="--")
            ax.text(sizes[0], both[which] * 1.02, f"one piece: {name}", va="bottom", fontsize=8.5)
        if ax is left:
            ax.plot(sizes, predicted, color=colour("prediction"), lw=7, alpha=0.45, label="predicted")
        ax.plot(sizes, values, "o-", color=colour("ours"), lw=1.6, label="blocks, counted")
        ax.set(xscale="log", xlabel="block size (tokens)")
        ax.set_xticks(sizes, sizes)
        ax.minorticks_off()
    left.set(ylabel="live share of memory (%)", ylim=(0, 104), title="Memory that holds tokens")
    left.legend(loc="lower left", bbox_to_anchor=(0, 0.54))
    right.set(ylabel="requests at a time (mean)", ylim=(0, None), title="Requests that run")
    return picture(
        fig,
        f"Live share of memory and requests at a time against block size: from {live[0]:.0f}% and {running[0]:.0f} "
        f"with blocks of {sizes[0]} to {live[-1]:.0f}% and {running[-1]:.0f} with blocks of {sizes[-1]}, on the "
        "predicted curve. The contiguous caches lie below.",
    )


def beam_tables(tables: Sequence[Sequence[int]], owners: Mapping[int, int] | Sequence[int], told: str) -> Picture:
    """The block tables of beams, one a row; a block with several owners is green."""
    fig, ax = canvas(width=9.5, height=2.0)
    for row, block_table in enumerate(tables):
        for column, block in enumerate(block_table):
            shade, ink = ("good", "white") if owners[block] > 1 else ("sky", colour("text"))
            ax.barh(row, 0.94, left=column - 0.47, height=0.86, color=colour(shade))
            ax.text(column, row, block, ha="center", va="center", fontsize=9.5, color=ink)
    ax.set(ylim=(len(tables) - 0.5, -0.5), xlim=(-0.6, 8.6))
    ax.set(xlabel="entry of the table (16 tokens each)", ylabel="beam", title=told)
    ax.set_xticks(range(9))
    ax.set_yticks(range(len(tables)), range(1, len(tables) + 1))
    ax.grid(visible=False)
    return picture(fig, f"Block tables of {len(tables)} beams; shared blocks are marked. {told}.")


def crossover(again: float, moved: float, starts: float, name: str) -> Picture:
    """µs to recompute a token, and to move it out and in, over the tokens in one copy; `starts`: µs of all starts."""
    fig, ax = canvas(width=7.5, height=3)
    x = np.geomspace(1, 512, 100)
    at = starts / (again - moved) if again > moved else float("inf")
    ax.plot(x, 0 * x + again, color=colour("other"), label="recompute")
    ax.plot(x, moved + starts / x, color=colour("ours"), label="swap")
    if at <= x[-1]:
        ax.plot(at, again, "o", ms=8, color=colour("text"))
        ax.text(at * 1.1, again * 1.25, f"{at:.0f} tokens")
    ax.set(xscale="log", yscale="log", xlabel="tokens that one copy moves", ylabel="time per token (µs)",
           title=f"{name}, by the cost model")  # fmt: skip
    ax.set_xticks([1, 4, 16, 64, 256], [1, 4, 16, 64, 256])
    ax.minorticks_off()
    ax.legend()
    return picture(
        fig, f"Time per token, recomputed and swapped, against tokens in one copy, {name}: equal at {at:.0f} tokens."
    )


def attention_by_block(seconds: Mapping[int, Sequence[float]], floor: float) -> Picture:
    """Times of decode attention in one layer over the block size; `floor`: seconds to read all keys and values."""
    fig, ax = canvas(width=6.5, height=3)
    sizes, limit = list(seconds), floor * 1e3
    low, middle, high = np.array([np.percentile(times, (25, 50, 75)) * 1e3 for times in seconds.values()]).T
    ax.errorbar(sizes, middle, [middle - low, high - middle], fmt="o-", capsize=2, color=colour("ours"))
    ax.axhline(limit, color=colour("limit"), ls="--", lw=1.2)
    ax.text(sizes[0], limit * 0.93, "reading all keys and values once", va="top", fontsize=9)
    ax.set(xscale="log", yscale="log", xlabel="block size (tokens)", ylabel="time for one layer (ms)",
           ylim=(limit / 2.5, None), title="Decode attention, 16 requests of 512 tokens, float32")  # fmt: skip
    ax.set_xticks(sizes, sizes)
    ax.minorticks_off()
    return picture(
        fig,
        "Milliseconds for attention in one layer against block size, over the time to read all keys and values once.",
    )


def back_in_place(
    measured: Mapping[str, Mapping[int, float]], tokens: Sequence[float], predictions: Mapping[str, Sequence[float]]
) -> Picture:
    """Seconds to bring a preempted request back. measured: way -> tokens -> seconds; predictions: over `tokens`."""
    fig, ax = canvas(width=8.2, height=3.6)
    for (way, seconds), role in zip(measured.items(), ("other", "ours")):
        ax.plot(list(seconds), [s * 1e3 for s in seconds.values()], "o", color=colour(role), label=f"{way}, measured")
    for name, seconds in predictions.items():
        ax.plot(tokens, np.asarray(seconds) * 1e3, "--", color=colour("prediction"), lw=1.4)
        ax.text(tokens[-1] * 1.08, seconds[-1] * 1e3, name, va="center", fontsize=8.5)
    ax.set(xscale="log", yscale="log", xlabel="tokens the request holds", ylabel="time (ms)", xlim=(13, 24_000),
           title="Back in place after a preemption (4 layers of SmolLM2-135M, float32)")  # fmt: skip
    ax.set_xticks([16, 64, 256, 1024, 4096], ["16", "64", "256", "1,024", "4,096"])
    ax.minorticks_off()
    ax.legend()
    return picture(
        fig,
        "Milliseconds to bring a preempted request back against the tokens it holds, recomputed and swapped, measured "
        "over predictions; one more dashed line for a slow link.",
    )
