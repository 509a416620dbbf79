"""The pictures of chapter 04: one reading for many rows, the roofline, padding. Built in chapter 04."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from minillm.book.charts import roofline
from minillm.book.prediction import Prediction
from minillm.book.style import Picture, canvas, colour, picture


def one_reading() -> Picture:
    """Four requests in four steps, and in one: how often the weights are read."""
    fig, (left, right) = canvas(width=5.6, height=2.7, cols=2, width_ratios=[1.35, 1])
    for ax, title in ((left, "four steps"), (right, "one step")):
        ax.set(xlim=(0, 10), ylim=(0, 6), title=title)
        ax.axis("off")
    for i in range(4):
        y = 4.75 - 1.4 * i
        _block(left, 0.2, y, 3.6, 1.05, "all weights", "background")
        _arrow(left, (3.95, y + 0.52), (5.5, y + 0.52))
        _block(left, 5.7, y + 0.12, 3.9, 0.8, f"row {i + 1}", "ours")
    _block(right, 0.2, 1.5, 3.4, 3.4, "all\nweights", "background")
    for i in range(4):
        y = 4.5 - 1.05 * i
        _arrow(right, (3.75, 3.2), (5.5, y + 0.4))
        _block(right, 5.7, y, 3.9, 0.8, f"row {i + 1}", "ours")
    right.text(5, 0.35, "1 reading, 4 tokens", ha="center", fontsize=10)
    left.text(5, -0.15, "4 readings, 4 tokens", ha="center", fontsize=10)
    left.set_ylim(-0.5, 6)
    right.set_ylim(-0.5, 6)
    return picture(
        fig,
        "Left: four steps for one request each read all weights four times. Right: one step for four requests reads "
        "all weights once, and each weight serves four rows.",
    )


def climb(
    batch: int,
    cost: Mapping[int, Sequence[float]],
    seconds: Mapping[int, float],
    bandwidth: float,
    peak: float,
) -> Picture:
    """The dots of all steps up to `batch` under the roof, and the times of the last: at best, and measured.

    cost: batch -> (FLOP, bytes); seconds: batch -> measured; bandwidth: bytes/s; peak: FLOP/s.
    """
    dots = {size: (cost[size][0] / cost[size][1], cost[size][0] / seconds[size]) for size in cost}
    fig, (ax, bars) = canvas(width=10, height=3.9, cols=2, width_ratios=(2, 1))
    roofline(ax, bandwidth, peak, points={"": min(dots.values(), key=lambda dot: dot[1])}, intensities=(0.25, 128))
    trail = [dot for size, dot in dots.items() if size <= batch]
    ax.plot(*zip(*trail), "o-", color=colour("ours"), alpha=0.45, lw=1)
    ax.plot(*trail[-1], "o", ms=13, color=colour("ours"))
    ax.annotate(f"batch {batch}", trail[-1], (0, -20), textcoords="offset points", ha="center", fontweight="bold")
    flops, moved = cost[batch]
    times = [moved / bandwidth * 1e3, flops / peak * 1e3, seconds[batch] * 1e3]
    bars.bar([0, 1, 2], times, color=[colour("prediction")] * 2 + [colour("ours")], width=0.6)
    bars.set_xticks([0, 1, 2], ["reading\n(at best)", "arithmetic\n(at best)", "measured"])
    bars.set(ylabel="time of the step (ms)", title="Memory or arithmetic?", ylim=(0, max(seconds.values()) * 1.1e3))
    ax.set_title(f"A decode step for {batch} request{'s' * (batch > 1)}")
    return picture(
        fig,
        f"Roofline with a decode step at batch {batch}: {trail[-1][0]:.1f} FLOP/byte, {trail[-1][1] / 1e9:.0f} "
        f"GFLOP/s. Reading takes {times[0]:.1f} ms at best, arithmetic {times[1]:.1f} ms, the step took "
        f"{times[2]:.1f} ms.",
    )


def throughput_and_latency(
    seconds: Mapping[int, Sequence[float]], predicted: Mapping[int, float], ridge: int
) -> Picture:
    """Both against batch. seconds: batch -> measured; predicted: batch -> seconds; ridge: a batch."""
    fig, axes = canvas(width=9.6, height=3.6, cols=2)
    views = (
        ("throughput (tokens/s)", lambda size, s: size / s),
        ("time of a step = TPOT (ms)", lambda size, s: s * 1e3),
    )
    for ax, (name, value) in zip(axes, views):
        line = [value(size, s) for size, s in predicted.items()]
        ax.plot(list(predicted), line, "--", color=colour("prediction"), label="predicted from two ceilings")
        for size, runs in seconds.items():
            seen = [value(size, s) for s in runs]
            middle, label = value(size, float(np.median(runs))), "measured (median, range)" if size == 1 else None
            ax.errorbar(size, middle, [[middle - min(seen)], [max(seen) - middle]], fmt="o", color=colour("ours"),
                        capsize=2, label=label)  # fmt: skip
        ax.axvline(ridge, color=colour("limit"), lw=1.2, ls=(0, (2, 3)), label=f"ridge point: batch {ridge}")
        ax.set(
            xscale="log", yscale="log", xlabel="batch (requests)", ylabel=name, title=name.split(" (")[0].capitalize()
        )
        ax.set_xticks(list(seconds), list(seconds))
        ax.minorticks_off()
    axes[1].set_title("Time of a step = TPOT")
    axes[1].legend(loc="upper left")
    return picture(
        fig,
        f"Throughput and step time against batch, measured over predicted. Up to the ridge point at batch {ridge} the "
        "predicted step time hardly grows and throughput rises with the batch; beyond it throughput is level and the "
        "step time rises.",
    )


def intensity_against_batch(
    curves: Mapping[int, Mapping[int, float]], full: Mapping[int, int], ridge: float
) -> Picture:
    """Intensity of a decode step. curves: context -> batch -> FLOP/byte; full: context -> the largest batch."""
    fig, ax = canvas(width=8.4, height=4)
    told = []
    for (context, curve), ink in zip(curves.items(), ("good", "ours", "other", "wasted", "purple")):
        batches, values = np.array(list(curve)), np.array(list(curve.values()))
        fits = batches <= full[context]
        ax.plot(batches[fits], values[fits], color=colour(ink))
        ax.plot(batches[~fits], values[~fits], ":", lw=1.2, color=colour(ink))
        ax.plot(batches[fits][-1], values[fits][-1], "o", color=colour(ink))
        ax.text(1.1 * batches[-1], values[-1], f"{context:,} tokens", va="center", color=colour(ink), fontsize=9)
        told.append(f"{context:,} tokens: full at batch {full[context]:,}, {values[fits][-1]:.0f} FLOP/byte")
    ax.axhline(ridge, color=colour("limit"), lw=1.2)
    ax.text(1.1, ridge * 1.12, f"ridge point of an H100: {ridge:.0f} FLOP/byte", color=colour("text"), fontsize=9)
    ax.set(xscale="log", yscale="log", xlim=(1, 60_000), xlabel="batch (requests)", ylabel="intensity (FLOP/byte)",
           title="Llama-3.1-8B, 16 bits: dot = the H100's 80 GB are full")  # fmt: skip
    return picture(
        fig,
        f"Arithmetic intensity of a decode step of Llama-3.1-8B against the batch, and the ridge point of an H100 at "
        f"{ridge:.0f} FLOP/byte. {'; '.join(told)}.",
    )


def rectangle_and_list(lengths: Sequence[int]) -> Picture:
    """Prompts as a padded rectangle, and as one flat list on the scale of the whole rectangle."""
    longest, tokens, count = max(lengths), sum(lengths), len(lengths)
    fig, (top, bottom) = canvas(width=9, height=3.8, rows=2, height_ratios=(5, 1))
    top.barh(range(count), [longest] * count, color=colour("wasted"), alpha=0.5, height=0.8, label="padding")
    top.barh(range(count), lengths, color=colour("ours"), height=0.8, label="tokens")
    top.set(ylim=(count - 0.4, -0.6), ylabel="prompt", xlim=(0, longest), xlabel="position in the rectangle",
            title=f"Padded: {count} × {longest:,} = {count * longest:,} positions for {tokens:,} tokens")  # fmt: skip
    top.legend(loc="upper left", bbox_to_anchor=(1, 1))
    top.set_yticks(range(0, count, 5))
    for i, length in enumerate(lengths):
        bottom.barh(0, length, left=sum(lengths[:i]), color=colour("ours" if i % 2 else "sky"), height=0.8)
    bottom.set(xlim=(0, count * longest), xlabel="positions in all", title=f"Ragged: {tokens:,} positions", yticks=[])
    for ax in (top, bottom):
        ax.grid(visible=False)
    return picture(
        fig,
        f"{count} prompts as a rectangle of {count * longest:,} positions, {1 - tokens / (count * longest):.0%} of "
        f"them padding, and the same prompts as one flat list of {tokens:,}.",
    )


def padding_against_batch(shares: Mapping[str, Mapping[int, float]], guess: Prediction) -> Picture:
    """Share of padding against batch size. shares: name of the mix -> batch size -> share; sorted mixes are dashed."""
    fig, ax = canvas(width=8.6, height=3.6)
    for name, curve in shares.items():
        role, dashed = "other" if "corpus" in name else "wasted", "sorted" in name
        ax.plot(list(curve), [100 * share for share in curve.values()], "o--" if dashed else "o-",
                lw=1.2 if dashed else 2, color=colour(role), label=name)  # fmt: skip
    sizes = list(curve)
    guess.line(ax)
    ax.axhline(0, color=colour("ours"), lw=2.5, label="ragged")
    ax.set(xscale="log", xlabel="prompts in a batch", ylabel="padding (% of positions)", ylim=(-3, 100),
           title="What rectangles waste")  # fmt: skip
    ax.set_xticks(sizes, sizes)
    ax.minorticks_off()
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    told = "; ".join(f"{name} {curve[sizes[-1]]:.0%}" for name, curve in shares.items())
    return picture(fig, f"Share of padding against batch size. At {sizes[-1]} prompts a batch: {told}; ragged 0%.")


def _block(ax, x: float, y: float, width: float, height: float, name: str, role: str) -> None:
    shade = {"facecolor": colour(role), "alpha": 0.45 if role == "ours" else 1, "edgecolor": colour("text")}
    ax.add_patch(Rectangle((x, y), width, height, linewidth=1, **shade))
    ax.text(x + width / 2, y + height / 2, name, ha="center", va="center", fontsize=10)


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour("text"), linewidth=1.1))
