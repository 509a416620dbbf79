"""The drawings of chapter 10 about launches: the elements that a program touches. Built in chapter 10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from minillm.book.style import Picture, canvas, colour, picture

UNTOUCHED, DONE, LOADED, STORED, BOTH = 1, 2, 3, 4, 5
SHADES = ListedColormap([colour(c) for c in ("paper", "background", "sky", "ours", "good", "other")])
MEANING = {DONE: "done", LOADED: "loaded now", STORED: "stored now", BOTH: "loaded, then stored"}


@dataclass(frozen=True)
class Operation:
    """One operation of PyTorch: the tensors that it reads and writes, by name."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def states_at(traffic, step: int, shapes: Mapping[str, object]) -> dict[str, np.ndarray]:
    """What each element has seen when program number `step` has run: an array for each tensor in `shapes`."""
    states = {name: np.full(shape, UNTOUCHED) for name, shape in shapes.items()}
    programs = list(dict.fromkeys(access.program for access in traffic.accesses))
    for access in traffic.accesses:
        seen = states[access.tensor].reshape(-1)
        if access.program in programs[:step]:
            seen[access.elements] = DONE
        elif access.program == programs[step]:
            now = seen[access.elements]
            seen[access.elements] = LOADED if access.kind == "load" else np.where(now == LOADED, BOTH, STORED)
    return states


def one_program(traffic, program: int, shapes: Mapping[str, object], said: str, below: bool = False) -> Picture:
    """The elements that one program of a launch loads and stores; `below`: the tensors one below the other."""
    fig, ax = canvas(width=8.6, height=2.3 if below else 2.9)
    states = states_at(traffic, program, shapes)
    _light(ax, states, below, legend=(DONE, LOADED, STORED))
    ax.set_title(f"program_id {program}: {said}", pad=14)
    counts = ", ".join(
        f"{(state == LOADED).sum()} elements of {name} loaded"
        if (state == LOADED).any()
        else f"{(state == STORED).sum()} of {name} stored"
        for name, state in states.items()
        if np.isin(state, (LOADED, STORED)).any()
    )
    return picture(fig, f"What program {program} of a launch touches: {counts}. {said}.")


class Race:
    """A chain of operations beside one kernel; `at(bytes)` draws both after so many bytes have moved."""

    def __init__(
        self, operations: Sequence[Operation], bytes_of: Mapping[str, int], shapes: Mapping[str, tuple], kernel
    ):
        """bytes_of: the bytes of each tensor; kernel: the counted traffic of the launch."""
        self.operations, self.shapes, self.kernel = operations, shapes, kernel
        self.sizes = [sum(bytes_of[name] for name in (*op.reads, *op.writes)) for op in operations]
        self.ends = np.cumsum(self.sizes)
        self.programs = kernel.launches[0].num_programs
        self.program_ends = np.cumsum([kernel.bytes // self.programs] * self.programs)

    def running(self, clock: int) -> str:
        """The operation that runs after `clock` bytes."""
        at = int(np.searchsorted(self.ends, clock, side="right"))
        last = len(self.operations)
        return "finished" if at >= last else f"operation {at + 1} of {last}: {self.operations[at].name}"

    def states(self, clock: int) -> dict[str, np.ndarray]:
        states = {name: np.full(shape, UNTOUCHED) for name, shape in self.shapes.items()}
        for op, end, size in zip(self.operations, self.ends, self.sizes):
            begin = end - size
            for name in dict.fromkeys((*op.reads, *op.writes)):
                if clock >= end:
                    states[name][:] = DONE
                elif begin <= clock:
                    row = int((clock - begin) / size * self.shapes[name][0])  # the row at which it is
                    states[name][:row] = DONE
                    states[name][row] = (
                        BOTH if name in op.reads and name in op.writes else (LOADED if name in op.reads else STORED)
                    )
        return states

    def at(self, clock: int) -> Picture:
        fig, axes = canvas(width=8.8, height=4.4, rows=4, height_ratios=(2.2, 0.75, 2.2, 0.75))
        doing = self.running(clock)
        _light(axes[0], self.states(clock))
        axes[0].set_title(f"PyTorch, {doing}", pad=14)
        finished = clock >= self.program_ends[-1]
        program = min(int(np.searchsorted(self.program_ends, clock, side="right")), self.programs - 1)
        mine = {name: self.shapes[name] for name in ("x", "residual", "weight", "out")}
        states = {n: np.full(s, DONE) for n, s in mine.items()} if finished else states_at(self.kernel, program, mine)
        said = "finished" if finished else f"program_id {program}"
        _light(axes[2], states, legend=(DONE, LOADED, STORED, BOTH)), axes[2].set_title(f"One kernel, {said}", pad=14)
        axes[2].set_xlim(axes[0].get_xlim())
        _counter(axes[1], self.ends, clock, "wasted", self.ends[-1])
        _counter(axes[3], self.program_ends, clock, "ours", self.ends[-1])
        return picture(
            fig, f"After {clock:,} bytes: PyTorch, {doing}; the fused kernel, {said}. The elements that move are lit."
        )


def _counter(ax, ends, clock: int, role: str, most: int) -> None:
    """The bytes so far in a bar, with a line where each operation, or program, ends."""
    moved = min(clock, ends[-1])
    ax.barh(0, ends[-1], color=colour("background")), ax.barh(0, moved, color=colour(role))
    ax.vlines(ends[:-1], -0.4, 0.4, color="white", lw=1)
    ax.text(ends[-1] * 1.01, 0, f"{moved:,} of {ends[-1]:,} bytes", va="center", fontsize=9, weight="bold")
    ax.set(xlim=(0, most * 1.26), yticks=[], xlabel="bytes moved"), ax.grid(visible=False)


def _light(ax, states: Mapping[str, np.ndarray], below: bool = False, legend: Sequence[int] = ()) -> None:
    """Tensors as sheets of elements, side by side or below each other, coloured by their states."""
    sheets = {name: np.atleast_2d(state) for name, state in states.items()}
    top = left = widest = 0
    for name, sheet in sheets.items():
        rows, cols = sheet.shape
        edges = left + np.arange(cols + 1), top + np.arange(rows + 1)
        ax.pcolormesh(*edges, sheet, cmap=SHADES, vmin=0, vmax=5, edgecolors="white", lw=0.5)
        x, y, ha, va = (-0.4, top + 0.5, "right", "center") if below else (left, top - 0.25, "left", "bottom")
        ax.text(x, y, name, ha=ha, va=va, fontsize=9, family="monospace")
        widest = max(widest, left + cols)
        top, left = (top + rows + 0.6, 0) if below else (0, left + max(cols + 2, 1.3 * len(name) + 1))
    ax.set(ylim=(top if below else max(s.shape[0] for s in sheets.values()), -1), xlim=(-1, widest + 1)), ax.axis("off")
    if legend:
        patches = [Patch(color=SHADES(state), label=MEANING[state]) for state in legend]
        ax.legend(handles=patches, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.02))
