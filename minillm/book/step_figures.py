"""The drawings of chapter 14: a host and its device on a timeline, and where a step's time goes.
Built in chapter 14."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.patches import Patch

from minillm.book.style import Picture, canvas, colour, picture

_HOST = {"schedule": "other", "launch": "sky", "update": "green", "wait": "background"}


class Bar(NamedTuple):
    """One stretch of work on a lane, in ms."""

    lane: str  # "host" or "device"
    what: str
    step: int
    start: float
    end: float


def three_ideas() -> Picture:
    """A step's launches on the host and its kernels on the device: at first, and after each of the three ideas."""
    stages = (
        ("many launches: the device waits for each", 6, 0.9, 0.45, False),
        ("1  launch less: fewer, fused kernels", 3, 0.9, 0.9, False),
        ("2  launch once: replay a recorded step", 1, 0.3, 2.7, False),
        ("3  launch earlier: schedule step n + 1 during step n", 1, 0.3, 2.7, True),
    )
    fig, axes = canvas(width=6.4, height=6.0, rows=4, sharex=True)
    for ax, (title, launches, launch, kernel, early) in zip(axes, stages):
        draw_lanes(ax, _schematic(launches, launch, kernel, early), 14.0, title)
        ax.tick_params(labelsize=11), ax.set_xticks([])
        ax.set_title(title, fontsize=12)
    axes[-1].set_xlabel("time", fontsize=11)
    legend_below(fig, cols=3, size=11)
    return picture(
        fig,
        "A drawing, not to scale: the host's lane above the device's, four times. With many launches the device waits "
        "for each of them. 1, launch less: fewer and longer kernels. 2, launch once: the device waits only between "
        "steps. 3, launch earlier: the host schedules the next step during this one and the device never waits.",
    )


def _schematic(launches: int, launch: float, kernel: float, early: bool) -> list[Bar]:
    bars, now, free, before, host = [], 0.0, 0.0, None, 0.45
    for step in range(7):
        bars.append(Bar("host", "schedule", step, now, now + host))
        now += host
        for _ in range(launches):
            bars.append(Bar("host", "launch", step, now, now + launch))
            now += launch
            start, free = max(now, free), max(now, free) + kernel
            bars.append(Bar("device", "compute", step, start, free))
        ready, before = before if early else free, free
        if ready is not None:
            bars.append(Bar("host", "wait", step, now, max(now, ready)))
            now = max(now, ready)
            bars.append(Bar("host", "update", step, now, now + host))
            now += host
    return bars


def draw_lanes(ax, bars: Sequence[Bar], until: float, title: str) -> None:
    """The host's lane above the device's, up to `until`."""
    for lane, what, step, start, end in bars:
        if start < until:
            paler = lane == "device" and step % 2
            shade = colour("ours" if lane == "device" else _HOST[what])
            top = 0 if lane == "host" else 1
            ax.barh(top, end - start, left=start, height=0.72, alpha=0.6 if paler else 1, color=shade)
    ax.barh(1, until, left=0, height=0.72, color=colour("wasted"), alpha=0.18, zorder=0)
    ax.set_yticks([0, 1], ["host", "device"])
    ax.set(xlim=(0, until), ylim=(1.5, -0.5), title=title), ax.grid(visible=False)


def legend_below(fig, *left_out: str, cols: int = 6, size: float = 9) -> None:
    """What the colours of the two lanes mean."""
    marks = [Patch(color=colour(shade), label=what) for what, shade in _HOST.items() if what not in left_out]
    marks += [
        Patch(color=colour("ours"), label="device computes"),
        Patch(color=colour("wasted"), alpha=0.18, label="device waits"),
    ]
    fig.legend(handles=marks, loc="outside lower center", ncols=cols, fontsize=size)


def starts_of(bars: Sequence[Bar]) -> dict[int, float]:
    """When the device begins with each step."""
    return {bar.step: bar.start for bar in reversed(bars) if bar.lane == "device"}


def busy_share(device_ms: float, bars: Sequence[Bar]) -> float:
    """The device's time per step, over the time from one step's beginning to the next one's, in the steady state."""
    begun = starts_of(bars)
    return device_ms / (begun[4] - begun[3])


def lanes(stages: Mapping[str, Sequence[Bar]], device_ms: float, until: float) -> Picture:
    """A timeline for each stage, one below the other, on one axis of time."""
    fig, axes = canvas(width=10, height=1.4 * len(stages) + 0.9, rows=len(stages), sharex=True, squeeze=False)
    told = []
    for ax, (name, bars) in zip(axes[:, 0], stages.items()):
        told.append(f"{name}: device busy {busy_share(device_ms, bars):.0%}")
        draw_lanes(ax, bars, until, told[-1])
    axes[-1, 0].set_xlabel("time (ms)"), legend_below(fig)
    return picture(fig, f"Simulated timelines of host and device. {'; '.join(told)}.")


def weights_and_launches(reading: Mapping[str, float], overhead: float, num_bytes: int) -> Picture:
    """The least time in which GPUs read the weights, beside the launch overhead of a step; seconds."""
    fig, ax = canvas(width=8, height=3)
    ax.barh(list(reading), [1e3 * seconds for seconds in reading.values()], color=colour("ours"), height=0.55)
    for y, seconds in enumerate(reading.values()):
        ax.text(1e3 * seconds, y, f"  {1e3 * seconds:.3f} ms", va="center", fontsize=9)
    ax.axvline(1e3 * overhead, color=colour("wasted"), lw=1.8)
    ax.text(1e3 * overhead, -0.62, f"launch overhead: {1e3 * overhead:.2f} ms ", ha="right", color=colour("wasted"),
            fontsize=9)  # fmt: skip
    ax.set(xlabel="time of one step (ms)", xlim=(0, 1.15e3 * max(overhead, *reading.values())), ylim=(3.5, -0.9))
    ax.set_title(f"Reading {num_bytes / 1e6:.0f} MB of weights, and launching the step")
    told = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in reading.items())
    return picture(
        fig,
        f"The least time to read the weights: {told}. A line: {1e3 * overhead:.2f} ms of launch overhead, measured.",
    )


