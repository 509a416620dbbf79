"""The filters against slow references, one row and one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

from minillm.sampling import filters
from tests.helpers.tiny import seeded

NEVER = float("-inf")
# Halves are exact in float32 and often equal: ties are the rule here, not the exception.
rows_of_logits = st.integers(1, 5).flatmap(
    lambda rows: st.integers(1, 12).flatmap(
        lambda vocab: st.lists(
            st.lists(st.integers(-8, 8).map(lambda half: half / 2), min_size=vocab, max_size=vocab),
            min_size=rows,
            max_size=rows,
        )
    )
)


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(value - max(row)) for value in row]
    return [weight / sum(weights) for weight in weights]


def top_k_row(row, k):
    kth = sorted(row, reverse=True)[k - 1]
    return [value if value >= kth else NEVER for value in row]


def top_p_row(row, top_p):
    probs, kept, held = softmax(row), set(), 0.0
    for token in sorted(range(len(row)), key=lambda token: (-row[token], token)):
        if held >= top_p and top_p < 1:
            break
        kept.add(token)
        held += probs[token]
    return [value if token in kept else NEVER for token, value in enumerate(row)]


def min_p_row(row, min_p):
    probs = softmax(row)
    return [value if prob >= min_p * max(probs) else NEVER for value, prob in zip(row, probs)]


@seeded
@given(rows_of_logits, st.data())
def test_top_k_equals_the_reference(rows, data):
    top_k = data.draw(st.lists(st.integers(1, len(rows[0])), min_size=len(rows), max_size=len(rows)))
    ours = filters.top_k_filter(torch.tensor(rows), torch.tensor(top_k), max(top_k))
    assert ours.tolist() == [top_k_row(row, k) for row, k in zip(rows, top_k)]


# Values off the sums that these softmaxes reach, so that float32 and float64 agree on who crosses the line.
@seeded
@given(rows_of_logits, st.data())
def test_top_p_equals_the_reference(rows, data):
    allowed = st.sampled_from([0.0137, 0.2741, 0.5483, 0.8219, 0.9591, 1.0])
    top_p = data.draw(st.lists(allowed, min_size=len(rows), max_size=len(rows)))
    ours = filters.top_p_filter(torch.tensor(rows), torch.tensor(top_p))
    assert ours.tolist() == [top_p_row(row, p) for row, p in zip(rows, top_p)]


@seeded
@given(rows_of_logits, st.data())
def test_min_p_equals_the_reference(rows, data):
    min_p = data.draw(st.lists(st.sampled_from([0.0, 0.013, 0.21, 0.57, 0.93]), min_size=len(rows), max_size=len(rows)))
    ours = filters.min_p_filter(torch.tensor(rows), torch.tensor(min_p))
    assert ours.tolist() == [min_p_row(row, p) for row, p in zip(rows, min_p)]


def test_every_row_has_its_own_top_k():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    top_k = [1, 50, 7, 2, 33, 49]
    filtered = filters.top_k_filter(logits, torch.tensor(top_k), max(top_k))
    assert filtered.isfinite().sum(dim=1).tolist() == top_k
    for row, k in enumerate(top_k):
        assert torch.equal(filtered[row : row + 1], TopKLogitsWarper(k)(None, logits[row : row + 1]))


def test_the_most_probable_token_always_stays():
    logits = torch.tensor([[0.0, 30.0, 0.0]])
    for filtered in (
        filters.top_p_filter(logits, torch.tensor([1e-6])),
        filters.min_p_filter(logits, torch.tensor([1.0])),
        filters.top_k_filter(logits, torch.tensor([1]), 1),
    ):
        assert filtered.tolist() == [[NEVER, 30.0, NEVER]]


def test_top_p_one_keeps_a_tail_that_float32_cannot_sum():
    logits = torch.zeros(1, 200_000)
    logits[0, 0] = 20.0
    assert filters.top_p_filter(logits, torch.tensor([1.0])).isfinite().all()


def test_top_p_breaks_ties_towards_the_smaller_id():
    kept = filters.top_p_filter(torch.zeros(1, 10), torch.tensor([0.25])).isfinite()
    assert kept[0].tolist() == [True] * 3 + [False] * 7


def test_filters_leave_their_input_alone():
    logits = torch.randn(2, 8)
    before = logits.clone()
    filters.top_k_filter(logits, torch.tensor([2, 3]), 3)
    filters.top_p_filter(logits, torch.tensor([0.5, 0.9]))
    filters.min_p_filter(logits, torch.tensor([0.5, 0.1]))
    assert torch.equal(logits, before)


def penalized_row(row, prompt, output, repetition, presence, frequency):
    result = []
    for token, value in enumerate(row):
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token)
        value -= presence if token in output else 0
        result.append(value)
    return result


def penalize(rows, prompts, outputs, repetition, presence, frequency) -> torch.Tensor:
    logits = torch.tensor(rows)
    in_prompt, counts = torch.zeros_like(logits, dtype=torch.bool), torch.zeros_like(logits)
    for index, (prompt, output) in enumerate(zip(prompts, outputs)):
        in_prompt[index, prompt] = True
        for token in output:
            counts[index, token] += 1
    return filters.apply_penalties(
        logits, in_prompt, counts, torch.tensor(repetition), torch.tensor(presence), torch.tensor(frequency)
    )


@seeded
@given(rows_of_logits, st.data())
def test_penalties_equal_the_reference(rows, data):
    def one_a_row(strategy):
        return data.draw(st.lists(strategy, min_size=len(rows), max_size=len(rows)))

    tokens = st.lists(st.integers(0, len(rows[0]) - 1), max_size=8)
    prompts, outputs = one_a_row(tokens), one_a_row(tokens)
    repetition, penalties = one_a_row(st.sampled_from([0.5, 1.0, 1.3, 2.0])), st.sampled_from([-1.5, 0.0, 0.3, 2.0])
    presence, frequency = one_a_row(penalties), one_a_row(penalties)
    ours = penalize(rows, prompts, outputs, repetition, presence, frequency)
    expected = [penalized_row(*row) for row in zip(rows, prompts, outputs, repetition, presence, frequency)]
    assert torch.allclose(ours, torch.tensor(expected), atol=1e-5)


def test_repetition_penalty_equals_transformers():
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1))
    prompt, output = [3, 5, 5, 7], [5, 11, 12]
    ours = penalize(logits.tolist(), [prompt], [output], [1.7], [0.0], [0.0])
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    torch.testing.assert_close(ours, theirs)
    assert (ours != logits).sum() == len({*prompt, *output})


@pytest.mark.parametrize("name", ["presence", "frequency"])
def test_output_penalties_spare_the_prompt(name):
    values = {"presence": [0.0], "frequency": [0.0]} | {name: [1.0]}
    ours = penalize([[1.0, 1.0, 1.0]], [[0, 0]], [[1, 1]], [1.0], **values)
    assert ours.tolist() == [[1.0, 0.0 if name == "presence" else -1.0, 1.0]]
