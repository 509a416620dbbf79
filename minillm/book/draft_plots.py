"""The charts of chapter 18, each from the numbers that its cell has just computed. Built in chapter 18."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from minillm.book.prediction import Prediction
from minillm.book.style import Picture, canvas, colour, picture
from minillm.speculative.metrics import SpeculationMetrics

KIND_COLOURS = ("blue", "orange", "green", "red", "purple")
KIND_MARKS = ("o", "s", "^", "D", "v")


def four_tokens(gamma: int = 4, c: float = 0.15, made: int = 4) -> Picture:
    """Plain decoding and one speculative step over the same axis of time, in passes of the target."""
    fig, ax = canvas(width=7, height=2.0)
    for i in range(made):
        ax.barh(0, 0.97, left=i, height=0.7, color=colour("other"))
        ax.text(i + 0.48, 0, f"token {i + 1}", ha="center", va="center", fontsize=11)
    for i in range(gamma):
        ax.barh(1, 0.9 * c, left=i * c, height=0.7, color=colour("ours"), alpha=0.45)
        ax.text((i + 0.45) * c, 1, f"d{i + 1}", ha="center", va="center", fontsize=9)
    ax.barh(1, 0.97, left=gamma * c, height=0.7, color=colour("ours"))
    ax.text(gamma * c + 0.48, 1, "verify", ha="center", va="center", color="white", fontsize=11)
    ax.set_yticks([0, 1], ["plain", "speculative"])
    ax.grid(visible=False, axis="y")
    ax.set(ylim=(1.5, -0.5), xlabel="time, in passes of the target", title="Four tokens")
    return picture(
        fig,
        f"Plain decoding generates {made} tokens in {made} passes of the target. A step with {gamma} passes of the "
        f"draft, d1 to d{gamma}, and one pass of the target that verifies them, takes {gamma * c + 1:.2f}.",
    )


def speedup_curves(speedup: Callable[[float, int, float], float], c: float) -> Picture:
    """The formula's speed-up over the length of the draft, for four acceptance rates; a dot at each best length."""
    fig, ax = canvas(width=7, height=3.2)
    best = []
    for alpha, ink in ((0.9, "blue"), (0.8, "sky"), (0.6, "orange"), (0.3, "red")):
        curve = [speedup(alpha, gamma, c) for gamma in range(13)]
        top = int(np.argmax(curve))
        best.append(f"α={alpha}: {curve[top]:.2f} at γ={top}")
        ax.plot(curve, color=colour(ink))
        ax.plot(top, curve[top], "o", color=colour(ink), ms=8)
        ax.text(12.15, curve[-1], f"α = {alpha}", color=colour("text"), va="center", fontsize=9)
    ax.axhline(1, color=colour("limit"), ls="--")
    ax.text(0.1, 0.85, "no gain", color=colour("limit"), fontsize=9, va="top")
    ax.set(xlabel="γ, draft tokens per step", ylabel="speed-up", ylim=(0, None), xlim=(-0.3, 13.6))
    ax.set_title(f"A draft token costs c = {c:.2f} passes of the target")
    return picture(fig, f"Speed-up over γ for c = {c:.2f}. Best: {'; '.join(best)}.")


def step_times_curve(times: Mapping[int, float], floor: float) -> Picture:
    """Seconds of a step by its number of tokens, beside as many steps with one token and the reading of the weights."""
    fig, ax = canvas(width=7, height=3)
    ax.plot(list(times), [1e3 * t for t in times.values()], "o-", color=colour("ours"), label="one step")
    as_many = [1e3 * times[1] * n for n in times]
    ax.plot(list(times), as_many, ":", color=colour("wasted"), label="as many steps with one token")
    ax.axhline(1e3 * floor, color=colour("limit"), ls="--", label="reading the weights: their sum")
    ax.set(xlabel="tokens in the step", ylabel="time (ms)", ylim=(0, 6e3 * times[1]))
    ax.set_title("A step with several tokens of one text")
    ax.legend()
    told = ", ".join(f"{n}: {1e3 * times[n]:.1f} ms" for n in (1, 2, 5, 8, 16))
    return picture(fig, f"Time of a step by tokens in it. {told}. Far below the line in proportion to the tokens.")


def measured_speedups(
    gammas: Sequence[int], gained: Sequence[float], formula: Sequence[float], with_check: Sequence[float], title: str,
    c: float,
) -> Picture:  # fmt: skip
    """Measured speed-up over the length of the draft, beside the formula without and with the cost of verifying."""
    fig, ax = canvas(width=7, height=3.2)
    ax.plot(gammas, formula, ":", color=colour("prediction"), label=f"the formula, c = {c:.2f}")
    ax.plot(gammas, with_check, "--", color=colour("prediction"), label="... with what checking takes")
    ax.plot(gammas, gained, "o-", color=colour("ours"), label="measured")
    ax.axhline(1, color=colour("limit"), ls="--")
    ax.set(xlabel="γ", ylabel="speed-up", ylim=(0, None), title=title)
    ax.legend()
    told = ", ".join(f"{x:.2f}" for x in gained)
    return picture(
        fig, f"Speed-up over γ: {told}. The formula (c = {c:.2f}) lies above; with the cost of checking, close."
    )


