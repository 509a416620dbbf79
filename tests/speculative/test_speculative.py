"""Drafters, rejection sampling and lengths, each against a reference of a few lines."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.stats import chisquare

from minillm import SamplingParams
from minillm.kv_cache.manager import KVCacheManager
from minillm.sampling.metadata import SamplingMetadata, SamplingRow
from minillm.speculative.adaptive import Acceptance, AdaptiveLength, StepCost
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.draft_model import ModelDrafter
from minillm.speculative.metrics import SpeculationMetrics
from minillm.speculative.ngram import NgramDrafter
from minillm.speculative.rejection import Drafted, RejectionSampler
from tests.helpers.tiny import seeded

# N-grams


def looked_up(tokens: list[int], min_n: int, max_n: int, count: int) -> list[int]:
    """By its definition: the longest n-gram at the end that stood before, its last place, and on from there."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                text = tokens[start + n :]
                while len(text) < count:
                    text += tokens[start + n :]
                return text[:count]
    return []


@seeded
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 6),
    st.integers(1, 39),
)
def test_the_ngram_drafter_finds_what_its_definition_says(tokens, min_n, more, count, seen):
    drafter = NgramDrafter(min_n, min_n + more)
    for end in sorted({min(seen, len(tokens)), len(tokens)}):  # the text grows between two calls
        request = SimpleNamespace(request_id="a", token_ids=tokens[:end])
        [draft] = drafter.propose([request], [count])
        assert draft.token_ids == looked_up(tokens[:end], min_n, min_n + more, count) and draft.probs is None
    assert list(drafter.indices) == ["a"]
    drafter.forget("a")
    assert not drafter.indices


def test_requests_do_not_share_an_index():
    drafter = NgramDrafter(1, 2)
    one, two = (
        SimpleNamespace(request_id=name, token_ids=tokens) for name, tokens in (("a", [1, 2, 1]), ("b", [1, 3, 1]))
    )
    assert [draft.token_ids for draft in drafter.propose([one, two], [1, 1])] == [[2], [3]]


# Rejection sampling


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(temperature=0.6, top_k=5), dict(temperature=1.5, top_p=0.8), dict(min_p=0.02, logit_bias={0: 2.0})],
)
def test_accepted_or_redrawn_tokens_are_distributed_as_the_target(settings):
    """10^5 guesses from q, checked: what comes out is p, whatever q is. The draws without a check are not."""
    count, vocab_size = 100_000, 8
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(vocab_size, generator=generator)
    q = torch.softmax(2 * torch.randn(vocab_size, generator=generator), 0)
    params = SamplingParams(**settings)
    metadata = SamplingMetadata([SamplingRow(params, seed, [1], [], frozenset()) for seed in range(count)], vocab_size)
    rows = logits.expand(count, -1)
    p = metadata.probs(rows)[0].double().numpy()
    guesses = torch.multinomial(q, count, replacement=True, generator=generator)
    metadata.drafted = Drafted(torch.arange(count), guesses, q.expand(count, -1))
    said = RejectionSampler().choose(rows, metadata)
    assert fits(said, p) > 1e-3 > fits(guesses, p)
    accepted = float((said == guesses).double().mean())
    expected = float(np.minimum(p, q.double().numpy()).sum())  # 1 - the total variation distance
    assert abs(accepted - expected) < 5 * (0.25 / count) ** 0.5


def fits(token_ids: torch.Tensor, p: np.ndarray) -> float:
    """The p-value of Pearson's chi-square; 0 if something impossible was said."""
    counts = np.bincount(token_ids, minlength=len(p))
    possible = p > 0
    if counts[~possible].any():
        return 0.0
    return chisquare(counts[possible], counts.sum() * p[possible] / p[possible].sum()).pvalue


