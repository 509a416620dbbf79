"""Whole numbers are rounded up exactly, however large, and arrays element by element."""

from __future__ import annotations

import numpy as np
import pytest

from minillm.rounding import ceil_div, round_up


@pytest.mark.parametrize(
    "n, size, pieces", [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (5, 1, 5), (2**63 + 1, 2, 2**62 + 1)]
)
def test_the_pieces_hold_n_and_one_fewer_does_not(n, size, pieces):
    assert ceil_div(n, size) == pieces and round_up(n, size) == pieces * size
    assert (pieces - 1) * size < n <= pieces * size


def test_arrays_are_divided_element_by_element():
    assert ceil_div(np.array([0, 1, 16, 17]), 16).tolist() == [0, 1, 1, 2]
