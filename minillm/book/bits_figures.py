"""The drawings of chapter 15: from numbers to codes, grids, shared scales, what bits cost. Built in chapter 15."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Rectangle

from minillm.book.prediction import Prediction
from minillm.book.style import Picture, canvas, colour, picture


def codes_map() -> Picture:
    """Eight weights in 16 bits, the same in 4 bits with a scale, and what a kernel makes of them in registers."""
    fig, ax = canvas(width=6.6, height=4.4)
    ax.set(xlim=(0, 8.3), ylim=(0, 7.1))
    ax.axis("off")
    weights = (0.31, -0.08, 0.02, -0.52, 0.11, 0.46, -0.23, 0.70)
    codes = [round(weight * 10) for weight in weights]
    ax.text(0, 6.75, "in memory, 16 bits each: 16 bytes", fontsize=12.5, weight="bold")
    ax.text(0, 4.05, "in memory, 4 bits each: 4 bytes, and one scale", fontsize=12.5, weight="bold")
    ax.text(0, 1.35, "in registers: scale × code, times the input", fontsize=12.5, weight="bold")
    for i, (weight, code) in enumerate(zip(weights, codes)):
        _cell(ax, i + 0.02, 5.6, 0.96, f"{weight:.2f}", "other")
        _cell(ax, 0.62 * i + 0.02, 2.9, 0.58, f"{code}", "ours")
        _cell(ax, i + 0.02, 0.2, 0.96, f"{code / 10:.1f}", "background")
    _cell(ax, 5.3, 2.9, 2.7, "scale 0.1: 2 bytes", "good")
    for top, text in ((5.35, "divide by the scale, round to the nearest code"), (2.65, "read, and multiply there")):
        ax.annotate(
            "", (0.5, top - 0.8), (0.5, top), arrowprops={"arrowstyle": "-|>", "color": colour("limit"), "lw": 1.5}
        )
        ax.text(0.85, top - 0.4, text, fontsize=12, va="center")
    return picture(
        fig,
        f"Eight weights from {weights[0]} to {weights[-1]}, in memory 16 bits each: 16 bytes. Divided by one scale, "
        f"0.1, and rounded they are the codes {', '.join(map(str, codes))}: 4 bits each, 4 bytes, and 2 bytes for the "
        "scale. Only these are read. A kernel makes scale × code of them in registers and multiplies with the input.",
    )


def grid(weights, marks, codes: Sequence[int]) -> Picture:
    """Weights above, the marks of a grid below, a stroke from each weight to its mark."""
    weights, marks = np.asarray(weights), np.asarray(marks)
    fig, ax = canvas(width=7.4, height=2.0)
    _draw_grid(ax, weights, marks)
    half = len(marks) // 2
    ax.set_xticks(marks, range(-half, half + 1))
    ax.set(xlabel=f"code (times the scale, {marks[-1] / half:.1f}: value)")
    ax.set_title("Each weight moves by half a step at most")
    return picture(fig, f"Eight weights above fifteen even marks, a stroke to the nearest. Codes: {list(codes)}.")


def two_grids(weights, grids: Mapping[str, tuple[object, float]]) -> Picture:
    """The same weights over several grids; `grids` has the marks and the relative error of each."""
    weights = np.asarray(weights)
    fig, axes = canvas(width=7.4, height=3.2, rows=len(grids), sharex=True)
    told = []
    for ax, (name, (marks, error)) in zip(axes, grids.items()):
        marks = np.asarray(marks)
        _draw_grid(ax, weights, marks)
        ax.set_title(f"{name}: relative error {error:.2f}")
        idle = int(sum(mark < weights.min() - np.diff(marks)[0] for mark in marks))
        told.append(f"{name}, {idle} of {len(marks)} marks lie where no weight is, relative error {error:.2f}")
    axes[-1].set_xlabel("value")
    return picture(fig, f"The same {len(weights)} weights over grids of 3 bits. {'; '.join(told)}.")


def shared_scales(
    panels: Mapping[str, tuple[np.ndarray, float, float]], at: tuple[int, int], outlier: float
) -> Picture:
    """Codes of a matrix under three ways to share a scale: `panels` has codes, bits a weight and relative error."""
    fig, axes = canvas(width=8.4, height=5.2, rows=len(panels))
    told = []
    others = np.ones(next(iter(panels.values()))[0].shape, dtype=bool)
    others[at] = False
    for ax, (name, (codes, bits, error)) in zip(axes, panels.items()):
        lost = float((codes[others] == 0).mean())
        ax.imshow(np.abs(codes) / 7, cmap="Blues", vmin=-0.25, vmax=1, aspect="auto")
        rows, columns = np.nonzero(codes == 0)
        for row, column in zip(rows, columns):
            ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="white"))
        ax.plot(columns, rows, "x", ms=4, mew=1.1, color=colour("wasted"))
        ax.add_patch(Rectangle((at[1] - 0.5, at[0] - 0.5), 1, 1, fill=False, edgecolor=colour("other"), linewidth=2.5))
        ax.set(xticks=[], yticks=[])
        ax.grid(visible=False)
        ax.set_title(f"{name}: {bits:.2f} bits a weight; {lost:.0%} of the others became 0, error {error:.2f}")
        told.append(f"{name}: {lost:.0%} of the other weights became zero, relative error {error:.2f}")
    return picture(
        fig,
        f"Codes of a matrix with one weight of {outlier:g}; a red cross where a weight became 0. {'; '.join(told)}.",
    )


def marks(tables: Mapping[str, object]) -> Picture:
    """The values of several formats, each stretched so that its largest is 1."""
    fig, ax = canvas(width=7.6, height=2.7)
    for y, (name, table) in enumerate(tables.items()):
        values = np.asarray(table)
        ink, width = colour("ours" if "int" in name else "other"), 0.9 if len(values) > 16 else 2
        ax.plot(values, np.full(len(values), y), "|", ms=20, mew=width, color=ink)
    ax.set(ylim=(len(tables) - 0.4, -0.6), xlabel="value / largest value", title="Where the marks are")
    ax.set_yticks(range(len(tables)), list(tables))
    ax.grid(visible=False)
    return picture(
        fig,
        "The values of four formats on lines from -1 to 1. int8 and int4 are even; fp8 and fp4 crowd around 0 and thin "
        "out towards the ends.",
    )


def error_and_loss(
    errors: Mapping, losses: Mapping, chance: Mapping, predicted: Mapping[int, float], guess: Prediction
) -> Picture:
    """Left the error of the weights, right what the model loses; the keys are (bits, weights that share a scale)."""
    fig, (left, right) = canvas(width=8.8, height=3.9, cols=2)
    looks = {None: ("other", "s", "whole rows"), 64: ("ours", "o", "groups of 64"), 32: ("good", "^", "groups of 32")}
    all_bits = sorted({bits for bits, _ in losses})
    for group, (role, mark, label) in looks.items():
        error, size = zip(*(errors[bits, group] for bits in all_bits))
        left.plot(size, error, mark, color=colour(role), label=label, ms=6)
        right.errorbar(
            size, [losses[bits, group] for bits in all_bits], [chance[bits, group] for bits in all_bits],
            fmt=f"{mark}-", color=colour(role), capsize=2, lw=1.3, label=label,
        )  # fmt: skip
    left.plot([bits + 0.25 for bits in predicted], list(predicted.values()), "--", color=colour("prediction"),
              label="formula, groups of 64", zorder=0)  # fmt: skip
    left.set(yscale="log", ylabel="relative error", title="The weights")
    left.legend()
    right.set_yscale("symlog", linthresh=0.02)
    right.set_yticks([0, 0.01, 0.1, 1, 10], [0, 0.01, 0.1, 1, 10])
    right.set(ylabel="nats per token lost", title="The model, on held-out text")
    right.axhline(0, color=colour("limit"), ls=":", lw=1)
    guess.line(right, vertical=True)
    right.legend(loc="upper right")
    for ax in (left, right):
        ax.set_xlabel("bits a weight, scales included")
    told = ", ".join(f"{losses[bits, 64]:.4f} nats at {bits} bits" for bits in reversed(all_bits))
    return picture(
        fig,
        "Left: the weights' relative error halves with every bit, in groups of 64 from "
        f"{errors[all_bits[0], 64][0]:.2f} at {all_bits[0]} bits to {errors[all_bits[-1], 64][0]:.4f} at "
        f"{all_bits[-1]}. Right: what the model loses in groups of 64: {told}.",
    )


def _draw_grid(ax, weights: np.ndarray, marks: np.ndarray) -> None:
    nearest = marks[np.abs(weights[:, None] - marks).argmin(1)]
    used = np.isin(marks, nearest)
    for which, ink in ((used, "ours"), (~used, "limit")):
        ax.plot(marks[which], 0 * marks[which], "|", ms=16, mew=2, color=colour(ink), zorder=3)
    ax.plot([weights, nearest], [[1.0] * len(weights), [0.06] * len(weights)], color=colour("wasted"), lw=1, alpha=0.7)
    ax.plot(weights, np.ones(len(weights)), "o", color=colour("text"), ms=5)
    ax.set(ylim=(-0.25, 1.2), yticks=[])
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)


def _cell(ax, x: float, y: float, width: float, text: str, role: str) -> None:
    ax.add_patch(Rectangle((x, y), width, 0.75, facecolor=colour(role), alpha=0.45 if role != "background" else 1))
    ax.text(x + width / 2, y + 0.37, text, ha="center", va="center", fontsize=12)
