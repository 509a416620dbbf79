"""The drawings of chapter 10 about hardware: passes over memory, a GPU, warps, a block, rooflines.
Built in chapter 10."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from minillm.book.style import Picture, canvas, colour, picture

SLOTS_PER_SCHEDULER = 16


def passes_over_memory(operations: int) -> Picture:
    """A chain of operations that read and write memory, above one kernel that does so once."""
    fig, axes = canvas(width=7.2, height=3.8, rows=2)
    for ax, count, title in ((axes[0], operations, f"{operations} operations"), (axes[1], 1, "one fused kernel")):
        ax.set(xlim=(0, operations), ylim=(0, 3), title=title), ax.axis("off")
        _box(ax, 0.05, 0.1, operations - 0.1, 0.8, "background", "memory")
        for place in range(count):
            width = operations / count
            left = place * width
            name = f"op {place + 1}" if count > 1 else f"all {operations} steps, in registers"
            _box(ax, left + 0.08, 2.0, width - 0.16, 0.85, "other" if count > 1 else "ours", name)
            for x, start, end in ((0.32, 0.95, 1.95), (0.68, 1.95, 0.95)):
                ends = (left + x * width, start), (left + x * width, end)
                arrow = "wasted" if count > 1 else "good"
                ax.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=11, color=colour(arrow), lw=1.6))
    return picture(
        fig,
        f"Above, {operations} operations in a row: each reads its inputs from memory and writes its result back. "
        "Below, one fused kernel: it reads once, does all the steps in registers, and writes once.",
    )


def gpu_and_sm(gpu) -> Picture:
    """A GPU with its SMs over L2 cache and memory, and one SM, its storage in proportion to bytes.

    gpu: `sms`, `schedulers`, `registers` and `l1` (bytes in an SM), `shared` (of `l1`, at most), `l2`, `memory` and
    `bandwidth`.
    """
    fig, (chip, sm) = canvas(width=9.0, height=3.9, cols=2, width_ratios=(1, 1.15))
    for i in range(gpu.sms):
        _box(chip, i % 18, 4.2 + 1.05 * (i // 18), 0.9, 0.9, "other" if i == gpu.sms - 1 else "ours")
    _box(chip, 0, 2.5, 17.9, 1.4, "sky", f"L2 cache: {gpu.l2 / 2**20:.0f} MB for all SMs")
    _box(chip, 0, 0, 17.9, 2.2, "background", f"memory: {gpu.memory / 1e9:.0f} GB, {gpu.bandwidth / 1e9:,.0f} GB/s")
    for part in range(gpu.schedulers):
        left = part * 4.15
        _box(sm, left, 10.1, 4, 0.9, "limit", "scheduler")
        for slot in range(SLOTS_PER_SCHEDULER):
            _box(sm, left + slot % 4, 5.5 + 1.1 * (slot // 4), 1, 1.1, "ours", "warp", 6.5)
        sm.text(left + 2, 4.85, "64 KB registers", ha="center", fontsize=8.5)
    height = gpu.l1 / (gpu.registers / (64 * 1.1)) / 16.45  # to the same scale as the 64 slots of 1 x 1.1
    text = f"L1 cache and shared memory: {gpu.l1 // 2**10} KB\n(shared memory: at most {gpu.shared // 2**10} KB)"
    _box(sm, 0, 4.5 - height, 16.45, height, "good", text)
    sm.add_patch(Rectangle((-0.3, 4.2 - height), 17.05, 7.1 + height, fill=False, ec=colour("other"), lw=2.5))
    chip.set(xlim=(-0.3, 18.3), ylim=(-0.2, 10.6), title=f"The GPU: {gpu.sms} SMs"), chip.axis("off")
    sm.set(xlim=(-0.5, 17), ylim=(0.6, 11.5), title="The orange SM, in proportion to bytes"), sm.axis("off")
    return picture(
        fig,
        f"Left, the GPU: {gpu.sms} small squares, the SMs, over one L2 cache of {gpu.l2 / 2**20:.0f} MB and a memory "
        f"of {gpu.memory / 1e9:.0f} GB. Right, one SM, its storage in proportion to bytes: {gpu.schedulers} "
        f"partitions, each with a scheduler and 64 KB of registers with room for {SLOTS_PER_SCHEDULER} warps, over "
        f"{gpu.l1 // 2**10} KB of L1 cache, of which at most {gpu.shared // 2**10} KB are shared memory.",
    )


def warps_at_work(schedule: Callable[..., list[int]], warps: int) -> Picture:
    """Which warp computes in each cycle, and the share of cycles in use against the number of warps.

    `schedule(warps, cycles=...)` tells the warp of each cycle, -1 for none.
    """
    log = schedule(warps)
    fig, (ax, side) = canvas(width=9.0, height=3.1, cols=2, width_ratios=(2.2, 1))
    ax.barh(range(warps), [len(log)] * warps, color=colour("background"), height=0.8)
    for cycle, warp in enumerate(log):
        row, shade = (warp, "ours") if warp >= 0 else (-1.5, "wasted")
        ax.barh(row, 1, left=cycle, color=colour(shade), height=0.8)
    ax.set_yticks([-1.5, 0, 5, 10, 15], ["idle", "warp 0", "5", "10", "15"]), ax.grid(visible=False)
    ax.set(xlabel="cycle", ylim=(15.6, -2.2), title="Which warp computes? (grey: waiting for data)")
    counts = range(1, 17)
    busy = [sum(warp >= 0 for warp in schedule(count, cycles=3000)) / 30 for count in counts]
    side.plot(counts, busy, "o-", color=colour("limit"), lw=1, ms=3)
    side.plot(warps, busy[warps - 1], "o", color=colour("ours"), ms=9)
    side.set(xlabel="warps", ylabel="cycles in use (%)", ylim=(0, 105), title=f"{warps} warps: {busy[warps - 1]:.0f}%")
    return picture(fig, f"One scheduler with {warps} warps: it computes in {busy[warps - 1]:.0f}% of the cycles.")


def split_block(block: int, num_warps: int) -> Picture:
    """A block over its warps, the first warp over its threads, the first thread over its registers."""
    each = block // (32 * num_warps)
    parts = {"block: warps": num_warps, "warp 0: threads": 32, "thread 0: numbers": each}
    fig, ax = canvas(width=7.6, height=2.0)
    for row, count in enumerate(parts.values()):
        shades = [colour("ours")] + [colour("sky")] * (count - 1)
        if row == 2:
            shades = colour("ours" if each < 256 else "wasted")
        left = np.arange(count) / count
        ax.barh([row] * count, 1 / count, left=left, color=shades, edgecolor="white", lw=min(1, 40 / count), height=0.6)
        if row < 2:  # the first part, opened below
            ends = [row + 0.32, row + 0.32, row + 0.68, row + 0.68]
            ax.fill([0, 1 / count, 1, 0], ends, color=colour("background"))
    ax.set_yticks(range(3), parts), ax.set_xticks([]), ax.grid(visible=False), ax.spines[:].set_visible(False)
    fits = "" if each < 256 else ", too many for its registers"
    said = f"{block:,} numbers on {num_warps} × 32 threads: {each} per thread{fits}"
    ax.set(ylim=(2.5, -0.5), title=said)
    return picture(
        fig, f"A block is cut into warps, a warp into threads, and a thread keeps some numbers in registers. {said}."
    )


def fused_rooflines(machines: Mapping[str, tuple[float, float]], apart: float, together: float) -> Picture:
    """Rooflines of machines, and on each an operation at two intensities: unfused (`apart`) and fused (`together`).

    machines: "this machine", "T4", "A100", "H100" -> (bytes/s, FLOP/s); the intensities are FLOP/byte.
    """
    inks = {"this machine": "limit", "T4": "sky", "A100": "ours", "H100": "purple"}
    fig, ax = canvas(width=8.5, height=4.2)
    for name, (bandwidth, flops) in machines.items():
        reach = np.geomspace(0.05, 64, 200)
        ax.plot(reach, np.minimum(flops, reach * bandwidth), color=colour(inks[name]))
        ax.text(70, flops, f"{name}, ridge {flops / bandwidth:.0f}", va="center", fontsize=9, color=colour(inks[name]))
        ax.plot(apart, apart * bandwidth, "o", color=colour("wasted"))
        ax.plot(together, together * bandwidth, "o", color=colour("good"))
    for where, said, ink in ((apart, "nine\noperations", "wasted"), (together, "one\nkernel", "good")):
        ax.axvline(where, color=colour(ink), lw=0.8, ls=":")
        ax.text(where, 1.5e14, said, ha="center", va="top", fontsize=9, color=colour(ink), backgroundcolor="white")
    ax.set(xscale="log", yscale="log", xlim=(0.04, 500), ylim=(2e8, 2e14), ylabel="FLOP/s")
    ax.set(xlabel="arithmetic intensity (FLOP/byte)", title="Residual + RMSNorm, float16: what memory allows")
    return picture(
        fig,
        f"Rooflines of {', '.join(list(machines)[:-1])} and {list(machines)[-1]}. On each, residual and norm stand far "
        f"left of the ridge; fused, they stand {together / apart:.1f} times as far to the right and as much higher, "
        "still on the slope.",
    )


def _box(ax, left: float, bottom: float, width: float, height: float, role: str, text: str = "", size=9.0) -> None:
    ax.add_patch(Rectangle((left, bottom), width, height, facecolor=colour(role), edgecolor=colour("paper"), lw=1))
    ink = "white" if role in ("ours", "good", "limit") else colour("text")
    ax.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=size, color=ink)
