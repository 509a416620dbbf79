"""The drawings of FlashAttention: what lies where, one softmax tile by tile, kinds of tiles, bytes, errors.
Built in chapter 12."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from minillm.book.style import Picture, canvas, colour, picture

_KINDS = ("background", "ours", "other")  # skipped, whole, masked: the codes 0, 1 and 2


def tiles_and_registers() -> Picture:
    """A program's query tile, the key and value tiles that pass it, and the state that stays in registers."""
    fig, ax = canvas(width=6.2, height=6.0)
    ax.set(xlim=(0, 10), ylim=(-0.9, 9.9))
    ax.axis("off")
    _box(ax, 0.1, 6.5, 9.8, 3.3, "", "background")
    ax.text(9.65, 9.6, "memory of the GPU", fontsize=12, fontweight="bold", ha="right", va="top")
    _box(ax, 0.1, -0.7, 9.8, 5.5, "", "background")
    ax.text(9.65, -0.5, "one program, on one SM", fontsize=12, fontweight="bold", ha="right", va="bottom")
    for y, name in ((8.15, "keys"), (6.95, "values")):
        ax.text(2.35, y + 0.4, name, fontsize=12, ha="right", va="center")
        for i in range(7):
            _box(ax, 2.55 + i, y, 0.86, 0.8, "", "other" if i == 3 else "paper")
    _arrow(ax, (5.98, 6.85), (5.98, 4.05))
    ax.text(6.2, 5.8, "one tile at a time", fontsize=12, va="center")
    _arrow(ax, (1.3, 5.8), (1.3, 4.05))
    ax.text(1.5, 5.8, "queries, once", fontsize=12, va="center")
    _box(ax, 0.5, 2.6, 2.6, 1.4, "query tile", "other")
    _box(ax, 4.4, 2.6, 3.2, 1.4, "scores of\none tile", "good")
    _arrow(ax, (3.15, 3.3), (4.35, 3.3))
    _box(ax, 0.5, 0.4, 7.1, 1.4, "state: best, total, acc\nin registers, float32", "ours")
    _arrow(ax, (6.0, 2.55), (6.0, 1.85))
    ax.text(7.8, 3.3, "discarded\nafter use", fontsize=12, va="center")
    ax.text(7.75, 1.1, "acc / total\nis stored\nat the end", fontsize=12, va="center")
    return picture(
        fig,
        "Keys and values lie in memory in tiles. A program loads its query tile once and the tiles of keys and values "
        "one at a time. The scores of one tile are discarded after use; only the state (best, total and acc) stays, "
        "in float32 registers, and the answer is stored once, at the end.",
    )


def softmax_by_tiles(scores, states: Sequence, row: int, step: int) -> Picture:
    """The last query tile after `step` key tiles: the tile that exists, and one query's scores, rescales and answer.

    scores: tensor [queries, keys], -inf where a key is masked; the key tiles are as wide as the query tile is high.
    states: the state (best, total, acc) before the first tile and after each.
    """
    tile, n = scores.shape
    fig, axes = canvas(width=10, height=4.6, rows=3, cols=2, width_ratios=[1.15, 1.5])
    for ax in axes[:, 0]:
        ax.remove()
    _matrix(fig.add_subplot(axes[0, 0].get_gridspec()[:, 0]), scores, row, step)
    top, middle, bottom = axes[:, 1]
    best = [float(state.best[row]) for state in states]
    seen = [max(float(score), -20.0) for score in scores[row, : step * tile]]
    shades = [colour("ours" if at >= (step - 1) * tile else "sky") for at in range(len(seen))]
    top.bar([at + 0.5 for at in range(len(seen))], seen, color=shades, width=0.85)
    top.step(range(0, step * tile + 1, tile), [*best[1 : step + 1], best[step]], where="post", color=colour("text"))
    top.set(ylabel="score", title=f"Its best so far {best[step]:.2f}, total {float(states[step].total[row]):.3f}")
    places = [tile * (i + 0.5) for i in range(step)]
    factors = [math.exp(a - b) for a, b in pairwise(best[: step + 1])]
    middle.bar(places, factors, color=[colour("good" if x == 1 else "wasted") for x in factors], width=0.8 * tile)
    for at, factor in zip(places, factors):
        middle.text(at, factor + 0.04, f"{factor:.2g}", ha="center", fontsize=8.5)
    answers = [state.acc[row] / state.total[row] for state in states[1:]]
    off = [float((answer - answers[-1]).norm() / answers[-1].norm()) for answer in answers]
    bottom.bar(places, off[:step], color=colour("ours"), width=0.8 * tile)
    middle.set(ylim=(0, 1.35), ylabel="rescale")
    bottom.set(ylim=(0, 1.1 * max(off)), ylabel="acc / total:\nrel. error", xlabel="key")
    for ax in axes[:, 1]:
        ax.set(xlim=(0, n), xticks=range(0, n + 1, tile))
    return picture(
        fig,
        f"After key tile {step} of {n // tile}: one {tile} by {tile} tile of a {n} by {n} matrix exists. Of one query: "
        f"its scores, whose best is {best[step]:.2f}, the rescaling factors, and the error of acc / total.",
    )


