"""Mooncake's trace format survives its file, and synthetic traces have the published statistics."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from minillm.engine.fleet.synthetic import (
    MOONCAKE,
    day_times,
    mooncake_like,
    plain_trace,
    shared_prefix_trace,
)
from minillm.engine.fleet.traces import FleetRequest, TraceStatistics, read_trace, write_trace

# Two lines of FAST25-release/README.md, commit 3b5a594 of kvcache-ai/Mooncake.
SAMPLES = [
    {"timestamp": 27482, "input_length": 6955, "output_length": 52,
     "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]},
    {"timestamp": 30535, "input_length": 6472, "output_length": 26,
     "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2366]},
]  # fmt: skip


def test_lines_of_the_public_trace_are_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, SAMPLES)) + "\n\n")
    first, second = read_trace(path)
    assert (first.timestamp, first.input_length, first.output_length) == (27.482, 6955, 52)
    assert first.full_blocks == first.hash_ids[:13] and len(second.full_blocks) == 12
    statistics = TraceStatistics.of([first, second])
    assert statistics.cache_ratio == pytest.approx(12 * 512 / (6955 + 6472))
    assert [one.timestamp for one in read_trace(path, time_scale=0.5)] == [13.741, 15.2675]


def test_a_trace_survives_its_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = list(mooncake_like("toolagent", 50, seed=3))
    assert write_trace(path, trace) == 50
    again = list(read_trace(path))
    assert [one.hash_ids for one in again] == [one.hash_ids for one in trace]
    assert all(abs(one.timestamp - two.timestamp) <= 0.0005 for one, two in zip(trace, again))
    assert set(json.loads(path.read_text().splitlines()[0])) == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
    }
    assert write_trace(path, again) == 50 and list(read_trace(path)) == again


@pytest.mark.parametrize(
    "change, said",
    [
        ({"input_length": 0}, "lengths at least 1"),
        ({"hash_ids": [1]}, "hash_ids has 1 entries for input_length=6955; allowed: none, or 14"),
        ({"timestamp": -1}, "timestamp must be at least 0"),
        ({"timestamp": float("nan")}, "timestamp must be at least 0"),
        ({"timestamp": 99_999_999}, None),
        ({"input_length": "many"}, "many"),
        ({"hash_ids": 7}, "line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, change, said):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(SAMPLES[0] | change) + "\n" + json.dumps(SAMPLES[1]) + "\n")
    where = "line 1: " if said else "line 2: timestamp 30535 is earlier"
    with pytest.raises(ValueError, match=f"trace.jsonl, {where}") as error:
        list(read_trace(path))
    assert (said or "") in str(error.value)
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(ValueError, match="line 1: the field 'input_length' is missing"):
        list(read_trace(path))
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1"):
        list(read_trace(path))


@pytest.mark.parametrize("kind", MOONCAKE)
def test_synthetic_traces_have_the_published_statistics(kind):
    told = MOONCAKE[kind]
    found = TraceStatistics.of(mooncake_like(kind, 6_000, seed=1))
    assert found.input_length == pytest.approx(told.input_length, rel=0.05)
    assert found.output_length == pytest.approx(told.output_length, rel=0.07)
    assert found.cache_ratio == pytest.approx(told.cache_ratio, abs=0.05)
    assert 6_000 / found.seconds == pytest.approx(told.num_requests / 3600, rel=0.05)


def test_generators_say_what_is_wrong_and_repeat_themselves():
    with pytest.raises(ValueError, match="kind='chat' is unknown; choose one of conversation, toolagent, synthetic"):
        next(mooncake_like("chat"))
    with pytest.raises(ValueError, match="rate=0 is not allowed"):
        next(plain_trace(3, 0, 10, 10))
    assert list(mooncake_like(seed=4, num_requests=40)) == list(mooncake_like(seed=4, num_requests=40))
    lengths = [one.input_length for one in plain_trace(4_000, 10, 300, 50, spread=1.0, seed=2, longest=2_000)]
    assert sum(lengths) / 4_000 == pytest.approx(300, rel=0.06) and max(lengths) == 2_000
    assert {(one.input_length, one.output_length) for one in plain_trace(50, 10, 300, 50)} == {(300, 50)}


def test_shared_prefixes_share_exactly_their_prefix():
    trace = list(shared_prefix_trace(200, 10, 3, 4, 700, 5, seed=1))
    for one, two in itertools.combinations(trace[:30], 2):
        shared = sum(a == b for a, b in zip(one.hash_ids, two.hash_ids))
        assert shared == (4 if one.hash_ids[0] == two.hash_ids[0] else 0)
    assert trace[0].input_length == 4 * 512 + 700 and len(trace[0].hash_ids) == 6
    skewed = [one.hash_ids[0] for one in shared_prefix_trace(600, 10, 10, 1, 10, 5, skew=1.5, seed=1)]
    assert skewed.count(0) > 2 * skewed.count(1) > 0


def test_equal_ids_give_equal_tokens_of_an_engine():
    one, two = (FleetRequest(0.0, 1_100, 3, ids) for ids in ((1, 2, 3), (1, 2, 4)))
    left, right = one.to_request(0), two.to_request(1)
    assert left.prompt_token_ids[:1024] == right.prompt_token_ids[:1024]
    assert left.prompt_token_ids[1024:] != right.prompt_token_ids[1024:] and len(left.prompt_token_ids) == 1_100
    plain = [FleetRequest(0.0, 40, 3).to_request(index).prompt_token_ids for index in range(2)]
    assert plain[0] != plain[1]


def test_a_day_follows_its_rates():
    times = list(day_times([2.0, 0.0, 10.0], 100.0, random.Random(0)))
    counts = [sum(place * 100 <= moment < (place + 1) * 100 for moment in times) for place in range(3)]
    assert counts[1] == 0 and counts[0] == pytest.approx(200, rel=0.2) and counts[2] == pytest.approx(1000, rel=0.1)
    assert times == sorted(times) and times[-1] < 300
