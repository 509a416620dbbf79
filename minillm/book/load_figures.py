"""The pictures of chapter 24: two loops, a test, ranks, a knee, a Pareto curve, a day. Built in chapter 24."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minillm.book.style import Picture, canvas, colour, picture


def two_loops() -> Picture:
    """Who decides when the next request is sent: an answer (left), or a clock (right)."""
    fig, axes = canvas(width=9.4, height=2.5, cols=2)
    for ax, title in zip(axes, ("Closed loop: N users", "Open loop: a rate")):
        ax.set(xlim=(0, 10), ylim=(0, 3.7), title=title)
        ax.axis("off")
        _box(ax, 6.6, 1.5, 2.6, "server", "ours")
    closed, opened = axes
    for i in range(3):
        _box(closed, 0.5, 0.75 + 0.95 * i, 2.3, f"user {3 - i}", "other", height=0.75)
    _arrow(closed, (2.9, 2.35), (6.5, 2.35), "next request")
    closed.plot([7.9, 7.9, 1.65], [1.4, 0.15, 0.15], color=colour("text"), lw=1.1)
    _arrow(closed, (1.65, 0.12), (1.65, 0.72), "")
    closed.text(4.9, 0.3, "answer: now this user may send again", ha="center", fontsize=8.5)
    _box(opened, 0.5, 1.5, 2.3, "clock", "other")
    for i in range(4):
        _box(opened, 4.05 + 0.55 * i, 1.68, 0.42, "", "other", height=0.65)
    opened.text(4.95, 1.25, "queue", ha="center", fontsize=8.5)
    _arrow(opened, (2.9, 2.0), (3.95, 2.0), "")
    _arrow(opened, (9.25, 2.0), (9.95, 2.0), "")
    opened.text(1.65, 2.75, "sends at its own times,\nhowever slow the answers are", ha="center", fontsize=8.5)
    return picture(
        fig,
        "Left, a closed loop: three users send to a server, and each sends its next request when its answer has come. "
        "Right, an open loop: a clock sends at its own times, and requests wait in a queue before the server.",
    )


def passed_and_failed(runs: Mapping[str, Sequence[tuple[float, float]]], promise: float) -> Picture:
    """For each run, the latency of every request over the time at which it was due. `runs`: name -> (due, end), s."""
    fig, axes = canvas(width=9.4, height=3.1, cols=len(runs), sharey=True)
    told = []
    for ax, (name, log) in zip(axes, runs.items()):
        due, end = np.array(log).T
        latency = end - due
        p99, good = float(np.percentile(latency, 99)), latency <= promise
        ax.plot(due[good], latency[good], ".", ms=2, color=colour("ours"), rasterized=True)
        ax.plot(due[~good], latency[~good], ".", ms=3, color=colour("wasted"), rasterized=True)
        ax.axhline(promise, color=colour("text"), lw=1.2)
        ax.axhline(p99, color=colour("prediction"), ls="--", lw=1.6)
        ax.text(0.99, 0.97, f"P99 = {p99:.2f} s", color=colour("prediction"), ha="right", va="top",
                transform=ax.transAxes, fontsize=10, fontweight="bold")  # fmt: skip
        rate = len(log) / max(due.max(), 1e-9)
        verdict = "passes" if p99 <= promise else "fails"
        ax.set_title(f"{name}: {rate:.1f} requests/s, {verdict}")
        ax.set(yscale="log", xlabel="time at which the request was due (s)", ylim=(0.1, 20))
        told.append(f"{name}, {rate:.1f} requests/s, P99 {p99:.2f} s, {np.mean(~good):.1%} late: it {verdict}")
    axes[0].set_ylabel("latency (s)")
    axes[0].text(0.01, promise * 1.05, "promise", transform=axes[0].get_yaxis_transform(), fontsize=9, va="bottom")
    return picture(fig, f"Latency of each request over time; the promise is {promise:g} s. {'. '.join(told)}.")


def ranks(n: int, q: float, low: int | None, high: int | None) -> Picture:
    """`n` sorted values as boxes, the largest at the right; those that bound the percentile `q` are marked.

    low, high: ranks from 1 on; None where no value bounds it.
    """
    fig, ax = canvas(width=9.4, height=1.5)
    shown = min(n, 40)
    for place in range(shown):
        rank = n - shown + 1 + place
        inside = (low or 0) <= rank <= (high or n)
        face = "other" if rank in (low, high) else "background" if not inside else "sky"
        ax.add_patch(FancyBboxPatch((place + 0.1, 0.3), 0.8, 0.7, boxstyle="round,pad=0,rounding_size=0.1",
                                    facecolor=colour(face), edgecolor=colour("limit"), linewidth=0.6))  # fmt: skip
    for rank, name in ((low, "lower"), (high, "upper")):
        if rank is not None and rank > n - shown:
            ax.text(rank - (n - shown) - 0.5, 1.15, f"{name} bound: rank {rank}", ha="center", fontsize=8.5)
    if high is None:
        ax.text(shown + 0.15, 0.65, "upper bound: none", va="center", fontsize=8.5, color=colour("wasted"))
    ax.text(0, -0.15, f"{n} values, sorted; the {shown} largest are drawn", fontsize=8.5, va="top")
    ax.set(xlim=(0, shown + 7), ylim=(-0.7, 1.6))
    ax.axis("off")
    told = f"lower bound at rank {low}" + (f", upper bound at rank {high}" if high else ", no upper bound")
    return picture(fig, f"{n} sorted values as boxes; the interval that holds P{q:g} in 95 of 100 samples: {told}.")


def warming_up(starts: Sequence[float], means: Sequence[float], settled: float) -> Picture:
    """Mean latency by the time since a run began, beside that of a run that is under way. Seconds."""
    fig, ax = canvas(width=7, height=2.6)
    ends = [*starts, 2 * starts[-1] - starts[-2]]
    ax.step(ends, [*means, means[-1]], where="post", color=colour("ours"), label="mean of all runs")
    ax.axhline(settled, color=colour("limit"), ls="--", label="once the server is busy")
    ax.set(
        xlabel="time since the start of the run (s)", ylabel="mean latency (s)", ylim=(0.8 * min(means), 1.15 * settled)
    )
    ax.legend(loc="lower right")
    return picture(
        fig, f"Mean latency since the start of a run: {means[0]:.2f} s in the first interval, {settled:.2f} s later."
    )


def spread_of_runs(reported: Sequence[float], together: float, promise: float) -> Picture:
    """What each of many equal runs reports, and what all their requests say together. Seconds."""
    fig, ax = canvas(width=7, height=2.6)
    ax.hist(reported, bins=40, color=colour("ours"), alpha=0.8)
    ax.axvline(together, color=colour("text"), lw=1.4, label="P99 of all runs together")
    ax.axvline(promise, color=colour("wasted"), ls="--", label="promise")
    ax.set(xlabel="P99 that one run reports (s)", ylabel="runs")
    ax.legend()
    return picture(
        fig,
        f"Histogram of the P99 that each of {len(reported)} equal runs reports: from {min(reported):.2f} s to "
        f"{max(reported):.2f} s; all requests together {together:.2f} s; promise {promise:g} s.",
    )


def knee(
    curve: Mapping[float, float],
    measured: Mapping[float, Sequence[float | None]],
    promise: float,
    planned: float,
    plateau: float,
) -> Picture:
    """P90 of TTFT over the rate offered. `curve`: rate -> simulated; `measured`: rate -> (value, low, high), s."""
    fig, ax = canvas(width=8, height=3.4)
    ax.plot(list(curve), list(curve.values()), "--", color=colour("prediction"), label="simulated")
    told = []
    for rate, (value, low, high) in measured.items():
        bars = [[value - (low or value)], [(high or value) - value]]
        name = None if told else "measured, with its 95% interval"
        ax.errorbar(rate, value, bars, fmt="o", color=colour("ours"), capsize=3, label=name)
        told.append(f"{rate:.1f}/s: {value:.2f} s")
    ax.axhline(promise, color=colour("text"), lw=1)
    ax.text(min(curve), promise * 1.08, "promise", fontsize=9, va="bottom")
    ax.axvline(planned, color=colour("prediction"), lw=1, label="planned capacity")
    ax.axvline(plateau, color=colour("limit"), lw=1, label="always full, simulated")
    ax.set(yscale="log", xlabel="requests offered / s", ylabel="P90 of TTFT (s)")
    ax.legend(loc="upper left")
    return picture(
        fig,
        f"P90 of TTFT over the rate offered. Simulated, it leaves the promise at {planned:.1f} requests/s; "
        f"measured: {'; '.join(told)}.",
    )


def pareto(measured: Mapping[int, float], predicted: Mapping[int, float], limit: float) -> Picture:
    """Tokens a second of the server over those of one user. `measured` and `predicted`: users -> of the server."""
    fig, ax = canvas(width=7.5, height=3.4)
    for style, role, name, curve in (
        ("o-", "ours", "measured", measured),
        ("s--", "prediction", "three prices", predicted),
    ):
        each = [rate / users for users, rate in curve.items()]
        ax.plot(each, list(curve.values()), style, color=colour(role), ms=5 if role == "ours" else 3, label=name)
    for users, rate in measured.items():
        if users != 4:  # too near to 16
            ax.annotate(
                f"{users} user{'s' * (users > 1)}",
                (rate / users, rate),
                (7, 4),
                textcoords="offset points",
                fontsize=8.5,
            )
    ax.axvline(limit, color=colour("limit"), ls=":", label="one user, reading the weights")
    ax.set(xlabel="tokens/s of one user", ylabel="tokens/s of the server", xlim=(0, 1.05 * limit), ylim=(0, None))
    ax.legend()
    told = "; ".join(f"{users}: {rate:,.0f} and {rate / users:.0f}" for users, rate in measured.items())
    return picture(fig, f"Tokens a second of the server and of each user, by users: {told}. The limit is {limit:.0f}.")


def a_day(hours: Sequence[float], demand: Sequence[float], replicas: int, of_one: float, verdict: str) -> Picture:
    """Requests a second over a day, and what the replicas hold, with one of them lost and with none."""
    fig, ax = canvas(width=8, height=2.9)
    ax.fill_between(hours, demand, color=colour("ours"), alpha=0.5, label="demand")
    ax.axhline(replicas * of_one, color=colour("limit"), label=f"{replicas} replicas")
    ax.axhline((replicas - 1) * of_one, color=colour("limit"), ls=":", label="with one of them lost")
    ax.set(xlabel="hour of the day", ylabel="requests/s", xlim=(0, 24), ylim=(0, 1.3 * replicas * of_one))
    ax.set_title(verdict.replace("$", r"\$"))  # not mathematics
    ax.legend(loc="upper left", ncols=3)
    return picture(fig, f"Demand over a day and {replicas} replicas sized for its peak. {verdict}.")


def _box(ax, x: float, y: float, width: float, name: str, role: str, height: float = 1.0) -> None:
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12",
                                facecolor=colour(role), alpha=0.3, edgecolor=colour(role), linewidth=1.2))  # fmt: skip
    ax.text(x + width / 2, y + height / 2, name, ha="center", va="center", fontsize=9.5)


def _arrow(ax, start, end, name: str) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour("text"), linewidth=1.1))
    if name:
        ax.text((start[0] + end[0]) / 2, start[1] + 0.15, name, ha="center", fontsize=8.5)