def tile_map(kinds: Mapping[str, np.ndarray], length: int, tile_m: int, tile_n: int, windows: Sequence) -> Picture:
    """Tiles of [query tiles, key tiles], coloured as skipped, whole or masked; `windows`: None or a size for each."""
    fig, axes = canvas(width=9.8, height=4.7, cols=len(kinds), squeeze=False)
    said = []
    for ax, (name, codes), window in zip(axes[0], kinds.items(), windows):
        for (i, j), kind in np.ndenumerate(codes):
            size = min(tile_n, length - j * tile_n), min(tile_m, length - i * tile_m)
            ax.add_patch(Rectangle((j * tile_n, i * tile_m), *size, fc=colour(_KINDS[kind]), ec="white", lw=1))
        ax.plot([0, length], [0, length], color=colour("text"), lw=1.2)
        if window:
            ax.plot([0, length - window], [window, length], color=colour("text"), lw=1.2, ls="--")
        skipped, whole, masked = (int((codes == kind).sum()) for kind in (0, 1, 2))
        said.append(f"{name}: {whole} whole, {masked} masked, {skipped} skipped")
        ax.set(xlim=(0, length), ylim=(length, 0), aspect="equal", xlabel="key", ylabel="query")
        ax.set_title(said[-1], fontsize=10), ax.grid(visible=False)
    return picture(fig, f"Tiles of {tile_m} by {tile_n} over {length} by {length} scores. {'; '.join(said)}.")


def bytes_by_length(lengths: Sequence[int], counted: Mapping[str, Sequence[float]], formulas: Mapping) -> Picture:
    """Counted bytes against the length, over the formula of the same name, which takes a length."""
    fig, ax = canvas(width=8.5, height=3.8)
    far, marks = np.geomspace(128, 32768, 40), (("wasted", "o"), ("ours", "o"), ("good", "s"))
    for (name, values), (role, mark) in zip(counted.items(), marks):
        ax.plot(far, [formulas[name](x) for x in far], "--", color=colour("prediction"), lw=1.2)
        ax.plot(lengths, values, mark, color=colour(role), label=f"{name}, counted")
    ax.plot([], [], "--", color=colour("prediction"), lw=1.2, label="formula")
    ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="bytes", title="One head of 64 dimensions, float16")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    told = "; ".join(f"{name}: {values[0]:,.0f} to {values[-1]:,.0f}" for name, values in counted.items())
    return picture(fig, f"Bytes against length, from {lengths[0]:,} to {lengths[-1]:,} tokens. {told}.")


def errors_by_length(lengths: Sequence[int], errors: Mapping[str, Sequence[float]]) -> Picture:
    """Relative errors against float64; the last of them, dashed, is the rounding of the exact answer."""
    fig, ax = canvas(width=9, height=3.4)
    for (way, values), role in zip(errors.items(), ("wasted", "other", "ours", "limit")):
        style = {"ls": "--", "zorder": 4} if role == "limit" else {"marker": "o"}
        ax.plot(lengths, [1e4 * x for x in values], color=colour(role), label=way, **style)
    ax.set(xscale="log", ylim=(0, None), xlabel="tokens", ylabel="relative error (1/10,000)")
    ax.set_title("One head of 64 dimensions, float16 in and out")
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths]), ax.minorticks_off()
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    told = "; ".join(f"{way}: {1e4 * values[-1]:.1f} in 10,000" for way, values in errors.items())
    return picture(fig, f"Relative error against float64 by length. At {lengths[-1]:,} tokens, {told}.")


def _matrix(ax, scores, row: int, step: int) -> None:
    """The n x n scores as they would be: the tile that exists, those that were discarded, and the rest."""
    tile, n = scores.shape
    ax.fill([0, n, 0], [0, n, n], color=colour("background"))
    left = (step - 1) * tile
    for at in range(0, step * tile, tile):
        ink, width, line = ("ours", 1.8, "-") if at == left else ("limit", 0.8, ":")
        ax.add_patch(Rectangle((at, n - tile), tile, tile, fill=False, ec=colour(ink), lw=width, ls=line, zorder=4))
    now = scores[:, left : left + tile].clamp(min=-20)
    ax.imshow(now, extent=(left, left + tile, n, n - tile), cmap="Blues", vmin=-6, vmax=float(now.max()), zorder=3)
    ax.axhline(n - tile + row + 0.5, color=colour("text"), lw=1, zorder=5)
    ax.set(xlim=(0, n), ylim=(n, 0), aspect="equal", xlabel="key", ylabel="query", xticks=range(0, n + 1, 16))
    ax.set_yticks(range(0, n + 1, 16)), ax.grid(visible=False)
    ax.set_title(f"{n} x {n} = {n * n:,} scores; {tile * tile} exist")


def _box(ax, x: float, y: float, width: float, height: float, text: str, role: str) -> None:
    style = "round,pad=0.02,rounding_size=0.1"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=colour(role), lw=0))
    ink = "white" if role in ("ours", "good") else colour("text")
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=12, color=ink)


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=15, color=colour("text"), lw=1.5))
