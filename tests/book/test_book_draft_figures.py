"""The drawings and charts of chapters 17 and 18: what they tell, in words."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
import torch

from minillm.book import draft_figures, draft_plots, draft_steps, long_figures, long_plots, predict
from minillm.speculative.metrics import SpeculationMetrics


def test_a_step_is_drafted_verified_and_accepted():
    alt = draft_figures.draft_verify_accept().alt
    for told in ("four small passes", "in one pass", "'cat' is rejected and 'red' is taken", "discarded"):
        assert told in alt
    assert alt.index("Draft:") < alt.index("Verify:") < alt.index("Accept:")


def test_a_row_for_each_idea_of_long_contexts():
    alt = long_figures.what_is_kept().alt
    for told in ("Everything", "Fewer bits", "Sinks and a window", "learned sinks", "Sparse reading", "A state"):
        assert told in alt


def test_a_step_of_drafts_and_one_of_plain_decoding():
    assert "takes 1.60" in draft_plots.four_tokens(gamma=4, c=0.15).alt
    assert "takes 2.20" in draft_plots.four_tokens(gamma=4, c=0.3).alt


def test_the_best_length_of_a_draft_stands_in_the_alt_text():
    alt = draft_plots.speedup_curves(lambda alpha, gamma, c: alpha * gamma / (1 + c * gamma**2), 0.25).alt
    assert "α=0.9: 0.90 at γ=2" in alt and "α=0.3: 0.30 at γ=2" in alt


def test_the_areas_of_rejection_sampling():
    alt = draft_plots.overlap_areas(np.array([0.5, 0.3, 0.2]), np.array([0.7, 0.1, 0.2])).alt
    assert "The overlap is 0.80, the two others are 0.20 each" in alt


def test_acceptance_counts_what_was_checked_and_not_what_was_discarded():
    metrics = SpeculationMetrics()
    for accepted in [0] * 10 + [2] * 30:
        metrics.add(2, accepted)
    shown, rates = draft_plots.acceptance_by_position({"toy": metrics})
    assert rates["toy"] == [0.75, 1.0] and "toy 0.75, 1.00" in shown.alt


def test_a_position_that_few_drafts_reached_is_left_out():
    metrics = SpeculationMetrics()
    for accepted in [1] * 4 + [0] * 16:
        metrics.add(3, accepted)
    assert draft_plots.acceptance_by_position({"toy": metrics})[1]["toy"] == [0.2]
    assert len(draft_plots.acceptance_by_position({"toy": metrics}, least=4)[1]["toy"]) == 2


def test_charts_name_their_numbers():
    assert "story 3.4 and 1.0" in draft_plots.tokens_by_kind({"story": (3.4, 1.0), "quote": (3.0, 2.7)}).alt
    rows = [(0.9, 0.85, 0.8), (0.92, 0.91, 0.79)]
    assert "At temperature 1: 0.92, 0.91 and 0.79" in draft_plots.acceptance_by_temperature([0.5, 1.0], rows, "toy").alt
    assert "counted 1.80, 2.52" in draft_plots.tokens_over_length([1, 2], [1.8, 2.52], [1.85, 2.57], 0.85).alt
    times = {1: 0.01, 2: 0.0102, 5: 0.012, 8: 0.013, 16: 0.02}
    assert "5: 12.0 ms, 8: 13.0 ms" in draft_plots.step_times_curve(times, 0.008).alt
    told = draft_plots.measured_speedups([0, 4], [1.0, 1.66], [1.0, 2.1], [1.0, 1.85], "toy", c=0.15).alt
    assert "1.00, 1.66" in told and "c = 0.15" in told
    curves = {500: [3.4, 0.8], 1500: [3.4, 2.3], 16_000: [3.4, 3.4]}
    assert "500 tokens: 3.4 at batch 1, 0.8 at 16" in draft_plots.long_text_curves([1, 16], curves, "toy").alt


def test_two_step_times_stand_beside_the_measured_batches():
    told = draft_plots.batch_curve({1: 3.05, 8: 0.7}, {1: 3.0, 8: 0.8}, "A free draft")
    assert "measured 1: 3.05, 8: 0.70" in told.alt and "step times 1: 3.00, 8: 0.80" in told.alt


def test_a_prediction_is_drawn_into_the_chart_of_batches(monkeypatch):
    drawn = []
    monkeypatch.setattr(matplotlib.axes.Axes, "axvline", lambda ax, x, **how: drawn.append((x, how["label"])))
    prediction = predict("How many requests?", ..., book=12, unit="requests")
    draft_plots.batch_curve({1: 3.0, 8: 0.7}, {1: 3.0, 8: 0.8}, "A free draft", prediction)
    assert drawn == [(12, "the book's prediction: 12 requests")]


@pytest.mark.parametrize(
    "moment, told, shown",
    [
        (0, "0 tokens in 0 steps", ""),
        (1, "0 tokens in 0 steps", "a b c"),
        (2, "2 tokens in 1 steps", "a ~b~ ~c~ x"),
        (4, "4 tokens in 2 steps", "a ~b~ ~c~ x d y"),
    ],
)
def test_drafts_are_verified_at_every_second_moment(moment, told, shown):
    log = [([1, 2, 3], [1, 24]), ([4], [4, 25])]
    strip = draft_steps.draft_strip(log, moment, lambda ids: chr(96 + ids[0]), "γ = 3")
    assert repr(strip) == f"γ = 3: {told}\n{shown}"


def test_the_processor_clock_never_runs_backwards():
    now = draft_steps.processor_clock(torch.device("cpu"))
    first = now()
    assert sum(range(10**6)) and now() > first


def test_the_charts_of_long_contexts_name_their_numbers():
    told = long_plots.cache_over_weights(
        [1024, 2048], 64e6, lambda batch, n, share: batch * n * 1e3 * share, 0.5, "toy"
    )
    assert "2,000 tokens at batch 32 with 16 bits" in told.alt and "128,000 tokens at batch 1 with 8 bits" in told.alt
    assert "sinks reaches 3" in long_plots.blocks_over_time({"everything": [1, 9], "sinks": [3, 2]}, 5).alt
    asked = []
    recall = lambda policy, budget, low, high: asked.append((policy, budget, low, high)) or 0.5
    long_plots.needle_grids(recall, ("window", "H2O"), (32, 64), "needles")
    assert len(asked) == 16 and ("H2O", 64, 0.75, 1.0) in asked
    curve = ([0.0, 1.0], [1.0, 2.0], "ours")
    with pytest.raises(ValueError, match="alt text"):
        long_plots.perplexity_curves({"toy": curve}, {"full": 1}, "")
