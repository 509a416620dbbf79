"""The sampler: right distributions, exact greedy, rows that do not disturb each other."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from minillm import SamplingParams
from minillm.sampling.logprobs import gather_logprobs
from minillm.sampling.metadata import SamplingMetadata, SamplingRow
from minillm.sampling.sampler import Sampler
from tests.sampling.test_sampling_filters import min_p_row, softmax, top_k_row, top_p_row

LOGITS = [1.2, 0.3, -0.4, 2.0, 1.9, -1.1, 0.0, 0.9, -2.0, 1.0]
VOCAB_SIZE = len(LOGITS)


def row(params: SamplingParams, seed: int = 0, prompt=(), output=(), stop=frozenset()) -> SamplingRow:
    return SamplingRow(params, seed, list(prompt), list(output), frozenset(stop))


def choose(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    return Sampler().sample(logits, SamplingMetadata(rows, logits.shape[1])).token_ids.tolist()


def expected_probs(params: SamplingParams) -> list[float]:
    """Temperature, min-p, top-k, top-p: row by row, in the order that vLLM has."""
    values = [value / params.temperature for value in LOGITS]
    values = min_p_row(values, params.min_p)
    values = top_k_row(values, params.top_k or VOCAB_SIZE)
    return softmax(top_p_row(values, params.top_p))


CASES = [
    dict(),
    dict(temperature=0.7),
    dict(temperature=2.5),
    dict(top_k=4),
    dict(top_p=0.83),
    dict(min_p=0.17),
    dict(temperature=1.5, top_k=7, top_p=0.77, min_p=0.05),
]


def assert_drawn_from(tokens: list[int], probs: list[float]) -> None:
    """Pearson's chi-square; what has probability 0 must not occur at all."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probs)).tolist()
    kept = [token for token, prob in enumerate(probs) if prob > 0]
    assert sum(counts[token] for token in kept) == len(tokens)
    if len(kept) > 1:
        expected = [probs[token] * len(tokens) for token in kept]
        assert min(expected) > 5
        assert stats.chisquare([counts[token] for token in kept], expected).pvalue > 1e-3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_over_seeds_follow_the_filtered_softmax(case):
    params, num_draws = SamplingParams(**case), 8000
    logits = torch.tensor([LOGITS]).expand(num_draws, -1)
    assert_drawn_from(choose(logits, [row(params, seed) for seed in range(num_draws)]), expected_probs(params))


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=str)
def test_draws_over_positions_follow_the_filtered_softmax(case):
    params, logits = SamplingParams(**case), torch.tensor([LOGITS])
    metadata, sampler, tokens = SamplingMetadata([row(params, seed=77)], VOCAB_SIZE), Sampler(), []
    for _ in range(3000):
        token_ids = sampler.sample(logits, metadata).token_ids
        metadata.advance(token_ids)
        tokens += token_ids.tolist()
    assert_drawn_from(tokens, expected_probs(params))


def test_neighbouring_positions_are_independent():
    params, logits, num_draws = SamplingParams(), torch.zeros(1, 4), 4000
    pairs = [
        choose(logits.expand(2, -1), [row(params, seed, output=[0] * position) for position in (5, 6)])
        for seed in range(num_draws)
    ]
    assert_drawn_from([4 * first + second for first, second in pairs], [1 / 16] * 16)


