"""The drawings of chapter 07: a chain of hashes, a life of blocks, hits over sizes, an agent's loop, a lifetime.
Built in chapter 07."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minillm.book.style import Picture, canvas, colour, picture

CACHED = "#D6E6F2"  # free, and still holding what its hash stands for


def chain_and_pool() -> Picture:
    """The idea: B finds the blocks of A that have the same hash, and computes from the first other block on."""
    fig, ax = canvas(width=6.4, height=4.6)
    ax.set(xlim=(0, 12.6), ylim=(-0.3, 8.4))
    ax.axis("off")
    for y, name, words, ink in (
        (6.3, "A", ("You are", "a helper.", "Hi, Tom"), "ours"),
        (0.9, "B", ("You are", "a helper.", "Hi, Mia"), "other"),
    ):
        ax.text(0.1, y + 0.5, name, fontsize=15, fontweight="bold", va="center")
        for i, text in enumerate(words):
            x = 1.0 + 4.0 * i
            _box(ax, x, y, 3.0, 1.0, text, ink if i == 2 else "good")
            label = f"hash {i}" if i < 2 else f"hash 2{name}"
            ax.text(x + 1.5, y + (1.45 if name == "A" else -0.45), label, ha="center", va="center", fontsize=11)
            if i:
                _arrow(ax, (x - 0.95, y + 0.5), (x - 0.05, y + 0.5), colour("text"))
    for i, block in enumerate((4, 1, 6)):
        x = 1.0 + 4.0 * i
        _box(ax, x + 0.4, 3.6, 2.2, 1.0, f"block {block}", "ours" if i == 2 else "good", alpha=0.75)
        _arrow(ax, (x + 1.5, 6.2), (x + 1.5, 4.7), colour("text"))
        if i < 2:
            _arrow(ax, (x + 1.5, 2.0), (x + 1.5, 3.5), colour("good"))
            ax.text(x + 1.75, 2.75, "hit", fontsize=11, va="center")
        else:
            ax.text(x + 1.5, 2.75, "no such hash:\ncompute", fontsize=11, va="center", ha="center")
    return picture(
        fig,
        "Request A has three blocks of tokens, each with a hash of its tokens and of the hash before; the pool keeps "
        "them in blocks 4, 1 and 6. Request B begins with the same two blocks of tokens: their hashes are found, and "
        "it owns blocks 4 and 1 too. Its third hash differs, so B computes from there on.",
    )


class BlockState(NamedTuple):
    """One block at one moment: its hash ("" if empty), its owners, its place in the queue of free blocks (0: none)."""

    label: str
    owners: int
    place: int


def moments(rows: Sequence[tuple[str, Sequence[BlockState]]]) -> Picture:
    """What the blocks hold after each event: event -> the state of every block."""
    fig, ax = canvas(width=9.5, height=0.55 * len(rows) + 0.7)
    for y, (_, blocks) in enumerate(rows):
        for x, block in enumerate(blocks):
            shade = colour("ours") if block.owners else CACHED if block.label else "#FFFFFF"
            ax.barh(y, 0.94, left=x, height=0.82, color=shade, edgecolor=colour("limit"), linewidth=0.6)
            ink = "white" if block.owners else colour("text")
            ax.text(x + 0.47, y - 0.12, block.label or "empty", ha="center", va="center", color=ink, fontsize=10)
            below = f"{block.owners} owner{'s' * (block.owners > 1)}" if block.owners else f"no. {block.place} in queue"
            ax.text(x + 0.47, y + 0.22, below, ha="center", va="center", color=ink, fontsize=8)
    ax.set_yticks(range(len(rows)), [event for event, _ in rows])
    ax.set_xticks([i + 0.47 for i in range(len(rows[0][1]))], range(len(rows[0][1])))
    ax.set(
        xlabel="block",
        ylim=(len(rows) - 0.5, -0.5),
        title="Owned (blue), free and cached (pale), free and empty (white)",
    )
    ax.grid(visible=False)
    told = "; ".join(
        f"{event}: "
        + ", ".join(f"{block.label or 'empty'} ({block.owners or f'no. {block.place}'})" for block in blocks)
        for event, blocks in rows
    )
    return picture(fig, f"Blocks with their owners, or their place in the queue. {told}.")


def hits(
    sizes: Sequence[int], shares: Mapping[str, Mapping[int, Sequence[float]]], endless: Mapping[int, float], knee: float
) -> Picture:
    """Share of prompt tokens found (%) over cache size; `shares`: policy -> shared tokens -> a share for each size."""
    looks = (("prediction", "--"), ("ours", "o-"), ("wasted", "s:"))
    fig, axes = canvas(width=10, height=3.6, cols=len(endless), sharey=True)
    axes = np.atleast_1d(axes)
    for ax, (shared, limit) in zip(axes, endless.items()):
        for (policy, curves), (role, line) in zip(shares.items(), looks):
            ax.plot(sizes, curves[shared], line, color=colour(role), label=policy, lw=1.6, ms=4)
        ax.axhline(limit, color=colour("limit"), ls=":", label="nothing ever evicted")
        ax.axvline(knee, color=colour("prediction"), lw=1, ls=(0, (2, 3)), label="ten whole chats")
        ax.set(xscale="log", xlabel="blocks besides the instructions'", title=f"{shared:,} shared tokens")
        ax.set_xticks(sizes[::2], sizes[::2])
        ax.minorticks_off()
    axes[0].set(ylabel="prompt tokens found in the cache (%)", ylim=(0, 100))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    told = "; ".join(
        f"{shared} shared tokens: " + ", ".join(f"{policy} {curves[shared][0]:.0f}% to {curves[shared][-1]:.0f}%"
                                                for policy, curves in shares.items()) + f", at most {limit:.0f}%"
        for shared, limit in endless.items()
    )  # fmt: skip
    return picture(fig, f"Prompt tokens found, from caches of {sizes[0]} to {sizes[-1]} blocks. {told}.")


def agent_loop(lengths: Sequence[int], again: Sequence[int]) -> Picture:
    """The prompt of each turn: `again` tokens were the prompt of the turn before, the rest is new."""
    lengths, again = np.asarray(lengths), np.asarray(again)
    fig, ax = canvas(width=8, height=2.8)
    turns = range(1, len(lengths) + 1)
    ax.bar(turns, again / 1e3, color=CACHED, label="sent before: read from the cache")
    ax.bar(turns, (lengths - again) / 1e3, bottom=again / 1e3, color=colour("ours"), label="new: written to the cache")
    ax.set(xlabel="turn of the loop", ylabel="prompt (thousand tokens)", title="An agent sends its history every turn")
    ax.set_xticks(turns)
    ax.legend(loc="upper left")
    new = lengths[-1] - again[-1]
    return picture(
        fig,
        f"{len(lengths)} prompts of an agent loop, from {lengths[0]:,} to {lengths[-1]:,} tokens; all but the last "
        f"{new} tokens of each were the prompt of the turn before.",
    )


def lifetimes(shares: Sequence[float], five: Sequence[float], hour: float, told: str) -> Picture:
    """Cost of a loop, as a share of the loop without a cache, over the share of pauses above five minutes."""
    fig, ax = canvas(width=7, height=3)
    ax.plot(shares, five, color=colour("ours"), label="5 minutes: written at 1.25 ×")
    ax.axhline(hour, color=colour("other"), ls="--", label="1 hour: written at 2 ×")
    ax.axhline(1, color=colour("limit"), ls=":", label="no cache")
    ax.set(xlabel="share of pauses longer than 5 minutes", ylabel="cost, of the uncached loop", ylim=(0, 1.35))
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 0.2))
    return picture(fig, told)


def _box(ax, x: float, y: float, width: float, height: float, text: str, role: str, alpha: float = 0.35) -> None:
    ink, style = colour(role), "round,pad=0,rounding_size=0.12"
    patch = FancyBboxPatch(
        (x, y), width, height, boxstyle=style, facecolor=ink, alpha=alpha, edgecolor=ink, linewidth=1.4
    )
    ax.add_patch(patch)
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=11.5)


def _arrow(ax, start, end, ink: str) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=ink, linewidth=1.6))
