"""The drawings of chapter 11 carry their numbers in words."""

from __future__ import annotations

from minillm.book import matmul_figures as figures


def test_a_tile_and_its_strips():
    alt = figures.tile_picture(size=64, tile=16, tile_k=8, program=5, turn=2).alt
    assert "program 5 of 0 to 15, turn 2 of 0 to 7: 2,048 numbers loaded for 256 numbers of C" in alt


def test_a_wave_loads_strips():
    by_row = [(program // 3, program % 3) for program in range(9)]
    by_column = [(column, row) for row, column in by_row]
    alt = figures.wave_picture({1: by_row, 3: by_column}, tiles=3, running=3, wave=1).alt
    assert "groups of 1: 1 + 3 strips; groups of 3: 3 + 1 strips" in alt


def test_buffers_and_their_pace():
    timelines = {1: [(0, 3, 3, 4), (4, 7, 7, 8)], 4: [(0, 3, 3, 4), (0, 3, 4, 5)]}
    alt = figures.pipeline_picture(timelines, load=3, product=1).alt
    assert "1 buffer: 4 per turn, products busy 25%; 4 buffers: 1 per turn, products busy 100%" in alt


def test_intensities_and_the_cache():
    ridges = {"made up": 150.0, "other": 300.0}
    assert (
        "qkv: 1.0 to 800 FLOP/byte. Ridge points: made up 150"
        in figures.offered([1, 99], {"qkv": [1, 800]}, ridges).alt
    )
    assert "counted 8 at 16. The lowest ridge point is at 150" in figures.taken([1, 16, 64], {16: 8.0}, ridges).alt
    lines = {"without a cache": 16, "each number once": 0.25, "ridge": 153, "no cache": 64}
    alt = figures.cache_effect({1: 4.0, 8: 2.0, 64: 4.0}, {1024: (500, 500), 8192: (120, 600)}, lines).alt
    assert "least at 8" in alt and "row by row 500 to 120; groups of 8 500 to 600" in alt