def random_rows(num_rows: int) -> tuple[torch.Tensor, list[SamplingRow]]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(num_rows, 60, generator=generator) * 2
    rows = []
    for index in range(num_rows):
        params = SamplingParams(
            temperature=[0.0, 0.7, 1.0, 1.8][index % 4],
            top_k=[0, 5, 59][index % 3],
            top_p=[1.0, 0.8][index % 2],
            min_p=[0.0, 0.0, 0.1, 0.0, 0.02][index % 5],
            repetition_penalty=[1.0, 1.4, 0.8][index % 3],
            presence_penalty=[0.0, 0.7][index // 2 % 2],
            frequency_penalty=[0.4, 0.0, -0.2][index // 3 % 3],
            logit_bias={index: 3.0} if index % 4 == 1 else None,
            min_tokens=[0, 6][index % 2],
        )
        prompt, output = torch.randint(0, 60, (2, 8), generator=generator).tolist()
        rows.append(row(params, seed=index % 5, prompt=prompt, output=output[: index % 8], stop={1, index}))
    return logits, rows


def test_a_row_says_the_same_alone_and_in_any_batch():
    logits, rows = random_rows(24)
    together = choose(logits, rows)
    alone = [choose(logits[index : index + 1], [rows[index]])[0] for index in range(24)]
    assert together == alone
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    assert choose(logits[order], [rows[index] for index in order]) == [together[index] for index in order]


def test_advance_equals_building_anew():
    logits, rows = random_rows(12)
    metadata, sampler = SamplingMetadata(rows, 60), Sampler()
    for _ in range(6):
        token_ids = sampler.sample(logits, metadata).token_ids
        assert token_ids.tolist() == choose(logits, rows)
        metadata.advance(token_ids)
        for one, token_id in zip(rows, token_ids.tolist()):
            one.output_token_ids.append(token_id)


def test_greedy_is_the_exact_argmax_and_the_smallest_of_equals():
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    logits[:, 200] = logits[:, 100] = 9.0
    greedy = row(SamplingParams(temperature=0.0))
    assert choose(logits, [greedy] * 50) == [100] * 50
    # A float32 step above wins, and sharing the batch with sampled rows changes nothing.
    logits[:, 200] = torch.nextafter(torch.tensor(9.0), torch.tensor(10.0))
    mixed = [greedy, row(SamplingParams(temperature=50.0))] * 25
    assert choose(logits, mixed)[::2] == [200] * 25


def test_tiny_temperatures_are_greedy_and_huge_ones_uniform():
    logits = torch.tensor([LOGITS])
    assert choose(logits * 1e4, [row(SamplingParams(temperature=1e-5))]) == [3]
    assert choose(logits, [row(SamplingParams(temperature=1e-9))]) == [3]
    many = [row(SamplingParams(temperature=1000), seed) for seed in range(4000)]
    assert_drawn_from(choose(logits.expand(4000, -1), many), softmax([value / 1000 for value in LOGITS]))


def test_stop_tokens_are_banned_until_min_tokens():
    params, logits = SamplingParams(temperature=0.0, min_tokens=2), torch.tensor([LOGITS])  # 3 is best, then 4
    said = [choose(logits, [row(params, output=[0] * position, stop={3})]) for position in range(4)]
    assert said == [[4], [4], [3], [3]]
    sampled = SamplingParams(temperature=5.0, min_tokens=1)
    assert {3, 4}.isdisjoint(choose(logits.expand(500, -1), [row(sampled, seed, stop={3, 4}) for seed in range(500)]))


def test_logit_bias_is_added_before_anything_is_chosen():
    logits = torch.tensor([LOGITS, LOGITS])
    rows = [row(SamplingParams(temperature=0.0, logit_bias={8: 4.1, 3: -100})), row(SamplingParams(temperature=0.0))]
    assert choose(logits, rows) == [8, 3]
    certain = SamplingParams(logit_bias={5: 100})
    assert set(choose(logits[:1].expand(200, -1), [row(certain, seed) for seed in range(200)])) == {5}


def test_logit_bias_is_added_before_the_penalties():
    logits = torch.tensor([[1.0, -5.0]])
    biased = dict(temperature=0.0, logit_bias={1: 10.0})
    # (-5 + 10) / 2 = 2.5
    assert choose(logits, [row(SamplingParams(**biased, repetition_penalty=2.0), prompt=[1])]) == [1]
    assert choose(logits, [row(SamplingParams(**biased, repetition_penalty=6.0), prompt=[1])]) == [0]  # 5 / 6
    assert choose(
        logits, [row(SamplingParams(**biased, presence_penalty=2.0, min_tokens=9), output=[1], stop={1})]
    ) == [0]


def test_penalties_act_on_greedy_rows_too():
    logits = torch.tensor([LOGITS])
    assert choose(logits, [row(SamplingParams(temperature=0.0, presence_penalty=0.2), output=[3])]) == [4]
    assert choose(logits, [row(SamplingParams(temperature=0.0, presence_penalty=0.2), prompt=[3])]) == [3]
    assert choose(logits, [row(SamplingParams(temperature=0.0, repetition_penalty=1.1), prompt=[3])]) == [4]


def test_logprobs_are_of_the_raw_logits():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(5))
    before = logits.clone()
    rows = [
        row(SamplingParams(temperature=3.0, top_k=20, repetition_penalty=2.0, logprobs=count), seed, prompt=range(30))
        for seed, count in enumerate([3, None, 0, -1])
    ]
    output = Sampler().sample(logits, SamplingMetadata(rows, 30))
    reference = before.double().log_softmax(dim=-1)
    assert torch.equal(logits, before)
    assert output.logprobs[1] is None
    for index, count in ((0, 3), (2, 0), (3, 30)):
        entries, token = output.logprobs[index], output.token_ids[index].item()
        assert next(iter(entries)) == token
        best = before[index].topk(count).indices.tolist()
        assert set(entries) == {token, *best}
        order = before[index].argsort(descending=True).tolist()
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(reference[index, token_id].item(), abs=1e-5)
            assert entry.rank == order.index(token_id) + 1


def test_which_equal_tokens_are_named_does_not_depend_on_the_company():
    torch.manual_seed(0)
    logits = torch.randint(0, 9, (6, 3000)).float()  # hundreds of tokens are the most probable ones
    counts = [1, 5, 200, 5, -1, 0]
    alone = [gather_logprobs(logits[i : i + 1], torch.tensor([7]), [count])[0] for i, count in enumerate(counts)]
    assert gather_logprobs(logits, torch.full((6,), 7), counts) == alone
    assert list(map(len, alone)) == [2, 6, 201, 6, 3000, 1]


def test_no_logprobs_unless_a_row_asks():
    assert Sampler().sample(torch.zeros(1, 4), SamplingMetadata([row(SamplingParams())], 4)).logprobs is None


def test_sampling_leaves_the_logits_alone():
    logits, rows = random_rows(12)
    before = logits.clone()
    choose(logits, rows)
    assert torch.equal(logits, before)
