"""The drawings of chapter 07: hashes and blocks, hits over sizes, time to first token, votes, an agent's loop.
Built in chapter 07."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        ax.set(xscale="log", xlabel="blocks beyond the instructions (log scale)", title=f"{shared:,} shared tokens")
        ax.set_xticks(sizes, sizes)
        ax.minorticks_off()
    axes[0].set(ylabel="prompt tokens found in the cache (%)", ylim=(0, 100))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    told = "; ".join(
        f"{shared} shared tokens: " + ", ".join(f"{policy} {curves[shared][0]:.0f}% to {curves[shared][-1]:.0f}%"
                                                for policy, curves in shares.items()) + f", at most {limit:.0f}%"
        for shared, limit in endless.items()
    )  # fmt: skip
    return picture(fig, f"Prompt tokens found, from caches of {sizes[0]} to {sizes[-1]} blocks. {told}.")


def time_to_first_token(
    cached: Sequence[int], quartiles: Sequence[Sequence[float]], prompt: int, predicted: Callable[[int], float]
) -> Picture:
    """Milliseconds to the first token over cached tokens: (lower quartile, median, upper) of each, and a prediction."""
    low, middle, high = (np.asarray(row) for row in quartiles)
    fig, ax = canvas(width=7, height=3.4)
    bars = [middle - low, high - middle]
    ax.errorbar(cached, middle, bars, fmt="o", color=colour("ours"), capsize=2, label="measured")
    line = np.arange(cached[0], cached[-1] + 1)
    ink = colour("prediction")
    ax.plot(line, [predicted(int(c)) for c in line], "--", color=ink, lw=1.4, label="predicted from two limits")
    ax.axhspan(0, predicted(prompt - 1), color=colour("limit"), alpha=0.4, label="no step is shorter")
    ax.set(
        xlabel=f"prompt tokens found in the cache, of {prompt}",
        ylabel="time to first token (ms)",
        ylim=(0, None),
        title="6 layers of SmolLM2-135M, random weights, float32",
    )
    ax.set_xticks(cached)
    ax.legend()
    return picture(
        fig,
        "Time to first token against the number of cached prompt tokens, measured and predicted: it falls in "
        "proportion to what is left to compute.",
    )


def votes(
    ks: Sequence[int], shares: Mapping[str, np.ndarray], greedy: float, prompt_tokens: int, forked: int
) -> Picture:
    """Left, right answers (%) over votes: name -> (mean, band) for each k. Right, what the prompts cost."""
    fig, (ax, cost) = canvas(width=10, height=3.7, cols=2, width_ratios=[1.5, 1])
    for (name, points), role in zip(shares.items(), ("ours", "other")):
        middle, band = np.asarray(points).T
        ax.plot(ks, middle, "o-", color=colour(role), label=name)
        top = np.minimum(100, middle + band)
        ax.fill_between(ks, middle - band, top, color=colour(role), alpha=0.13, lw=0)
    ax.axhline(greedy, color=colour("limit"), ls=":", label="greedy, one sample")
    title = "tinyworld, 40 sums in words"
    ax.set(xscale="log", xlabel="samples that vote (log scale)", ylabel="right answers (%)", title=title, ylim=(0, 102))
    ax.legend(loc="lower right")
    alone = [k * prompt_tokens / 1e3 for k in ks]
    cost.plot(ks, alone, "s-", color=colour("wasted"), label="each sample its own prompt")
    both = [prompt_tokens / 1e3, forked / 1e3]
    cost.plot([ks[0], ks[-1]], both, "o-", color=colour("ours"), label="forks (counted)")
    cost.set(xscale="log", xlabel="samples that vote (log scale)", ylabel="prompt tokens computed (thousands)")
    cost.set(title="What the prompts cost", ylim=(0, None))
    cost.legend()
    for one in (ax, cost):
        one.set_xticks(ks, ks)
        one.minorticks_off()
    return picture(
        fig,
        "Left: share of right answers against number of votes at two temperatures, with bands. At 0.8 there is little "
        "to gain, at 2.0 it rises steeply. Right: prompt tokens to compute against votes, flat with forks, rising "
        "without.",
    )


def changed_values(change: np.ndarray) -> Picture:
    """Relative change of each token's values in each layer, [num_layers, num_tokens]."""
    fig, ax = canvas(width=9.5, height=2.6)
    image = ax.imshow(100 * np.asarray(change), aspect="auto", cmap="Blues", vmin=0)
    ax.figure.colorbar(image, ax=ax, label="change (%)")
    ax.grid(visible=False)
    title = "How much values change behind another text"
    ax.set(xlabel="token of the moved paragraph", ylabel="layer", title=title)
    ax.set_yticks(range(len(change)))
    return picture(
        fig,
        "Relative change of each token's values, by layer, when a paragraph is moved behind another one: none in the "
        "first layer, and in the later layers very unequal among the tokens.",
    )


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
    ax.set(xlabel="share of pauses longer than 5 minutes", ylabel="cost (loop without a cache: 1)", ylim=(0, 1.35))
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