def tokens_by_kind(made: Mapping[str, tuple[float, float]]) -> Picture:
    """Tokens per step for each kind of text: with the draft model, and by n-gram lookup."""
    told = "; ".join(f"{kind} {model:.1f} and {lookup:.1f}" for kind, (model, lookup) in made.items())
    places = np.arange(len(made))
    by_model, by_lookup = zip(*made.values())
    fig, ax = canvas(width=7, height=3.2)
    ax.bar(places - 0.2, by_model, 0.38, color=colour("ours"), label="draft model")
    ax.bar(places + 0.2, by_lookup, 0.38, color=colour("other"), label="n-gram lookup")
    for height, told_line in ((1, "no draft\ntoken accepted"), (5, "every draft\ntoken accepted")):
        ax.axhline(height, color=colour("limit"), ls="--", lw=1.2)
        ax.text(4.6, height + 0.1, told_line, fontsize=9, color=colour("text"), va="bottom")
    ax.set_xticks(places, list(made))
    ax.grid(visible=False, axis="x")
    ax.legend(loc="upper left", ncol=2)
    ax.set(
        ylabel="tokens per step", ylim=(0, 6.6), xlim=(-0.6, 5.9), title="Two drafters on five kinds of text (γ = 4)"
    )
    return picture(fig, f"Tokens per step at γ = 4, with a draft model and by lookup: {told}.")


def overlap_areas(p: np.ndarray, q: np.ndarray) -> Picture:
    """Rejection sampling as areas: what q draws, split into accepted and rejected; what comes out."""
    overlap, gap = np.minimum(p, q), np.maximum(p - q, 0)
    fig, (left, right) = canvas(width=8.0, height=3.4, cols=2, sharey=True)
    x = np.arange(len(p))
    left.bar(x, overlap, color=colour("ours"), label=f"accepted: {overlap.sum():.2f}")
    left.bar(x, q - overlap, bottom=overlap, label=f"rejected: {(q - overlap).sum():.2f}", color=colour("wasted"),
             hatch="///", alpha=0.55)  # fmt: skip
    left.set(title="drawn from q", ylabel="probability", xlabel="token", ylim=(0, 0.58))
    right.bar(x, overlap, color=colour("ours"), label=f"accepted: {overlap.sum():.2f}")
    right.bar(x, gap, bottom=overlap, color=colour("good"), hatch="..", label=f"redrawn: {gap.sum():.2f}")
    right.stairs(p, np.arange(len(p) + 1) - 0.5, color=colour("text"), lw=1.4, label="p")
    right.set(title="the result is p", xlabel="token")
    for ax in (left, right):
        ax.grid(visible=False, axis="x")
        ax.legend()
    return picture(
        fig,
        "Bars of q and p over six tokens. Where q is higher, the part above p is rejected; where p is higher, the part "
        f"above q is redrawn. The overlap is {overlap.sum():.2f}, the two others are {gap.sum():.2f} each.",
    )


def acceptance_by_temperature(temperatures: Sequence[float], rows: Iterable[Sequence[float]], title: str) -> Picture:
    """Each row: the overlap, the agreement under shared noise, the agreement of independent draws."""
    overlaps, shared, independent = zip(*rows)
    at = temperatures.index(1.0)
    fig, ax = canvas(width=7, height=3.2)
    for values, mark, role, label in (
        (overlaps, "o-", "ours", "rejection sampling: the overlap"),
        (shared, "s-", "good", "shared noise"),
        (independent, "^-", "wasted", "independent draws"),
    ):
        ax.plot(temperatures, values, mark, color=colour(role), label=label)
    ax.set(xlabel="temperature", ylabel="acceptance α", ylim=(0.6, 1), title=title)
    ax.legend(loc="lower left")
    told = f"{overlaps[at]:.2f}, {shared[at]:.2f} and {independent[at]:.2f}"
    return picture(
        fig,
        f"Acceptance by temperature: overlap, shared noise, independent draws. At temperature 1: {told}. The first two "
        "lie close together, the third far below.",
    )


