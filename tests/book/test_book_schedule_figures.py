"""The pictures of chapter 05 say in words what they show."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from minillm.book import schedule_figures
from minillm.book.prediction import Prediction


def bar(request, slot, start, steps):
    return SimpleNamespace(request=request, slot=slot, start=start, steps=steps)


def test_the_loop_of_a_step_names_its_three_parts_in_order():
    alt = schedule_figures.step_loop().alt
    assert alt.index("Schedule") < alt.index("Execute") < alt.index("Update")
    assert "the first takes the free one of four batch slots" in alt


def test_idle_places_are_counted_up_to_the_last_end_of_each_run():
    static = [bar(0, 0, 0, 4), bar(1, 1, 0, 1), bar(2, 0, 4, 3)]
    alt = schedule_figures.gantts({"Static": static, "Continuous": static[:2]}, 2, "ABC", "three requests").alt
    assert "Static: 7 steps, 6 of 14 places idle (43%)" in alt
    assert "Continuous: 4 steps, 3 of 8 places idle (38%)" in alt


def test_a_trace_beside_its_bars():
    alt = schedule_figures.traced([bar(0, 0, 0, 2)], 1, "A", {0: 9.0, 1: 1.0}, 5).alt
    assert "9 at most where prompts enter" in alt and "2 steps, 0 of 2 places idle (0%)" in alt


def test_a_request_waits_until_it_is_planned():
    history = schedule_figures.of_plans([{"A": 8}, {"A": 1, "B": 3}], "AB")
    assert history[0] == {"A": ("several tokens", 8), "B": ("waiting", 0)}
    assert history[1] == {"A": ("one token", 1), "B": ("several tokens", 3)}


def test_lives_tell_tokens_and_the_preempted():
    history = [*schedule_figures.of_plans([{"A": 8}], "A"), {"A": schedule_figures.Did("preempted")}]
    alt = schedule_figures.lives(history, [8, 0], 9, title="t", counted="tokens held", bound="room").alt
    assert "tokens held in each step, never over 9" in alt and "A 8; preempted: A" in alt


def test_only_known_transitions_are_drawn():
    assert "RUNNING to FINISHED 3 times" in schedule_figures.states({("RUNNING", "FINISHED"): 3}).alt
    with pytest.raises(KeyError):
        schedule_figures.states({("FINISHED", "RUNNING"): 1})


def test_curves_against_spread_and_load():
    row = dict(static_steps=10, steps=10, static_use=1.0, predicted_use=1.0, use=1.0)
    last = dict(static_steps=44, steps=11, static_use=0.23, predicted_use=0.22, use=0.91)
    rows = [SimpleNamespace(spread=0, **row), SimpleNamespace(spread=2, **last)]
    alt = schedule_figures.against_spread(rows, 10, 8).alt
    assert "from 10 to 44" in alt and "falls to 23%" in alt and "91% or more" in alt
    waits = {"static": [1.0, 9.0], "continuous": [0.0, 1.0]}
    limits = {"static": 0.37, "continuous": 1.0}
    alt = schedule_figures.against_load([0.1, 0.3], waits, limits, Prediction("load", 0.6)).alt
    assert "static 0.37, continuous 1.00" in alt
