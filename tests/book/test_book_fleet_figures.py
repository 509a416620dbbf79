"""The pictures of chapter 22 say in words what they show."""

from __future__ import annotations

import numpy as np
import pytest

from minillm.book import fleet_figures


def test_a_text_is_coloured_by_the_replica_that_generated_it():
    shown = fleet_figures.spoken_by(["Once", " upon", " a"], ["replica-0", "replica-0", "replica-1"], killed=[2])
    assert repr(shown) == "Once upon [replica-0 is killed]  a\n(replica-0, replica-1)"
    assert "✕" in shown.html and shown.html.count("<span") == 5
    assert "&lt;b&gt;" in fleet_figures.spoken_by(["<b>"], ["r"]).html
    with pytest.raises(ValueError):
        fleet_figures.spoken_by(["a", "b"], ["r"])


def test_the_fleet_is_told_in_words():
    assert "Replica 1 is dead" in fleet_figures.the_fleet().alt


def test_the_other_pictures_carry_their_numbers():
    alt = fleet_figures.routers({"random": (0.1, 0.5, 3.0), "prefix_aware": (0.34, 0.4, 2.0)}).alt
    assert "random: 10%, P50 0.50 s, P99 3.00 s; prefix_aware: 34%" in alt
    alt = fleet_figures.moved_or_computed([512, 1024], [0.02, 0.04], {"fast": [0.001, 0.002]}, {512: (0.02, 0.001)}).alt
    assert "at 1,024 tokens: over fast copying is 20 times as fast" in alt
    alt = fleet_figures.goodput_map((256, 2048), (32, 256), np.array([[1.2, 0.5], [2.0, 1.0]])).alt
    assert "2048 in, 32 out: 2.00" in alt
    sizes = {"queue": [(0.0, 1), (12.0, 4)], "always": [(0.0, 6), (24.0, 6)]}
    alt = fleet_figures.fleet_over_time([0, 12, 24], [1.0, 9.0, 2.0], sizes).alt
    assert "from 1.0 to 9.0 requests/s" in alt and "queue: up to 4; always: up to 6" in alt
