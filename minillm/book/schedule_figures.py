"""The pictures of chapter 05: a step's loop, bars in batch slots, the life of a request. Built in chapter 05."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.ticker import MaxNLocator

from minillm.book.prediction import Prediction
from minillm.book.style import Picture, canvas, colour, picture

_SHADES = {"waiting": "background", "several tokens": "ours", "one token": "sky", "preempted": "wasted"}
_PLACES = {"WAITING": (0, 1), "RUNNING": (1.5, 1), "PREEMPTED": (1.5, 0), "FINISHED": (3, 1)}
_ARROWS = {  # from and to: how far the arrow curves, where it endss label
    ("WAITING", "RUNNING"): (0, (0.75, 1.07)),
    ("RUNNING", "FINISHED"): (0, (2.25, 1.07)),
    ("RUNNING", "PREEMPTED"): (-0.25, (1.83, 0.5)),
    ("PREEMPTED", "RUNNING"): (-0.25, (1.17, 0.5)),
    ("WAITING", "FINISHED"): (-0.35, (1.5, 1.4)),
    ("PREEMPTED", "FINISHED"): (0.15, (2.55, 0.25)),
}


class BarLike(Protocol):
    """A request in a batch slot, from a step on, for so many steps."""

    request: int
    slot: int
    start: int
    steps: int


class Did(NamedTuple):
    """What a request did in one step, and with how many tokens."""

    state: str  # "waiting", "several tokens", "one token" or "preempted"
    tokens: int = 0


def step_loop() -> Picture:
    """Queue, batch, model, update: what happens in every step."""
    fig, ax = canvas(width=5.6, height=3.1)
    ax.set(xlim=(0, 11.2), ylim=(0, 6.2))
    ax.axis("off")
    for i, name in enumerate("GFE"):
        _box(ax, 0.1 + 0.8 * i, 3.1, 0.7, 0.7, name, "background")
    ax.text(1.25, 4.05, "queue", ha="center", fontsize=10)
    for i, name in enumerate("ACD"):
        _box(ax, 4.6, 2.35 + 0.75 * i, 1.7, 0.65, name, "ours")
    _box(ax, 4.6, 4.6, 1.7, 0.65, "free", "good")
    ax.text(5.45, 5.45, "4 batch slots", ha="center", fontsize=10)
    _box(ax, 8.9, 2.35, 1.9, 2.9, "model:\none\nforward\npass", "other")
    _arrow(ax, (2.55, 3.45), (4.45, 4.9))
    ax.text(2.9, 4.95, "1 schedule", ha="center", fontsize=10, fontweight="bold")
    _arrow(ax, (6.45, 3.8), (8.75, 3.8))
    ax.text(7.6, 4.0, "2 execute", ha="center", fontsize=10, fontweight="bold")
    ax.plot([9.85, 9.85, 5.45], [2.2, 1.3, 1.3], color=colour("text"), lw=1.2)
    _arrow(ax, (5.45, 1.3), (5.45, 2.2))
    ax.text(7.65, 1.45, "3 update", ha="center", fontsize=10, fontweight="bold")
    ax.text(7.65, 0.85, "one more token each", ha="center", fontsize=9.5)
    _arrow(ax, (5.5, 1.3), (2.3, 1.3))
    _box(ax, 1.4, 0.95, 0.75, 0.7, "B", "background")
    ax.text(1.8, 0.4, "finished: its batch slot is free at once", ha="left", fontsize=9.5)
    return picture(
        fig,
        "The loop of a step. Schedule: requests E, F, G wait in a queue, and the first takes the free one of four "
        "batch slots beside A, C and D. Execute: one forward pass of the model for the whole batch. Update: each "
        "request has one more token; B has finished and left, which freed its batch slot for the next step.",
    )


def gantts(runs: Mapping[str, Sequence[BarLike]], slots: int, labels: Sequence[str], said: str) -> Picture:
    """One chart of bars in batch slots for each of `runs`, on the scale of the longest; idle places are shaded."""
    last = max(_end(bars) for bars in runs.values())
    fig, axes = canvas(width=9.5, height=1.6 + 0.44 * slots, rows=len(runs), sharex=True)
    told = []
    for ax, (name, bars) in zip(axes, runs.items()):
        ax.set_xlim(0, last * 1.01)
        told.append(f"{name}: {_gantt(ax, bars, slots, labels)}")
        ax.set_title(told[-1])
    axes[-1].set_xlabel("step")
    return picture(fig, f"Gantt charts of {said} in {slots} batch slots, idle places shaded. {'; '.join(told)}.")


def traced(
    bars: Sequence[BarLike], slots: int, labels: Sequence[str], tokens: Mapping[int, float], static_end: int
) -> Picture:
    """The engine's own steps: the tokens of each (`tokens`: step -> tokens), and the bars of its requests."""
    fig, (above, below) = canvas(width=9.5, height=3.6, rows=2, sharex=True, height_ratios=[1, 1.6])
    below.set_xlim(0, static_end * 1.01)
    told = _gantt(below, bars, slots, labels)
    below.set(xlabel="step", title=f"From the engine's trace: {told}")
    below.axvline(static_end, color=colour("wasted"), lw=1.2, ls="--")
    below.text(static_end - 3, slots - 0.8, "static batches end here", ha="right", color=colour("wasted"), fontsize=9)
    above.bar([step + 0.5 for step in tokens], tokens.values(), width=1, color=colour("limit"))
    above.set(ylabel="tokens", title="Tokens in each step: one for each row, more where a prompt enters")
    above.grid(visible=False)
    return picture(
        fig,
        f"Above, the tokens of each step: at most {slots} while all requests decode, {max(tokens.values()):.0f} at "
        f"most where prompts enter. Below, the Gantt chart drawn from the engine's trace: {told}.",
    )


