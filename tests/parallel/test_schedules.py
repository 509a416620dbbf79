"""Pipeline schedules: the simulation counts the bubbles that the formulas say."""

from __future__ import annotations

import itertools

import pytest

from minillm.parallel.schedules import (
    BACKWARD,
    FORWARD,
    Task,
    bubble_fraction,
    decode_busy,
    decode_timeline,
    orders,
    simulate,
    timeline,
)


@pytest.mark.parametrize("policy", ["forward", "gpipe", "1f1b"])
def test_the_bubble_is_p_minus_1_over_m_plus_p_minus_1(policy):
    for stages, micro_batches in itertools.product(range(1, 7), range(1, 13)):
        line = timeline(stages, micro_batches, policy)
        assert line.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-12)
        assert line.bubble == pytest.approx(bubble_fraction(stages, micro_batches, policy), abs=1e-12)
        assert line.length == pytest.approx((micro_batches + stages - 1) * (1 if policy == "forward" else 3))


def test_chunks_shorten_the_bubble():
    for stages, groups, chunks in itertools.product((2, 3, 4), (1, 2, 4), (1, 2, 3)):
        line = timeline(stages, groups * stages, "interleaved", num_chunks=chunks)
        idle = line.length - 3 * groups * stages
        assert idle == pytest.approx(3 * (stages - 1) / chunks)
        assert line.bubble == pytest.approx(bubble_fraction(stages, groups * stages, "interleaved", chunks))


def test_1f1b_holds_no_more_than_its_stages():
    assert timeline(4, 12, "gpipe").most_in_flight == 12
    assert timeline(4, 12, "1f1b").most_in_flight == 4
    assert 4 < timeline(4, 12, "interleaved", num_chunks=2).most_in_flight <= 12


def test_decoding_is_busy_with_as_many_micro_batches_as_stages():
    for stages, micro_batches in itertools.product(range(1, 6), range(1, 9)):
        tokens = 400
        line = decode_timeline(stages, micro_batches, tokens)
        assert 1 - line.bubble == pytest.approx(decode_busy(stages, micro_batches), abs=0.02)
        starts = {}
        for _, task, start, end in line.runs:
            token, micro_batch = divmod(task.micro_batch, micro_batches)
            assert start >= starts.get((micro_batch, token, task.stage - 1), 0)
            assert task.stage or start >= starts.get((micro_batch, token - 1, stages - 1), 0)
            starts[micro_batch, token, task.stage] = end


def test_every_task_runs_once_and_no_device_does_two_at_a_time():
    for policy, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        line = timeline(3, 6, policy, num_chunks=chunks, hop=0.1)
        tasks = [task for _, task, *_ in line.runs]
        assert sorted(tasks) == sorted(
            Task(kind, micro_batch, stage)
            for kind in (FORWARD, BACKWARD) for micro_batch in range(6) for stage in range(3 * chunks)
        )  # fmt: skip
        for device in range(3):
            own = sorted((start, end) for on, _, start, end in line.runs if on == device)
            assert all(end <= start + 1e-12 for (_, end), (start, _) in itertools.pairwise(own))


def test_what_never_ends_or_does_not_fit_is_refused():
    stuck = [[Task(FORWARD, 0, 0)], [Task(FORWARD, 1, 1), Task(FORWARD, 0, 1)]]
    with pytest.raises(ValueError, match="the plan can never go on: device 1 at Task"):
        simulate(stuck, {FORWARD: 1.0})
    for arguments, said in (
        ((2, 2, "best"), "policy='best'"),
        ((0, 2, "gpipe"), "num_stages=0"),
        ((2, 4, "gpipe", 2), "num_chunks=2: only the policy 'interleaved'"),
        ((4, 6, "interleaved", 2), "num_micro_batches=6 is no multiple of num_stages=4"),
    ):
        with pytest.raises(ValueError, match=said):
            orders(*arguments)
