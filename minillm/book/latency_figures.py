"""The drawings of chapter 08: a prompt whole and in chunks; steps, gaps and waits. Built in chapter 08."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from minillm.book.style import Picture, canvas, colour, picture


def whole_and_chunked(chunks: Sequence[int], streams: int, seconds: Callable[[int], float]) -> Picture:
    """The steps that a prompt takes, whole and in `chunks`, beside decoding streams.

    A step of n tokens lasts `seconds(n)`. Above, the prompt's tokens in each step; below, a mark for each token of the
    streams, and their longest gap.
    """
    plans = {"the whole prompt in one step": [sum(chunks)], f"in {len(chunks)} chunks": list(chunks)}
    fig, axes = canvas(width=7.2, height=4.0, rows=2, sharex=True)
    gaps = []
    for ax, (name, sizes) in zip(axes, plans.items()):
        steps = [0, 0, *sizes] + [0] * (len(chunks) + 4 - len(sizes))
        ends = np.cumsum([seconds(streams + size) for size in steps])
        for start, end, size in zip([0.0, *ends], ends, steps):
            if size:
                ax.barh(streams, end - start, left=start, height=0.9, color=colour("other"), edgecolor="white")
            if size > 20:
                ax.text((start + end) / 2, streams, f"{size:,}", ha="center", va="center", fontsize=10)
        for row in range(streams):
            ax.plot(ends, [row] * len(ends), "|", ms=13, mew=2, color=colour("ours"))
        gaps.append(seconds(streams + max(sizes)))
        span = dict(left=ends[1], height=streams - 0.2, color=colour("wasted"), alpha=0.2)
        ax.barh((streams - 1) / 2, gaps[-1], **span)
        text = f"gap\n{1e3 * gaps[-1]:.0f} ms"
        ax.text(ends[1] + gaps[-1] / 2, (streams - 1) / 2, text, ha="center", va="center", color=colour("wasted"))
        ax.set_yticks([(streams - 1) / 2, streams], [f"{streams} streams", "prompt"]), ax.grid(visible=False)
        ax.set(ylim=(-0.7, streams + 0.7), xlim=(0, None), title=name)
    axes[1].set_xlabel("time (s)")
    return picture(
        fig,
        f"A prompt of {sum(chunks):,} tokens beside {streams} decoding streams. Whole, it makes one step that stops "
        f"the streams for {1e3 * gaps[0]:.0f} ms. In {len(chunks)} chunks of at most {max(chunks)} tokens the longest "
        f"gap is {1e3 * gaps[1]:.0f} ms, and every step has a token of each stream.",
    )


def timeline(run, title: str, until: float) -> Picture:
    """Above, a mark for each token of each request, and each stream's longest gap. Below, the tokens of each step.

    run: `requests`, streams first and the document last, and `steps` (start, end, tokens of streams, of the document).
    """
    fig, (above, below) = canvas(width=9.5, height=4.3, rows=2, sharex=True, height_ratios=[1.7, 1])
    *streams, document = run.requests
    for y, one in enumerate(streams):
        times = np.array(one.token_times)
        above.plot(times, [y] * len(times), "|", ms=13, mew=1.5, color=colour("ours"))
        at = int(np.diff(times).argmax())
        gap = np.diff(times)[at]
        above.barh(y, gap, left=times[at], height=0.62, color=colour("wasted"), alpha=0.3)
        above.text(times[at + 1], y - 0.5, f"{gap * 1e3:.0f} ms", ha="right", fontsize=8.5, color=colour("wasted"))
    times = document.token_times
    above.plot(times, [len(streams)] * len(times), "|", ms=13, mew=1.5, color=colour("other"))
    above.barh(
        len(streams),
        times[0] - document.arrival_time,
        left=document.arrival_time,
        height=0.62,
        color=colour("other"),
        alpha=0.3,
    )
    above.set_yticks(range(len(run.requests)), [one.request_id for one in run.requests])
    above.set(ylim=(len(run.requests) - 0.3, -0.9), title=title), above.grid(visible=False, axis="y")
    for start, end, tokens, prompt in run.steps:
        shade = colour("other" if prompt else "ours")
        below.bar(start, tokens + prompt, width=end - start, align="edge", edgecolor="white", lw=0.6, color=shade)
    below.set(
        xlabel="time (s)",
        ylabel="tokens in the step",
        yscale="log",
        xlim=(0, until),
        ylim=(1, 1.5 * sum(prompt for _, _, _, prompt in run.steps)),
    )
    gap = max(max(np.diff(one.token_times)) for one in streams) * 1e3
    wait = (times[0] - document.arrival_time) * 1e3
    return picture(
        fig,
        f"{title}. Tokens of four streams and of a document over time: the longest gap in a stream is {gap:.0f} ms, "
        f"the document's first token comes after {wait:.0f} ms. Below, tokens in each step.",
    )


def step_costs(
    seconds: Mapping[int, Sequence[float]],
    line: Callable[[np.ndarray], np.ndarray],
    label: str,
    predicted: Callable[[np.ndarray], np.ndarray],
    title: str,
) -> Picture:
    """Milliseconds of a step over its tokens; `seconds`: tokens -> measured times, beside a line and a roofline."""
    fig, ax = canvas(width=7.5, height=3.6)
    sizes = list(seconds)
    for n, times in seconds.items():
        middle = float(np.median(times))
        bar = [[(middle - min(times)) * 1e3], [(max(times) - middle) * 1e3]]
        named = "measured" if n == sizes[0] else None
        ax.errorbar(n, middle * 1e3, bar, fmt="o", color=colour("ours"), capsize=2, label=named)
    x = np.geomspace(sizes[0], sizes[-1], 100)
    ax.plot(x, line(x) * 1e3, color=colour("ours"), lw=1, label=label)
    ax.plot(x, predicted(x) * 1e3, "--", color=colour("prediction"), lw=1.4, label="predicted: reading or arithmetic")
    ax.set(xscale="log", yscale="log", xlabel="tokens in the step", ylabel="time of the step (ms)", title=title)
    ax.set_xticks(sizes, sizes)
    ax.minorticks_off()
    ax.legend()
    return picture(
        fig,
        "Time of a step against the tokens in it: nearly flat at first, then in proportion; measured points, a fitted "
        "straight line and the roofline's prediction.",
    )


def gaps_and_waits(
    budgets: Sequence[int],
    gaps: Sequence[float],
    waits: Sequence[float],
    step: Callable[[np.ndarray], np.ndarray],
    wait: Callable[[int], float],
    light: float,
) -> Picture:
    """Milliseconds over the budget (the largest one is "off"): the streams' longest gap, and the document's wait."""
    fig, (left, right) = canvas(width=9.5, height=3.3, cols=2)
    grid = np.geomspace(min(budgets), max(budgets), 80).astype(int)
    dashes = dict(color=colour("prediction"), lw=1.4)
    left.plot(budgets, np.array(gaps) * 1e3, "o", color=colour("ours"), label="longest gap, recorded")
    left.plot(grid, step(grid) * 1e3, "--", label="a full step, predicted", **dashes)
    left.axhline(light * 1e3, color=colour("limit"), lw=1.2, label="a light step")
    right.plot(budgets, np.array(waits) * 1e3, "o", color=colour("other"), label="TTFT of the document, recorded")
    right.plot(grid, [wait(int(b)) * 1e3 for b in grid], "--", label="all its steps, predicted", **dashes)
    for ax, title in ((left, "What the streams feel"), (right, "What the document pays")):
        ax.set(xscale="log", xlabel="tokens allowed in a step", ylabel="ms", ylim=(0, None), title=title)
        ax.set_xticks(budgets, [f"{b:,}" if b < max(budgets) else "off" for b in budgets])
        ax.minorticks_off()
        ax.legend()
    return picture(
        fig,
        "Left: the longest gap of the streams grows with the budget. Right: the document's time to first token falls "
        "with the budget. Both measured over predicted.",
    )