def of_plan(plan: Mapping[str, int]) -> dict[str, Did]:
    return {name: Did("several tokens" if tokens > 1 else "one token", tokens) for name, tokens in plan.items()}


def of_plans(plans: Sequence[Mapping[str, int]], names: Collection[str]) -> list[dict[str, Did]]:
    """What each plan says of each request; one that has not been planned yet waits."""
    seen, history = set(), []
    for plan in plans:
        seen |= plan.keys()
        history.append(of_plan(plan) | {name: Did("waiting") for name in names if name not in seen})
    return history


def lives(
    history: Sequence[Mapping[str, Did]], used: Sequence[int], limit: int, *, title: str, counted: str, bound: str
) -> Picture:
    """A row for each request and a column for each step; above it `used`, a number for each step, under its limit.

    counted: the label of `used`; bound: the name of the limit.
    """
    fig, (above, below) = canvas(width=8.5, height=3.5, rows=2, sharex=True, height_ratios=[1, 1.2])
    steps, names = range(1, len(history) + 1), sorted({name for states in history for name in states})
    for step, states in zip(steps, history):
        for row, name in enumerate(names):
            if name in states:
                state, tokens = states[name]
                below.barh(row, 0.92, left=step - 0.46, height=0.8, color=colour(_SHADES[state]))
                ink = "white" if state == "several tokens" else colour("text")
                below.text(step, row, tokens or "", ha="center", va="center", fontsize=9, color=ink)
    below.set(ylim=(len(names) - 0.5, -0.5), xlim=(0.4, len(history) + 0.6), xlabel="step")
    below.set_yticks(range(len(names)), names)
    below.set_xticks(steps)
    there = {did.state for states in history for did in states.values()}
    patches = [Patch(color=colour(role), label=state) for state, role in _SHADES.items() if state in there]
    below.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1))
    above.bar(steps, used, width=0.92, color=colour("limit"))
    above.axhline(limit, color=colour("text"), ls="--", lw=1)
    above.text(len(history) + 0.7, limit, bound, va="center", fontsize=9)
    above.set(ylabel=counted, ylim=(0, 1.2 * limit), title=title)
    above.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    for ax in (above, below):
        ax.grid(visible=False)
    counts = {name: [s[name].tokens for s in history if name in s and s[name].tokens] for name in names}
    each = ", ".join(f"{name} {'+'.join(map(str, tokens))}" for name, tokens in counts.items())
    lost = ", ".join(name for name in names if any(s.get(name, Did("")).state == "preempted" for s in history))
    return picture(
        fig,
        f"Above, {counted} in each step, never over {limit}. Below, the tokens of each request, step by step: {each}"
        f"{f'; preempted: {lost}' if lost else ''}.",
    )


def states(seen: Mapping[tuple[str, str], int]) -> Picture:
    """The states of a request, and how often it went from one to another. Raises KeyError for an arrow not known."""
    fig, ax = canvas(width=7, height=3)
    for (before, after), times in seen.items():
        bend, place = _ARROWS[before, after]
        gap = 15 if {before, after} == {"RUNNING", "PREEMPTED"} else 32
        arrow = {"arrowstyle": "-|>", "color": colour("limit"), "lw": 1.4, "shrinkA": gap, "shrinkB": gap}
        ax.annotate("", _PLACES[after], _PLACES[before], arrowprops=arrow | {"connectionstyle": f"arc3,rad={bend}"})
        ax.text(*place, f"{times:,}", ha="center", va="bottom", fontsize=9.5)
    for name, place in _PLACES.items():
        box = {"boxstyle": "round,pad=0.6", "fc": colour("wasted" if name == "PREEMPTED" else "ours"), "ec": "none"}
        ax.text(*place, name, ha="center", va="center", color="white", weight="bold", fontsize=9.5, bbox=box)
    ax.set(xlim=(-0.5, 3.5), ylim=(-0.3, 1.9))
    ax.axis("off")
    told = ", ".join(f"{before} to {after} {times} times" for (before, after), times in sorted(seen.items()))
    return picture(fig, f"The states of a request, and how often each transition was seen: {told}.")