def test_the_noise_of_a_draft_is_not_that_of_what_replaces_it():
    """Guesses as the draft model draws them, checked as the engine does:
    were it one noise, the redrawn ones would lean."""
    count, vocab_size = 40_000, 6
    p, q = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.05, 0.05]), torch.tensor([0.05, 0.05, 0.6, 0.1, 0.1, 0.1])
    params = SamplingParams()
    drafter = ModelDrafter(
        lambda rows, token_ids: q.log().expand(len(rows), -1), KVCacheManager(2000, 4), vocab_size, 100
    )
    said = []
    for first in range(0, count, 2000):
        requests = [a_request(str(seed), params, seed) for seed in range(first, first + 2000)]
        drafts = drafter.propose(requests, [1] * len(requests))
        metadata = SamplingMetadata(
            [SamplingRow(params, seed, [1], [], frozenset()) for seed in range(first, first + 2000)], vocab_size
        )
        guesses = torch.tensor([draft.token_ids[0] for draft in drafts])
        metadata.drafted = Drafted(torch.arange(2000), guesses, torch.cat([draft.probs for draft in drafts]))
        said.append(RejectionSampler().choose(p.log().expand(2000, -1), metadata))
        for request in requests:
            drafter.forget(request.request_id)
    assert fits(torch.cat(said), p.double().numpy()) > 1e-3
    assert drafter.manager.pool.num_free == 2000


def a_request(name: str, params: SamplingParams, seed: int) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, params=params, token_ids=[1], prompt_token_ids=[1], output_token_ids=[],
                           stop_token_ids=frozenset(), grammar=None, cache_salt=None,
                           sample_seed=lambda: seed)  # fmt: skip


def test_other_rows_of_the_batch_keep_their_own_draw():
    vocab_size, logits = 16, torch.randn(6, 16)
    rows = [
        SamplingRow(SamplingParams(temperature=t), seed, [1], [], frozenset())
        for seed, t in enumerate([0, 1, 1, 0, 1, 1])
    ]
    plain = SamplingMetadata(rows, vocab_size)
    expected = RejectionSampler().choose(logits, plain)
    checked = SamplingMetadata(rows, vocab_size)
    q = torch.softmax(torch.randn(2, vocab_size), -1)
    checked.drafted = Drafted(torch.tensor([1, 4]), torch.tensor([3, 5]), q)
    said = RejectionSampler().choose(logits, checked)
    assert [int(x) for i, x in enumerate(said) if i not in (1, 4)] == [
        int(x) for i, x in enumerate(expected) if i not in (1, 4)
    ]
    again = SamplingMetadata(rows, vocab_size)
    again.drafted = checked.drafted
    assert RejectionSampler().choose(logits, again).tolist() == said.tolist()


def test_a_guess_from_the_target_itself_is_always_accepted():
    logits, count = torch.randn(500, 12), 500
    metadata = SamplingMetadata(
        [SamplingRow(SamplingParams(), seed, [1], [], frozenset()) for seed in range(count)], 12
    )
    p = metadata.probs(logits)
    guesses = torch.multinomial(p, 1)[:, 0]
    metadata.drafted = Drafted(torch.arange(count), guesses, p)
    assert RejectionSampler().choose(logits, metadata).tolist() == guesses.tolist()


# Lengths


def brute_force(rates: list[float], limits: list[int], step, draft) -> float:
    best = 0.0
    for lengths in itertools.product(*(range(limit + 1) for limit in limits)):
        tokens = sum(sum(rate**place for place in range(length + 1)) for rate, length in zip(rates, lengths))
        seconds = float(step(len(rates) + sum(lengths))) + (max(lengths) * float(draft(len(rates))) if draft else 0.0)
        best = max(best, tokens / seconds)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_lengths_make_the_most_tokens_a_second(seed):
    rng = random.Random(seed)
    step = StepCost({1: 1.0, 4: 1.0 + 0.3 * rng.random(), 16: 1.5 + 3 * rng.random()})
    draft = StepCost({1: 0.3 * rng.random()}) if seed % 2 else None
    lengths = AdaptiveLength(step, draft)
    names = [f"r{i}" for i in range(rng.randint(1, 4))]
    limits = [rng.randint(0, 4) for _ in names]
    for name in names:
        lengths.acceptance[name] = Acceptance()
        lengths.acceptance[name].right = lengths.acceptance[name].tried * rng.random()
    rates = [lengths.acceptance[name].rate for name in names]
    chosen = lengths.choose(names, limits)
    assert all(0 <= length <= limit for length, limit in zip(chosen, limits))
    tokens = sum(sum(rate**place for place in range(length + 1)) for rate, length in zip(rates, chosen))
    seconds = float(step(len(names) + sum(chosen))) + (max(chosen) * float(draft(len(names))) if draft else 0.0)
    assert tokens / seconds == pytest.approx(brute_force(rates, limits, step, draft), rel=1e-6)