def a_layer(operations: Mapping[str, Sequence[tuple[str, str]]]) -> Picture:
    """One decoder layer as a strip of operations (who runs it, name), for each configuration."""
    ink = {"torch": "other", "Triton": "good", "C": "ours"}
    fig, ax = canvas(width=10, height=0.9 + 0.62 * len(operations))
    for y, ops in enumerate(operations.values()):
        for x, (who, name) in enumerate(ops):
            product = name in ("mm", "addmm", "linear")
            ax.barh(y, 0.9, left=x, height=0.7, color=colour("limit" if product else ink[who]))
        ax.text(len(ops) + 0.3, y, f"{len(ops)}", va="center", fontweight="bold")
    ax.set_yticks(range(len(operations)), list(operations))
    ax.set(ylim=(len(operations) - 0.5, -0.6), xlim=(0, max(map(len, operations.values())) + 2), xticks=[])
    ax.set_title("The operations that the host launches for one layer"), ax.grid(visible=False)
    marks = [Patch(color=colour("limit"), label="matrix product")]
    ax.legend(handles=marks + [Patch(color=colour(c), label=who) for who, c in ink.items()], loc="lower right", ncols=4)
    told = "; ".join(f"{name} {len(ops)}" for name, ops in operations.items())
    return picture(fig, f"One decoder layer as a strip of operations: {told}.")


def staircase(name: str, sizes: Sequence[int], most: int) -> Picture:
    """Rows that are computed, padding included, against the sequences in a step, for one set of bucket sizes."""
    rows = range(1, most + 1)
    taken = [next(size for size in sizes if size >= n) for n in rows]
    fig, ax = canvas(width=8.5, height=3.3)
    ax.bar(rows, taken, color=colour("wasted"), alpha=0.45, width=0.85, label="padding")
    ax.bar(rows, rows, color=colour("ours"), width=0.85, label="rows")
    ax.set(xlabel="sequences in the step", ylabel="rows computed", xlim=(0, most + 1))
    share = f"{1 - sum(rows) / sum(taken):.0%} of the rows are padding"
    ax.set_title(f"{name}: {len(sizes)} graphs, {share} if all batch sizes are equally common")
    ax.legend(loc="upper left")
    return picture(fig, f"Rows computed against sequences in the step for the buckets {list(sizes)}: {share}.")


def ladder(steps: Mapping[str, float], overheads: Mapping[str, float], floor: float, title: str) -> Picture:
    """A decode step in each configuration, its launch overhead, and the time to sum as many bytes; seconds."""
    fig, ax = canvas(width=9.5, height=1.6 + 0.5 * len(steps))
    for y, name in enumerate(steps):
        whole, launching = 1e3 * steps[name], 1e3 * overheads[name]
        ax.barh(y, whole, color=colour("ours"), height=0.6, label=None if y else "work")
        ax.barh(y, launching, color=colour("wasted"), height=0.6, label=None if y else "launch overhead (hollow model)")
        ax.text(whole, y, f"  {whole:.1f} ms, {launching:.2f} of it launch overhead", va="center", fontsize=9)
    ax.axvline(1e3 * floor, color=colour("limit"), ls="--", lw=1.3, label="summing as many bytes")
    ax.set_yticks(range(len(steps)), list(steps))
    ax.set(ylim=(len(steps) - 0.4, -0.6), xlabel="time of a decode step (ms)", title=title)
    ax.set_xlim(0, 1.5e3 * max(steps.values()))
    fig.legend(loc="outside lower center", ncols=3)
    told = "; ".join(f"{name}: {1e3 * seconds:.1f} ms" for name, seconds in steps.items())
    return picture(
        fig,
        f"A decode step in each configuration, and its launch overhead; summing as many bytes takes "
        f"{1e3 * floor:.1f} ms. {told}.",
    )


def matrix_unit(times: Mapping[tuple[str, int], float], operations: int) -> Picture:
    """The rate of a product by its rows: `times` in seconds by name and rows, `operations` of a row."""
    names, widths = list(dict.fromkeys(name for name, _ in times)), sorted({rows for _, rows in times})
    fig, ax = canvas(width=6.4, height=3.6)
    for name, role in zip(names, ("ours", "wasted", "other")):
        rates = [rows * operations / times[name, rows] / 1e9 for rows in widths]
        ax.plot(widths, rates, "o-", color=colour(role), label=name)
    ax.set(xscale="log", yscale="log", xlabel="rows", ylabel="GFLOP/s", title="A bfloat16 product on one core")
    ax.set_xticks(widths, widths)
    ax.minorticks_off()
    ax.legend()
    ends = (widths[0], widths[-1])
    told = "; ".join(f"{name}: {' and '.join(f'{1e6 * times[name, rows]:,.0f} µs' for rows in ends)}" for name in names)
    return picture(
        fig, f"Rate of a product against its rows, both axes logarithmic. Of {ends[0]} and {ends[1]} rows, {told}."
    )