def against_spread(rows: Sequence, least: float, slots: int) -> Picture:
    """Steps and use of the batch slots against the spread of the lengths.

    rows: with the fields spread, static_steps, steps, static_use, predicted_use and use. least: steps without idle
    places.
    """
    fig, (left, right) = canvas(width=9.5, height=3.2, cols=2)
    spread = [row.spread for row in rows]
    left.plot(spread, [row.static_steps / 1000 for row in rows], "o-", color=colour("wasted"), label="static")
    left.plot(spread, [row.steps / 1000 for row in rows], "o-", color=colour("ours"), label="continuous")
    left.axhline(least / 1000, color=colour("limit"), ls="--", lw=1.2, label="all tokens / batch slots")
    left.set(ylabel="steps (thousands)", ylim=(0, None), title=f"Steps in {slots} batch slots")
    right.plot(spread, [100 * row.use for row in rows], "o-", color=colour("ours"), label="continuous")
    right.plot(spread, [100 * row.static_use for row in rows], "o", color=colour("wasted"), label="static")
    predicted = [100 * row.predicted_use for row in rows]
    right.plot(spread, predicted, "--", color=colour("prediction"), label="mean / mean of the longest")
    right.set(ylabel="batch slots in use (%)", ylim=(0, 105), title="Use falls with the spread")
    for ax in (left, right):
        ax.set_xlabel("spread of output lengths (std / mean)")
        ax.legend()
    return picture(
        fig,
        f"Left: steps against the spread of the lengths; static batches go from {rows[0].static_steps:,} to "
        f"{rows[-1].static_steps:,}, continuous batching from {rows[0].steps:,} to {rows[-1].steps:,}. Right: the use "
        f"of static batches falls to {rows[-1].static_use:.0%}, on the predicted curve; continuous stays at "
        f"{min(row.use for row in rows):.0%} or more.",
    )


def against_load(
    loads: Sequence[float], waits: Mapping[str, Sequence[float]], limits: Mapping[str, float], guess: Prediction
) -> Picture:
    """Mean steps until a request starts, against load, and the load at which each scheduler breaks (`limits`)."""
    fig, ax = canvas(width=8, height=3.4)
    for (name, steps), role, side in zip(waits.items(), ("wasted", "ours"), (1, -1)):
        ax.plot(loads, steps, "o-", color=colour(role), label=name)
        ax.axvline(limits[name], color=colour(role), ls=":", lw=1.6)
        place = limits[name] + 0.012 * side
        ax.text(place, 300, f"limit {limits[name]:.2f}", rotation=90, va="center", ha="left" if side > 0 else "right",
                fontsize=9.5, color=colour(role))  # fmt: skip
    guess.line(ax, vertical=True)
    ax.set(xlabel="load (requests a step x mean length / batch slots)", ylabel="mean steps until it starts",
           ylim=(0, 480), xlim=(0, 1.03))  # fmt: skip
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=3)
    told = ", ".join(f"{name} {limit:.2f}" for name, limit in limits.items())
    return picture(
        fig, f"Mean steps until a request starts, against load; it rises steeply before the predicted limits: {told}."
    )


def _end(bars: Sequence[BarLike]) -> int:
    return max(bar.start + bar.steps for bar in bars)


def _gantt(ax, bars: Sequence[BarLike], slots: int, labels: Sequence[str]) -> str:
    """Bars in their batch slots; what is left until the last one ends is shaded. Returns what it counted."""
    steps = _end(bars)
    ax.barh(range(slots), [steps] * slots, color=colour("wasted"), alpha=0.25, height=0.82)
    for bar in bars:
        ax.barh(bar.slot, bar.steps, left=bar.start, color=colour("ours"), edgecolor="white", lw=1, height=0.82)
        if bar.steps > 0.012 * ax.get_xlim()[1]:
            middle = bar.start + bar.steps / 2
            ax.text(middle, bar.slot, labels[bar.request], color="white", ha="center", va="center", fontsize=9)
    ax.axvline(steps, color=colour("limit"), lw=1, ls="--")
    ax.set_yticks(range(slots), [f"batch slot {slot}" for slot in range(slots)])
    ax.set(ylim=(slots - 0.5, -0.5))
    ax.grid(visible=False)
    empty = slots * steps - sum(bar.steps for bar in bars)
    return f"{steps} steps, {empty} of {slots * steps} places idle ({empty / (slots * steps):.0%})"


def _box(ax, x: float, y: float, width: float, height: float, name: str, role: str) -> None:
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12",
                                facecolor=colour(role), alpha=0.35, edgecolor=colour("text"), linewidth=1))  # fmt: skip
    ax.text(x + width / 2, y + height / 2, name, ha="center", va="center", fontsize=10)


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour("text"), linewidth=1.2))
