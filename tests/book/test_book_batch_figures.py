"""The pictures of chapter 04 say in words what they show."""

from __future__ import annotations

from minillm.book import batch_figures
from minillm.book.prediction import Prediction


def test_one_reading_serves_four_rows():
    alt = batch_figures.one_reading().alt
    assert "read all weights four times" in alt and "reads all weights once" in alt


def test_a_step_under_the_roof_is_told_with_its_three_times():
    cost, seconds = {1: (1e9, 2e9), 2: (2e9, 2e9)}, {1: 0.25, 2: 0.5}
    alt = batch_figures.climb(2, cost, seconds, bandwidth=1e10, peak=1e10).alt
    assert "batch 2: 1.0 FLOP/byte, 4 GFLOP/s" in alt
    assert "Reading takes 200.0 ms at best, arithmetic 200.0 ms, the step took 500.0 ms" in alt
    assert "batch 1: 0.5 FLOP/byte" in batch_figures.climb(1, cost, seconds, bandwidth=1e10, peak=1e10).alt


def test_the_ridge_point_is_told():
    alt = batch_figures.throughput_and_latency({1: [0.1, 0.2], 2: [0.1, 0.3]}, {1: 0.1, 2: 0.1}, 31).alt
    assert "ridge point at batch 31" in alt


def test_where_the_memory_is_full():
    alt = batch_figures.intensity_against_batch({128: {1: 1.0, 10: 9.0, 20: 12.0}}, {128: 10}, 295.2).alt
    assert "128 tokens: full at batch 10, 9 FLOP/byte" in alt and "295 FLOP/byte" in alt


def test_padding_is_counted():
    assert "8 positions, 38% of them padding" in batch_figures.rectangle_and_list([4, 1]).alt
    shares = {"chat mix, as they arrive": {1: 0.0, 64: 0.8}, "chat mix, sorted by length": {1: 0.0, 64: 0.3}}
    alt = batch_figures.padding_against_batch(shares, Prediction("padding", 30, "%")).alt
    assert "At 64 prompts a batch: chat mix, as they arrive 80%; chat mix, sorted by length 30%" in alt
