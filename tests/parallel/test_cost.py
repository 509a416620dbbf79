"""The cost model: its formulas on numbers worked out by hand, the best split, and published results beside it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from minillm.parallel.collectives import ring_sent, tree_sent
from minillm.parallel.cost import (
    LINKS,
    MACHINES,
    SHAPES,
    LinkSpeed,
    Split,
    all_reduce_seconds,
    best_splits,
    kv_bytes_per_device,
    step_cost,
)
from minillm.parallel.measure import alpha_beta
from minillm.parallel.published import published

UNIT = LinkSpeed("unit", 1.0, 1.0, "")  # a message takes one second and one more for each byte
A100 = MACHINES["A100"]


@pytest.mark.parametrize(
    "algorithm, n, num_bytes, seconds",
    [("ring", 4, 40, 6 * 11), ("tree", 4, 40, 4 * 41), ("tree", 5, 40, 6 * 41), ("direct", 4, 40, 121),
     ("ring", 1, 40, 0), ("ring", 2, 0, 2), ("tree", 2, 8, 18), ("direct", 2, 8, 9),
     ("two-shot", 4, 40, 62)],
)  # fmt: skip
def test_an_all_reduce_by_hand(algorithm, n, num_bytes, seconds):
    assert all_reduce_seconds(num_bytes, n, UNIT, algorithm) == seconds


def test_seconds_of_a_ring_follow_from_what_a_rank_sends():
    for n in (2, 3, 8):
        sent = ring_sent(24 * n, 2, n, 0)
        link = LinkSpeed("other", 3.0, 5.0, "")
        assert all_reduce_seconds(48 * n, n, link) == pytest.approx(3 * sent.messages + sent.bytes / 5)
        assert tree_sent(24, 2, 2, 1).messages == 1
    with pytest.raises(ValueError, match="algorithm='star': use 'ring', 'tree', 'direct' or 'two-shot'"):
        all_reduce_seconds(1, 2, UNIT, "star")


def test_small_messages_go_direct_and_large_ones_around_the_ring():
    for link in LINKS.values():
        best = [
            min(("ring", "tree", "direct"), key=lambda name: all_reduce_seconds(size, 8, link, name))
            for size in (100, 10**9)
        ]
        assert best == ["direct", "ring"]


def test_parameters_are_those_of_the_models():
    billions = {"Llama 2 7B": 6.74, "Llama 2 70B": 68.98, "Llama 3.1 8B": 8.03, "Llama 3.1 70B": 70.55,
                "Llama 3.1 405B": 405.85, "Falcon 180B": 179.5}  # fmt: skip
    assert {name: round(shape.num_parameters / 1e9, 1) for name, shape in SHAPES.items()} == {
        name: pytest.approx(count, abs=0.1) for name, count in billions.items()
    }
    assert SHAPES["Llama 3.1 8B"].kv_bytes_per_token == 131_072


def test_a_decode_step_by_hand():
    """70B on two A100: half of the weights from memory, 80 layers with two all-reduces of 16 KiB."""
    shape = SHAPES["Llama 2 70B"]
    cost = step_cost(shape, A100, Split(tensor=2))
    weights = 2 * (shape.num_parameters - 32_000 * 8192) / 2
    assert cost.compute == pytest.approx(weights / A100.bandwidth)
    assert cost.communicate == pytest.approx(160 * 2 * (1.9e-6 + 8192 / 300e9))
    assert cost.latency == pytest.approx(cost.compute + cost.communicate) and cost.busy == 1
    assert cost.tokens_per_second == pytest.approx(1 / cost.latency)
    assert cost.memory == pytest.approx(shape.num_parameters)


def test_a_pipeline_is_full_with_as_many_requests_as_stages():
    one, four, eight = (step_cost(SHAPES["Llama 3.1 8B"], A100, Split(pipeline=4), batch=batch) for batch in (1, 4, 8))
    assert (one.busy, four.busy, eight.busy) == (0.25, 1, 1)
    assert four.tokens_per_second == pytest.approx(4 * one.tokens_per_second)
    assert eight.tokens_per_second == pytest.approx(2 * four.tokens_per_second, rel=1e-3)  # memory-bound
    assert one.latency == pytest.approx(four.latency)


def test_context_and_copies_of_kv_heads_are_counted():
    shape = replace(SHAPES["Llama 3.1 8B"], num_kv_heads=2)
    plain, split, copied = (
        step_cost(shape, A100, Split(tensor=tensor), batch=16, context=4096) for tensor in (1, 2, 4)
    )
    kv = 16 * 4096 * shape.kv_bytes_per_token
    weights = 2 * shape.num_parameters
    assert [cost.memory - weights / tensor for cost, tensor in ((plain, 1), (split, 2), (copied, 4))] == [
        pytest.approx(kv), pytest.approx(kv / 2), pytest.approx(kv / 2)
    ]  # fmt: skip
    assert kv_bytes_per_device(shape, 4, 1000) == 2 * kv_bytes_per_device(shape, 4, 1000, data_parallel=True)


def test_prompts_are_limited_by_arithmetic():
    cost = step_cost(SHAPES["Llama 3.1 8B"], A100, Split(), new_tokens=8192)
    shape = SHAPES["Llama 3.1 8B"]
    assert cost.compute == pytest.approx(
        2 * (shape.num_parameters - shape.vocab_size * shape.hidden_size) * 8192 / A100.flops
    )


def test_the_best_split_follows_the_link_and_the_objective():
    shape, batch = SHAPES["Llama 3.1 70B"], 64
    slow = replace(A100, link=LINKS["Ethernet 100 Gb/s"])
    fast = best_splits(shape, A100, 8, batch=batch, context=2048)
    assert fast[0][0] == Split(tensor=8)
    assert best_splits(shape, slow, 8, batch=batch, context=2048)[0][0].tensor < 8
    small = SHAPES["Llama 3.1 8B"]
    assert best_splits(small, A100, 8, batch=4096, context=64, objective="throughput")[0][0].replicas == 8
    assert all(split.num_devices == 8 for split, _ in fast)
    latencies = [cost.latency for _, cost in fast]
    assert latencies == sorted(latencies)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: step_cost(SHAPES["Llama 2 7B"], A100, Split(tensor=3)), "tensor=3 does not divide the 32 heads"),
        (lambda: step_cost(SHAPES["Llama 2 7B"], A100, Split(pipeline=33)), "pipeline=33 leaves a stage without"),
        (lambda: best_splits(SHAPES["Llama 3.1 405B"], A100, 8, batch=1), "does not fit into 90% of 8 × 80 GB"),
        (lambda: best_splits(SHAPES["Llama 2 7B"], A100, 8, batch=1, objective="speed"), "objective='speed'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_published_results_lie_where_the_chapter_says():
    """The ratios of the table: how far the model is off, in each comparison."""
    rows = published()
    ranges: dict[str, list[float]] = {}
    for row in rows:
        ranges.setdefault(row.group, []).append(row.ratio)
        assert row.source and math.isfinite(row.ratio)
    told = {group: (min(ratios), max(ratios)) for group, ratios in ranges.items()}
    for group, (low, high) in EXPECTED.items():
        assert low <= told[group][0] and told[group][1] <= high, (group, told[group])
    assert set(EXPECTED) == set(told)


EXPECTED = {
    "all-reduce": (0.4, 1.0),
    "tensor parallel": (0.9, 1.3),
    "tensor or pipeline": (0.8, 1.15),
    "across nodes": (1.0, 1.6),
    "ring attention": (1.0, 1.1),
}


def test_alpha_and_beta_are_read_off_measured_messages():
    measured = {size: 2e-6 + size / 1e9 for size in (0, 1000, 10_000, 1_000_000)}
    assert alpha_beta(measured) == (pytest.approx(2e-6), pytest.approx(1e9))
    with pytest.raises(ValueError, match="2 sizes"):
        alpha_beta({1: 1.0, 2: 2.0})
