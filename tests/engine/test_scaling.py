"""Autoscaler policies: up at once, down when it has lasted."""

from __future__ import annotations

import pytest

from minillm.engine.scaling import DeadlineAutoscaler, FleetLoad, QueueAutoscaler, make_autoscaler


def test_by_queue_up_at_once_and_down_after_the_hold():
    policy = QueueAutoscaler(requests_per_replica=4, hold_seconds=10)
    wishes = [policy.desired(FleetLoad(now, 1, num_requests)) for now, num_requests in
              [(0, 3), (1, 17), (2, 4), (10.9, 4), (11.1, 4), (12, 9), (13, 0), (30, 0)]]  # fmt: skip
    assert wishes == [1, 5, 5, 5, 1, 3, 3, 0]


def test_by_deadline_from_waiting_tokens_and_the_measured_rate():
    policy = DeadlineAutoscaler(ttft_seconds=0.5, hold_seconds=0)
    assert policy.desired(FleetLoad(0, 3, 9, num_waiting_tokens=9000)) == 3  # no rate yet
    assert policy.desired(FleetLoad(1, 3, 9, 9000, prefill_tokens_per_second=4000)) == 5
    assert policy.desired(FleetLoad(2, 5, 9, 0, 4000)) == 1
    assert policy.desired(FleetLoad(3, 1, 0, 0, 4000)) == 0


def test_wrong_settings_are_refused_by_name():
    for make, said in (
        (lambda: QueueAutoscaler(0), "requests_per_replica=0"),
        (lambda: QueueAutoscaler(hold_seconds=-1), "hold_seconds=-1"),
        (lambda: DeadlineAutoscaler(ttft_seconds=float("nan")), "ttft_seconds=nan"),
        (lambda: make_autoscaler("magic"), "autoscaler='magic' is not known; choose from deadline, queue"),
    ):
        with pytest.raises(ValueError, match=said):
            make()
    assert make_autoscaler(None) is None and isinstance(make_autoscaler("queue"), QueueAutoscaler)
