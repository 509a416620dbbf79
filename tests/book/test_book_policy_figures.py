"""The drawings of chapter 09 say what they show."""

from __future__ import annotations

from types import SimpleNamespace

from minillm.book.policy_figures import (
    latency_against_load,
    service_and_waits,
    steps_and_ends,
    virtual_engine,
    within_slo,
)


def request(user, arrival, first, last=9.0):
    return SimpleNamespace(
        user=user, arrival_time=arrival, token_times=[first, last], num_prompt_tokens=10, max_tokens=5
    )


def test_the_simulator_is_drawn_beside_the_engine():
    alt = virtual_engine().alt
    assert "virtual clock" in alt and "the same objects" in alt and "ModelRunner" in alt


def test_steps_are_drawn_over_their_prediction():
    runs = {"measured": [request("a", 0.0, 1.0, 2.0)], "simulated": [request("a", 0.0, 1.0, 2.1)]}
    alt = steps_and_ends([8.0, 30.0, 9.0], [8.5, 27.0, 9.0], [False, True, False], runs).alt
    assert "time of 3 steps" in alt and "median step is 9.0 ms" in alt


def test_waits_are_told_apart_by_user():
    requests = [request("greedy", 0.0, 4.0), request("user 1", 1.0, 1.5), request("user 2", 1.0, 2.5)]
    charges = [(1.5, "user 1", 10), (2.5, "user 2", 10), (4.0, "greedy", 10)]
    alt = service_and_waits({"fcfs": SimpleNamespace(requests=requests, charges=charges)} | {
        "fair": SimpleNamespace(requests=requests[::-1], charges=charges)}, "greedy").alt  # fmt: skip
    assert "fcfs: the greedy user waited 4.00 s" in alt and "fair: the 2 others waited 1.00 s" in alt


def test_policies_are_told_at_the_highest_load():
    lines = {"fcfs": [0.1, 2.0], "sjf": [0.1, 0.5]}
    alt = latency_against_load((0.5, 1.5), {"mean TTFT": lines, "mean E2E": lines, "P99": lines}).alt
    assert "At load 1.5" in alt and "sjf: mean TTFT 0.50 s" in alt
    alt = within_slo((0.5, 1.3), {"fcfs": [(1.0, 0.0), (0.7, 0.1)], "sjf": [(1.0, 0.0), (0.9, 0.02)]}, 6).alt
    assert "fcfs: 70% ± 10%" in alt and "6 seeds" in alt
