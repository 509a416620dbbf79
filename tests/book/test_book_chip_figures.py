"""The drawings of newer GPUs carry their numbers in words."""

from __future__ import annotations

from minillm.book import chip_figures as figures


def test_each_drawing_has_its_numbers_in_words():
    assert "Blackwell: TMA, one thread, a whole tile; tcgen05.mma, one thread; sums in tensor memory" in (
        figures.tile_ways().alt
    )
    lanes = {
        "whole tiles": [[(0, 0, 4), (2, 0, 4)], [(1, 0, 4)]],
        "dealt out": [[(0, 0, 4), (1, 0, 2)], [(1, 2, 4), (2, 0, 4)]],
    }
    alt = figures.dealt_out(lanes).alt
    assert "whole tiles: 8 turns, SMs busy 75%" in alt and "dealt out: 6 turns, SMs busy 100%" in alt
    assert "made up: 1,500 cycles a tile in turns, 1,000 in ping-pong, 1.50 times" in (
        figures.two_groups({"made up": (1000.0, 500.0)}).alt
    )
    bars = {"a graph": [("kernel", 1.0, 3.0)], "early": [("fetch", 0.0, 1.0), ("kernel", 1.0, 2.5)]}
    assert "a graph: 3.0 µs; early: 2.5 µs" in figures.launch_gaps(bars, "made up").alt
