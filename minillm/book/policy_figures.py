"""The drawings of chapter 09: the engine on a virtual clock, and what policies do to users. Built in chapter 09."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from minillm.book.style import Picture, canvas, colour, picture

MARKERS = ("o", "s", "^", "D", "v")


def virtual_engine() -> Picture:
    """The same scheduler over two runners: one computes a step, the other only moves a clock."""
    fig, ax = canvas(width=7.2, height=3.3)
    ax.set(xlim=(0, 10), ylim=(0, 5)), ax.axis("off")
    _box(ax, 0.1, 3.5, 2.3, 1.2, "trace:\narrivals, lengths", "background")
    _box(ax, 3.6, 3.5, 6.3, 1.2, "scheduler and cache manager\n(the same objects in both)", "ours", "white")
    _box(ax, 3.6, 0.3, 2.9, 1.9, "ModelRunner\ncomputes the step;\nthe wall clock runs", "background")
    _box(ax, 7.0, 0.3, 2.9, 1.9, "SimulatedRunner\nadds the step's cost\nto a virtual clock", "other")
    _arrow(ax, (2.45, 4.1), (3.55, 4.1))
    for x in (5.05, 8.45):
        _arrow(ax, (x - 0.35, 3.45), (x - 0.35, 2.25))
        _arrow(ax, (x + 0.35, 2.25), (x + 0.35, 3.45))
        ax.text(x - 0.45, 2.85, "rows", ha="right", va="center", fontsize=10)
        ax.text(x + 0.45, 2.85, "tokens", ha="left", va="center", fontsize=10)
    return picture(
        fig,
        "A trace of arrivals and lengths feeds the scheduler and the cache manager. They hand the rows of a step to a "
        "runner and get tokens back. The ModelRunner computes the step while the wall clock runs; the SimulatedRunner "
        "adds the cost of the step to a virtual clock. The scheduler and the cache manager are the same objects.",
    )


def steps_and_ends(
    expected: Sequence[float], took: Sequence[float], prefills: Sequence[bool], runs: Mapping
) -> Picture:
    """Left, each step's measured over its predicted milliseconds; right, requests finished over time.

    prefills: whether a step has a prompt. runs: "measured" and "simulated", finished requests of each.
    """
    fig, (left, right) = canvas(width=8.5, height=3.4, cols=2)
    for kind, role, name in ((False, "ours", "only decodes"), (True, "other", "with a prompt")):
        dots = [(x, y) for x, y, prefill in zip(expected, took, prefills) if prefill == kind]
        left.plot(*zip(*dots), "o", ms=4, alpha=0.6, color=colour(role), label=name)
    most = 1.1 * max(*expected, float(np.percentile(took, 99)))
    left.plot([0, most], [0, most], color=colour("limit"), lw=1)
    left.set(xlim=(0, most), ylim=(0, most), xlabel="predicted (ms)", ylabel="measured (ms)")
    left.set_title("Each step of an unseen trace")
    left.legend()
    for (name, requests), role in zip(runs.items(), ("ours", "prediction")):
        ends = np.sort([one.token_times[-1] for one in requests])
        right.step(ends, np.arange(1, len(ends) + 1), where="post", color=colour(role), label=name)
    right.set(xlabel="time (s)", ylabel="requests finished", title="Requests finished")
    right.legend()
    return picture(
        fig,
        f"Measured against predicted time of {len(took)} steps that the cost model never saw; the median step is "
        f"{np.median(took):.1f} ms.",
    )


def service_and_waits(runs: Mapping[str, object], greedy: str) -> Picture:
    """For each run, above, the tokens served to the other users and asked by them; below, each request's TTFT.

    runs: by title, an object with `requests` (finished) and `charges` (moment, user, tokens).
    """
    fig, axes = canvas(width=8.6, height=5.2, rows=2, cols=len(runs), sharex=True, sharey="row")
    told = []
    for (title, run), (above, below) in zip(runs.items(), axes.T):
        users = sorted({one.user for one in run.requests} - {greedy})
        moments = np.linspace(0, max(one.token_times[-1] for one in run.requests), 200)
        served = np.array([_service(run.charges, user, moments) for user in users])
        asked = [
            (one.arrival_time, one.num_prompt_tokens + one.max_tokens)
            for one in sorted(run.requests, key=lambda one: one.arrival_time)
            if one.user != greedy
        ]
        above.fill_between(moments, served.min(0), served.max(0), color=colour("ours"), alpha=0.2, lw=0)
        above.plot(moments, served.mean(0), color=colour("ours"), label="served (band: lowest to highest)")
        total = np.cumsum([tokens for _, tokens in asked]) / len(users)
        above.plot([moment for moment, _ in asked], total, "--", color=colour("limit"), label="requested so far")
        for who, marker, size, shade in ((True, "s", 6, "other"), (False, "o", 3, "ours")):
            dots = [
                (one.arrival_time, one.token_times[0] - one.arrival_time)
                for one in run.requests
                if (one.user == greedy) == who
            ]
            name = f"the {greedy} user" if who else f"the {len(users)} others"
            below.plot(*zip(*dots), marker, ms=size, color=colour(shade), label=name, mew=0)
            told.append(f"{title}: {name} waited {np.mean([wait for _, wait in dots]):.2f} s on average")
        above.set_title(title), below.set_xlabel("time; arrival of a request (s)")
    axes[0, 0].set_ylabel("tokens per modest user"), axes[1, 0].set_ylabel("TTFT (s)")
    axes[0, 0].legend(loc="lower right"), axes[1, 1].legend(loc="upper right")
    return picture(fig, "Above, service over time; below, the time to first token of each request. " + "; ".join(told))


def latency_against_load(loads: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """Three panels (a metric each, in seconds); a line for each policy."""
    fig, axes = canvas(width=9.4, height=3.4, cols=len(panels))
    for ax, (metric, lines) in zip(axes, panels.items()):
        for (name, values), marker, shade in zip(lines.items(), MARKERS, ("limit", "green", "purple", "blue")):
            ax.plot(loads, values, marker=marker, ms=5, color=colour(shade), label=name)
        ax.axvline(1, color=colour("limit"), lw=1, ls=":")
        ax.set(title=f"{metric} (s)", xlabel="offered load (1: full)", ylim=(0, None))
    axes[0].legend()
    first, *_, last = panels.items()
    told = "; ".join(
        f"{name}: {first[0]} {first[1][name][-1]:.2f} s, {last[0]} {last[1][name][-1]:.1f} s" for name in first[1]
    )
    return picture(fig, f"Latency against load for {len(first[1])} policies. At load {loads[-1]:g}, {told}.")


def within_slo(loads: Sequence[float], shares: Mapping[str, Sequence[tuple[float, float]]], seeds: int) -> Picture:
    """Share of requests within the SLO against load: mean and standard error for each policy and load."""
    fig, ax = canvas(width=7.2, height=3.6)
    for place, ((name, points), shade) in enumerate(
        zip(shares.items(), ("limit", "blue", "green", "purple", "orange"))
    ):
        means, errors = (100 * np.array(column) for column in zip(*points))
        x = np.array(loads) + 0.008 * (place - 2)
        ax.errorbar(x, means, errors, marker=MARKERS[place], ms=5, capsize=2, color=colour(shade), label=name)
    (
        ax.set(xlabel="offered load (1: full)", ylabel="requests within the SLO (%)", ylim=(0, 105)),
        ax.legend(loc="lower left"),
    )
    told = "; ".join(f"{name}: {points[-1][0]:.0%} ± {points[-1][1]:.0%}" for name, points in shares.items())
    return picture(fig, f"Share of requests within the SLO against load, {seeds} seeds. At load {loads[-1]:g}: {told}.")


def _service(charges, user: str, moments: np.ndarray) -> np.ndarray:
    mine = [(moment, tokens) for moment, whose, tokens in charges if whose == user]
    return np.interp(moments, [0.0] + [m for m, _ in mine], np.cumsum([0] + [t for _, t in mine]))


def _box(ax, x: float, y: float, width: float, height: float, text: str, role: str, ink: str = "black") -> None:
    ax.add_patch(Rectangle((x, y), width, height, facecolor=colour(role), edgecolor=colour("limit"), lw=1))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=10, color=ink, linespacing=1.35)


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour("text"), lw=1.2))
