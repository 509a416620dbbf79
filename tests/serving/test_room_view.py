"""What is told of the steps of an engine: drafts, preemptions, the blocks, and random traffic counted whole."""

from __future__ import annotations

import random

import pytest

from minillm.engine.llm import LLM
from minillm.engine.step_log import StepLog
from minillm.kv_cache.block_pool import BlockPool
from minillm.sampling.params import SamplingParams
from minillm.serving.block_map import block_map, ranges
from minillm.serving.room_view import RoomView

from .conftest import MODEL
from .test_engine_room import runs_of


def test_preempted_requests_are_told_and_what_they_compute_again():
    llm = LLM(MODEL, dtype="float32", device="cpu", num_kv_blocks=12, max_num_seqs=4, max_num_batched_tokens=64)
    view, log = RoomView(llm.engine), StepLog()
    llm.engine.step_logs.append(log)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    sinks = [llm.submit([7 + place] * 30, params) for place in range(4)]
    records = []
    while llm.step():
        if llm.engine.num_steps % 7 == 0:
            records.append(view.record(log.take()))
    records.append(view.record(log.take()))
    totals = view.totals
    assert totals["preempted"] == sum(sink.num_preemptions for sink in sinks) > 0
    assert totals["recomputed"] > 0 and len(runs_of(records, "x")) == totals["preempted"]
    assert totals["generated"] == 4 * 60 and totals["finished"] == 4
    assert totals["tokens"] == sum(run[4] for run in runs_of(records))
    computed = totals["prefill"] + totals["cached"] + totals["decoded"]
    assert computed >= 4 * (30 + 59)


def test_requests_are_numbered_as_they_arrived():
    """Also one that came and went within the steps of one record, while a later one is in the scheduler still."""
    llm = LLM(MODEL, dtype="float32", device="cpu", num_kv_blocks=50)
    view, log = RoomView(llm.engine), StepLog()
    llm.engine.step_logs.append(log)
    llm.generate({"prompt_token_ids": [5] * 9}, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    llm.submit([5] * 3, SamplingParams(temperature=0, max_tokens=2))
    told = view.record(log.take())["requests"]
    assert {one["number"]: one["prompt"] for one in told} == {1: 9, 2: 3}


def test_draft_tokens_are_told():
    speculative_config = {"method": "ngram", "num_speculative_tokens": 3}
    llm = LLM(MODEL, dtype="float32", device="cpu", num_kv_blocks=50, speculative_config=speculative_config)
    view, log = RoomView(llm.engine), StepLog()
    llm.engine.step_logs.append(log)
    llm.generate(
        "Once", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias={20: 100.0}), use_tqdm=False
    )
    record = view.record(log.take())
    metrics = llm.engine.speculation.metrics
    totals = record["totals"]
    assert (totals["drafted"], totals["accepted"]) == (metrics.num_draft_tokens, metrics.num_accepted_tokens)
    assert totals["generated"] == 30 and 0 < totals["accepted"] == sum(run[6] for run in record["runs"])


def test_the_block_map_names_each_block():
    pool = BlockPool(10)
    _, two, three, _ = pool.allocate(4)
    pool.touch([two])
    pool.cache(three, b"hash")
    pool.free([three])
    told = block_map(pool)
    assert told["map"] == "osco" and told["blocks_each"] == 1
    assert [told[name] for name in ("total", "free", "cached", "owned", "shared")] == [10, 6, 1, 2, 1]
    assert block_map(BlockPool(3))["map"] == ""


def test_a_table_is_told_in_ranges():
    assert ranges([0, 5, 3, 4, 9, 0]) == "3-5,9" and ranges([7]) == "7" and ranges([0]) == ranges([]) == ""


def test_many_blocks_share_a_letter(monkeypatch):
    monkeypatch.setattr("minillm.serving.block_map.MOST", 4)
    pool = BlockPool(100)
    blocks = pool.allocate(10)
    pool.free(blocks[3:9])  # o o o | f f f | f f f | o
    pool.touch([blocks[1]])
    pool.cache(blocks[4], b"hash")
    told = block_map(pool)
    assert (told["map"], told["blocks_each"]) == ("scfo", 3)
    assert told["owned"] == 3 and told["shared"] == 1 and told["cached"] == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"preemption_mode": "swap", "host_kv_bytes": 2**20},
    ],
    ids=["plain", "ahead", "speculation", "swap"],
)
def test_random_traffic_is_told_whole(options):
    """Requests come, are aborted, are preempted and split into samples; records are made at random moments."""
    llm = LLM(
        MODEL, dtype="float32", device="cpu", num_kv_blocks=24, max_num_seqs=5, max_num_batched_tokens=48, **options
    )
    generator = random.Random(0)
    view, log = RoomView(llm.engine), StepLog()
    llm.engine.step_logs.append(log)
    sinks, records = [], []
    for _ in range(400):
        if len(sinks) < 60 and generator.random() < 0.3:
            params = SamplingParams(max_tokens=generator.randint(1, 40), n=generator.choice([1, 1, 3]), ignore_eos=True)
            sinks.append(llm.submit([generator.randrange(10, 20)] * generator.randint(1, 90), params))
        if sinks and generator.random() < 0.05:
            generator.choice(sinks).withdraw()
        if generator.random() < 0.2:
            records.append(view.record(log.take()))
        llm.step()
    while llm.step():
        pass
    records += [view.record(log.take()) for _ in range(3)]
    totals, told = view.totals, [one for record in records for one in record["requests"]]
    assert totals["generated"] == sum(len(sample.token_ids) for sink in sinks for sample in sink.samples)
    assert totals["tokens"] == totals["prefill"] + totals["recomputed"] + totals["decoded"]
    assert totals["tokens"] - sum(run[4] for run in runs_of(records)) <= 48 * 5  # of requests that left unseen
    assert totals["preempted"] == llm.counters.tokens["preemptions"] or totals["aborted"]
    ends = [one["number"] for one in told if one["state"] == "finished"]
    assert len(ends) == len(set(ends)) == totals["finished"] + totals["aborted"] and not view.seen
    assert {one["number"] for one in told} == set(ends)
    assert all(one["arrived"] <= one["ended"] + 1 for one in told if one["state"] == "finished")
    for record in records:
        blocks = record["blocks"]
        assert blocks["owned"] + blocks["shared"] + blocks["cached"] + blocks["free"] == blocks["total"] == 24
