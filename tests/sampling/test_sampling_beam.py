"""Beam search against every possible text, and the majority vote."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from minillm.sampling.beam import Beam, beam_search
from minillm.sampling.voting import self_consistency

VOCAB_SIZE, EOS = 4, 0


def table(seed: int) -> torch.Tensor:
    """Log-probabilities of the next token given the last two; index VOCAB_SIZE is "none yet"."""
    logits = torch.randn(VOCAB_SIZE + 1, VOCAB_SIZE + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    return (2 * logits).log_softmax(dim=-1)


def model(logprobs: torch.Tensor):
    def next_logprobs(beams: list[tuple[int, ...]]) -> torch.Tensor:
        pairs = [(VOCAB_SIZE, VOCAB_SIZE, *beam)[-2:] for beam in beams]
        return torch.stack([logprobs[pair] for pair in pairs])

    return next_logprobs


def every_text(logprobs: torch.Tensor, max_tokens: int, eos: set[int]) -> list[Beam]:
    """All texts of max_tokens, or shorter ones that end in an end-of-sequence token."""
    texts = {}
    for tokens in product(range(VOCAB_SIZE), repeat=max_tokens):
        ends = [index for index, token in enumerate(tokens) if token in eos]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        total = sum(model(logprobs)([tokens[:index]])[0, token].item() for index, token in enumerate(tokens))
        texts[tokens] = Beam(tokens, total, bool(ends))
    return list(texts.values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("eos", [set(), {EOS}], ids=["no-eos", "eos"])
def test_a_wide_beam_finds_the_best_texts(seed, length_penalty, eos):
    logprobs, width = table(seed), VOCAB_SIZE**4
    found = beam_search(model(logprobs), width, max_tokens=4, eos_token_ids=eos, length_penalty=length_penalty)
    best = sorted(every_text(logprobs, 4, eos), key=lambda beam: -beam.score(length_penalty))
    assert [beam.token_ids for beam in found[:10]] == [beam.token_ids for beam in best[:10]]
    assert [beam.finished for beam in found[:10]] == [beam.finished for beam in best[:10]]
    assert found[0].cumulative_logprob == pytest.approx(best[0].cumulative_logprob, abs=1e-5)


def test_width_one_without_an_end_is_greedy():
    logprobs, tokens = table(7), ()
    for _ in range(12):
        tokens += (model(logprobs)([tokens])[0].argmax().item(),)
    [beam] = beam_search(model(logprobs), 1, max_tokens=12)
    assert beam.token_ids == tokens and not beam.finished


def test_a_beam_beats_greedy_where_the_first_step_misleads():
    probs = torch.full((VOCAB_SIZE + 1, VOCAB_SIZE + 1, VOCAB_SIZE), 0.25)
    probs[VOCAB_SIZE, VOCAB_SIZE] = torch.tensor([0.1, 0.5, 0.4, 1e-9])  # greedy takes 1, and then all are 0.25
    probs[VOCAB_SIZE, 2] = torch.tensor([0.01, 0.01, 0.01, 0.97])  # 0.4 * 0.97 > 0.5 * 0.25
    [greedy] = beam_search(model(probs.log()), 1, max_tokens=2)
    best = beam_search(model(probs.log()), 2, max_tokens=2)
    assert greedy.token_ids[0] == 1
    assert best[0].token_ids == (2, 3) and len(best) == 2


def test_a_beam_that_ends_leaves_its_place_to_the_next_best():
    probs = torch.full((VOCAB_SIZE + 1, VOCAB_SIZE + 1, VOCAB_SIZE), 1e-9)
    probs[VOCAB_SIZE, VOCAB_SIZE, :2] = torch.tensor([0.6, 0.4])  # ending at once is most probable
    probs[VOCAB_SIZE, 1, 2] = probs[1, 2, 2] = 1.0
    [beam] = beam_search(model(probs.log()), 1, max_tokens=3, eos_token_ids={EOS})
    assert beam.token_ids == (1, 2, 2)  # log 0.4 over three tokens is more than log 0.6 over one


def test_it_stops_when_every_beam_has_ended():
    calls = []

    def ends_at_once(beams):
        calls.append(len(beams))
        return torch.tensor([[0.0]]).expand(len(beams), -1)

    [beam] = beam_search(ends_at_once, 3, max_tokens=50, eos_token_ids={0})
    assert beam == Beam((0,), 0.0, finished=True) and calls == [1]


@pytest.mark.parametrize("name", ["beam_width", "max_tokens"])
def test_sizes_under_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        beam_search(model(table(0)), **{"beam_width": 2, "max_tokens": 2, name: 0})


def last_number(text: str) -> int | None:
    digits = [word for word in text.split() if word.isdigit()]
    return int(digits[-1]) if digits else None


def test_the_majority_wins_and_silence_does_not_vote():
    vote = self_consistency(["it is 7", "no idea", "is it 5", "so 7", "what"], last_number)
    assert (vote.answer, vote.votes, vote.num_samples) == (7, 2, 5)
    assert vote.tally == {7: 2, 5: 1} and vote.agreement == 0.4


def test_of_equal_counts_the_first_seen_wins():
    assert self_consistency(["5", "7", "7", "5"], last_number).answer == 5
    assert self_consistency(["7", "5", "7", "5"], last_number).answer == 7


def test_nobody_answers():
    vote = self_consistency(["what", "who"], last_number)
    assert (vote.answer, vote.votes, vote.tally, vote.agreement) == (None, 0, {}, 0.0)
    assert self_consistency([], last_number).agreement == 0.0