def test_a_full_batch_stops_guessing_and_bad_guesses_stop_it_for_a_while():
    steps = {1: 1.0, 8: 1.0, 64: 8.0}  # nothing is free beyond 8 tokens
    lengths = AdaptiveLength(StepCost(steps))
    assert lengths.choose(["a"], [4]) == [4]
    assert sum(lengths.choose([f"r{i}" for i in range(8)], [4] * 8)) == 0
    dear = AdaptiveLength(StepCost({1: 1.0, 2: 1.3, 4: 1.9}))
    for _ in range(20):
        dear.choose(["a"], [4])
        dear.add("a", 4, 0)
    assert dear.choose(["a"], [4]) == [0]
    for _ in range(200):
        dear.add("a", 0, 0)
    assert dear.choose(["a"], [4]) != [0]
    dear.forget("a")
    assert not dear.acceptance


def test_metrics_count_by_position():
    metrics = SpeculationMetrics()
    for drafted, accepted in ((3, 3), (3, 1), (2, 0), (1, 1)):
        metrics.add(drafted, accepted)
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (4, 9, 5)
    assert metrics.drafted_per_position == [4, 3, 2] and metrics.accepted_per_position == [3, 1, 1]
    assert metrics.num_misses == 2 and metrics.alpha == 5 / 7
    assert metrics.mean_acceptance_length == 1 + 5 / 4 and metrics.acceptance_by_position == [3 / 4, 1 / 3, 1 / 2]


# Configuration


@pytest.mark.parametrize("given, error, says", [
    ("ngram", TypeError, "allowed: None, or a dict"),
    ({}, ValueError, "does not say who drafts"),
    ({"method": "medusa"}, ValueError, "method='medusa' is not allowed; allowed: ngram, draft_model, eagle"),
    ({"method": "ngram", "tokens": 3}, ValueError, "no field 'tokens'; fields: method, num_speculative_tokens"),
    ({"method": "ngram", "num_speculative_tokens": 0}, ValueError, "num_speculative_tokens=0 is not allowed"),
    ({"method": "ngram", "num_speculative_tokens": 2.0}, TypeError, "num_speculative_tokens=2.0 is not allowed"),
    ({"method": "ngram", "num_speculative_tokens": 65}, ValueError,
     "num_speculative_tokens=65 is not allowed; allowed: a whole number from 1 to 64"),
    ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, ValueError,
     "prompt_lookup_min=5 exceeds prompt_lookup_max=4"),
    ({"method": "draft_model", "model": "x", "prompt_lookup_max": 4}, ValueError,
     "prompt_lookup_max=4 has nothing to do with"),
    ({"method": "ngram", "model": "tinyworld-draft"}, ValueError, "has nothing to do with method='ngram'"),
    ({"method": "ngram", "quantization": "int8"}, ValueError, "needs a model to quantize"),
    ({"method": "draft_model"}, ValueError, "needs a model"),
    ({"method": "eagle"}, ValueError, "needs a model, model=None is none; give a bundled name"),
    ({"method": "eagle", "model": "x", "prompt_lookup_min": 2}, ValueError, "has nothing to do with method='eagle'"),
    ({"method": "eagle", "model": "x", "quantization": "int8"}, ValueError, "of a draft head is not supported"),
    ({"method": "ngram", "adaptive": 1}, TypeError, "adaptive=1 is not allowed"),
])  # fmt: skip
def test_errors_name_field_value_and_what_is_allowed(given, error, says):
    with pytest.raises(error, match="speculative_config") as caught:
        SpeculativeConfig.of(given)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, (2, 4)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 7}, (7, 7)),
        ({"prompt_lookup_max": 3}, (2, 3)),
    ],
)
def test_one_end_of_the_ngrams_may_be_given_alone(given, expected):
    spec = SpeculativeConfig.of({"method": "ngram", **given})
    assert (spec.prompt_lookup_min, spec.prompt_lookup_max) == expected