def tokens_over_length(gammas: Sequence[int], counted: Sequence[float], formula: Sequence[float], alpha: float):
    """Counted tokens per step over the length of the draft, beside the formula."""
    fig, ax = canvas(width=7, height=3.0)
    ax.plot(gammas, formula, "--", color=colour("prediction"), label=f"formula, α = {alpha:.2f}")
    ax.plot(gammas, counted, "o-", color=colour("ours"), label="counted")
    ax.plot(gammas, [g + 1 for g in gammas], ":", color=colour("limit"), label="γ + 1: everything accepted")
    ax.set(xlabel="γ, draft tokens per step", ylabel="tokens per step", ylim=(1, 9), title="All texts")
    ax.legend()
    told = ", ".join(f"{x:.2f}" for x in counted)
    return picture(fig, f"Tokens per step over γ, counted {told}, and the formula at α = {alpha:.2f}.")


def acceptance_by_position(
    counts: Mapping[str, SpeculationMetrics], *, flat: bool = False, least: int = 10
) -> tuple[Picture, dict[str, list[float]]]:
    """Of the draft tokens that were checked at each position, the share accepted, with standard errors; and the rates.

    `flat` adds each drafter's α, the formula's assumption, as a line. Positions checked fewer than `least` times are
    left out.
    """
    fig, ax = canvas(width=7, height=3.6)
    rates = {}
    for shift, (name, m) in enumerate(counts.items()):
        ink, mark = colour(KIND_COLOURS[shift]), KIND_MARKS[shift]
        seen = list(map(min, [m.num_drafts, *m.accepted_per_position], m.drafted_per_position))
        n, hits = np.array([pair for pair in zip(seen, m.accepted_per_position) if pair[0] >= least]).T
        about = (hits + 1) / (n + 2)
        rates[name] = (hits / n).tolist()
        ax.errorbar(np.arange(len(n)) + 0.88 + 0.06 * shift, hits / n, yerr=(about * (1 - about) / n) ** 0.5,
                    fmt=f"{mark}-", color=ink, label=name, lw=1.3, ms=5, elinewidth=0.7)  # fmt: skip
        if flat:
            ax.axhline(m.alpha, color=ink, ls=":", label=f"{name}: one α, {m.alpha:.2f}")
    low = 0.5 if flat else 0.3
    ax.set(xlabel="position in the draft", ylabel="accepted, of those checked", ylim=(low, 1.03))
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=2 if flat else 5)
    told = "; ".join(f"{name} {', '.join(f'{rate:.2f}' for rate in row)}" for name, row in rates.items())
    return picture(fig, f"Acceptance at each position of a draft, with standard errors: {told}."), rates


def batch_curve(
    found: Mapping[int, float], ahead: Mapping[int, float], title: str, prediction: Prediction | None = None
) -> Picture:
    """Measured speed-up by batch size, and what two step times say beforehand."""
    fig, ax = canvas(width=7, height=3.4)
    sizes = list(found)
    ax.plot(sizes, list(found.values()), "o-", color=colour("ours"), label="measured")
    ax.plot(sizes, [ahead[n] for n in sizes], ":", color=colour("prediction"), label="from two step times")
    ax.axhline(1, color=colour("limit"), ls="--")
    if prediction is not None:
        prediction.line(ax, vertical=True)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, sizes)
    ax.set(xlabel="requests in the batch", ylabel="speed-up", ylim=(0, None))
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=3)
    told = ", ".join(f"{batch}: {ratio:.2f}" for batch, ratio in found.items())
    beforehand = ", ".join(f"{batch}: {ahead[batch]:.2f}" for batch in found)
    return picture(fig, f"{title}. Speed-up by batch size, measured {told}; from two step times {beforehand}.")


def long_text_curves(sizes: Sequence[int], curves: Mapping[int, Sequence[float]], title: str) -> Picture:
    """Speed-up by batch size for three lengths of text, by the roofline; the lengths stand at the curves' ends."""
    fig, ax = canvas(width=7, height=3.2)
    for (length, curve), ink, mark in zip(curves.items(), ("red", "orange", "blue"), ("s", "^", "o")):
        ax.plot(sizes, curve, f"{mark}-", color=colour(ink))
        ax.text(sizes[-1] * 1.25, curve[-1], f"{length:,} tokens", va="center", fontsize=9)
    ax.axhline(1, color=colour("limit"), ls="--")
    ax.text(1, 0.9, "no gain", color=colour("limit"), fontsize=9, va="top")
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes[::4], [f"{n:,}" for n in sizes[::4]])
    ax.set(xlabel="requests in the batch", ylabel="speed-up", ylim=(0, 4), xlim=(0.85, sizes[-1] * 9), title=title)
    told = "; ".join(f"{n:,} tokens: {c[0]:.1f} at batch 1, {c[-1]:.1f} at {sizes[-1]:,}" for n, c in curves.items())
    return picture(fig, f"Speed-up over the batch, by the roofline, for three lengths of text. {told}.")
