"""The drawings of chapter 10 say what they show."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from minillm.book.gpu_figures import fused_rooflines, gpu_and_sm, passes_over_memory, split_block, warps_at_work
from minillm.book.launch_figures import DONE, LOADED, STORED, UNTOUCHED, Operation, Race, one_program, states_at


def access(program, kind, tensor, elements):
    return SimpleNamespace(program=(program, 0, 0), kind=kind, tensor=tensor, elements=np.array(elements))


MOVES = (("load", "x"), ("store", "out"))
ROWS = SimpleNamespace(
    accesses=[access(row, kind, name, [2 * row, 2 * row + 1]) for row in (0, 1) for kind, name in MOVES],
    launches=[SimpleNamespace(num_programs=2)],
    bytes=16,
)


def test_the_hardware_is_told_in_words():
    assert "Above, 9 operations" in passes_over_memory(9).alt and "one fused kernel" in passes_over_memory(9).alt
    gpu = SimpleNamespace(sms=108, schedulers=4, registers=2**18, l1=192 * 2**10, shared=164 * 2**10, l2=40 * 2**20,
                          memory=80e9, bandwidth=2039e9)  # fmt: skip
    alt = gpu_and_sm(gpu).alt
    assert "108 small squares" in alt and "192 KB of L1 cache, of which at most 164 KB are shared memory" in alt
    assert "computes in 50% of the cycles" in warps_at_work(lambda warps, cycles=150: [0, -1] * (cycles // 2), 2).alt


@pytest.mark.parametrize("block, warps, told", [(1024, 4, "8 per thread"), (16384, 1, "512 per thread, too many")])
def test_a_block_is_split(block, warps, told):
    assert told in split_block(block, warps).alt


def test_the_elements_of_a_program():
    states = states_at(ROWS, 1, {"x": 6, "out": 6})
    assert states["x"].tolist() == [DONE, DONE, LOADED, LOADED, UNTOUCHED, UNTOUCHED]
    assert states["out"].tolist() == [DONE, DONE, STORED, STORED, UNTOUCHED, UNTOUCHED]
    assert "2 elements of x loaded, 2 of out stored" in one_program(ROWS, 1, {"x": 6, "out": 6}, "rows").alt


def test_a_chain_of_operations_races_a_kernel():
    names = dict.fromkeys(("x", "residual", "weight", "out"), (2, 2))
    chain = [Operation("add", ("x", "residual"), ("residual",)), Operation("scale", ("residual",), ("out",))]
    race = Race(chain, dict.fromkeys(names, 8), names, ROWS)
    assert race.running(0) == "operation 1 of 2: add"
    assert race.running(24) == "operation 2 of 2: scale" and race.running(40) == "finished"
    assert race.states(24)["out"].tolist() == [[STORED, STORED], [UNTOUCHED, UNTOUCHED]]
    assert "operation 2 of 2: scale; the fused kernel, finished" in race.at(24).alt


def test_rooflines_say_what_fusing_moves():
    machines = {"this machine": (29e9, 144e9), "T4": (320e9, 8.1e12), "A100": (2e12, 2e13), "H100": (3e12, 7e13)}
    drawn = fused_rooflines(machines, 0.125, 0.5)
    assert "Rooflines of this machine, T4, A100 and H100." in drawn.alt and "4.0 times as far to the right" in drawn.alt
