"""The drawings of chapter 12 carry their numbers in words."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from minillm.book import attention_figures as figures


class State(NamedTuple):
    best: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor


def test_the_plan_says_what_stays_in_registers():
    alt = figures.tiles_and_registers().alt
    assert "scores of one tile are discarded" in alt and "best, total and acc" in alt and "float32 registers" in alt


def test_one_softmax_tile_by_tile():
    scores = torch.arange(32.0).reshape(8, 4)[:4, :].repeat(1, 2)  # two key tiles of 4, four queries
    states = [State(torch.full((4,), best), torch.ones(4), torch.ones(4, 2)) for best in (float("-inf"), 1.5, 2.25)]
    alt = figures.softmax_by_tiles(scores, states, row=1, step=2).alt
    assert "After key tile 2 of 2: one 4 by 4 tile of a 8 by 8 matrix" in alt and "best is 2.25" in alt


def test_tiles_are_counted_by_kind():
    kinds = {"made up": np.array([[2, 0], [1, 2], [1, 1]])}
    assert "made up: 3 whole, 2 masked, 1 skipped" in figures.tile_map(kinds, 20, 8, 10, [None]).alt


def test_bytes_and_errors_name_their_ends():
    alt = figures.bytes_by_length([128, 256], {"stored": [4_000, 16_000]}, {"stored": lambda n: n * n}).alt
    assert "from 128 to 256 tokens. stored: 4,000 to 16,000" in alt
    assert "At 128 tokens, coarse: 3.0 in 10,000" in figures.errors_by_length([64, 128], {"coarse": [1e-4, 3e-4]}).alt
