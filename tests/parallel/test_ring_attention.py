"""Ring attention: the result of attention over the whole sequence, work counted and balanced, bytes by formula."""

from __future__ import annotations

import random

import pytest
import torch

from minillm.kernels.flash_attention import torch_flash_attention
from minillm.model.attention import causal_attention
from minillm.parallel import ring_attention as module
from minillm.parallel.links import run_threads
from minillm.parallel.ring_attention import (
    PLACEMENTS,
    RunningSoftmax,
    pairs_per_step,
    positions_of,
    ring_attention,
    ring_attention_sent,
)


def around(q, k, v, n, placement, scale=None):
    """The result in the order of the sequence, and what each rank sent, over threads."""
    places = [positions_of(rank, n, len(q), placement) for rank in range(n)]

    def rank(link, place):
        return ring_attention(link, q[place], k[place], v[place], len(q), placement, scale), link.sent

    out = torch.full_like(q, float("nan"))
    answers = run_threads(rank, [(place,) for place in places])
    for place, (part, _) in zip(places, answers):
        out[place] = part
    return out, [sent for _, sent in answers]


def test_the_result_is_that_of_attention_over_the_whole_sequence(monkeypatch):
    rng = random.Random(5)
    torch.manual_seed(5)
    for _ in range(40):
        monkeypatch.setattr(module, "TILE", rng.choice((3, 8, 512)))
        n, kv_heads, group = rng.randint(1, 6), rng.randint(1, 3), rng.randint(1, 4)
        tokens, dim = rng.randint(1, 70), rng.choice((4, 16, 20))
        size = rng.choice((1, 30))  # large scores, too, of which rounding takes more
        q = torch.randn(tokens, kv_heads * group, dim) * size
        k, v = torch.randn(tokens, kv_heads, dim), torch.randn(tokens, kv_heads, dim)
        placement, scale = rng.choice(PLACEMENTS), rng.choice((None, 0.3))
        got, sent = around(q, k, v, n, placement, scale)
        torch.testing.assert_close(got, causal_attention(q, k, v, scale=scale), atol=2e-6 * size, rtol=1e-5)
        expected = [ring_attention_sent(r, n, tokens, kv_heads * dim, 4, placement) for r in range(n)]
        assert sent == expected, (n, tokens, placement)


def test_it_equals_the_kernels_twin_and_keeps_the_dtype():
    torch.manual_seed(6)
    q, k, v = torch.randn(50, 4, 16), torch.randn(50, 2, 16), torch.randn(50, 2, 16)
    whole = torch_flash_attention(q, k, v, torch.tensor([0, 50]), 50)
    torch.testing.assert_close(around(q, k, v, 3, "zigzag")[0], whole, atol=2e-6, rtol=1e-5)
    half, _ = around(q.bfloat16(), k.bfloat16(), v.bfloat16(), 3, "zigzag")
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), whole, atol=0.05, rtol=0.05)
    exact, _ = around(q.double(), k.double(), v.double(), 4, "striped")
    torch.testing.assert_close(exact.float(), whole, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_token_is_on_one_rank_and_every_pair_is_computed_once(placement):
    for n in (1, 2, 3, 5):
        for tokens in (1, 7, 20, 41):
            places = [positions_of(rank, n, tokens, placement) for rank in range(n)]
            assert sorted(torch.cat(places).tolist()) == list(range(tokens))
            assert all(place.tolist() == sorted(place.tolist()) for place in places)
            assert sum(map(sum, pairs_per_step(n, tokens, placement))) == tokens * (tokens + 1) // 2


def test_zigzag_balances_every_step_and_contiguous_does_not():
    n, tokens = 4, 8 * 100
    work = {placement: pairs_per_step(n, tokens, placement) for placement in PLACEMENTS}
    steps = {placement: [max(rank[step] for rank in ranks) for step in range(n)] for placement, ranks in work.items()}
    assert len({tuple(rank) for rank in work["zigzag"]}) == 1  # each rank the same in each step
    assert steps["contiguous"][1:] == [200 * 200] * 3  # some rank has all pairs of two parts
    assert steps["zigzag"][1:] == [200 * 200 // 2] * 3
    assert sum(steps["zigzag"]) == pytest.approx(tokens * (tokens + 1) / 2 / n)
    assert sum(steps["contiguous"]) / sum(steps["zigzag"]) == pytest.approx(2 - 1 / n, rel=0.01)
    assert sum(steps["striped"]) == pytest.approx(sum(steps["zigzag"]), rel=0.01)


def test_a_rank_computes_the_pairs_that_are_counted(monkeypatch):
    made = []
    monkeypatch.setattr(module, "RunningSoftmax", lambda *a: made.append(RunningSoftmax(*a)) or made[-1])
    q = torch.randn(40, 2, 8)
    around(q, q, q, 4, "zigzag")
    pairs = sorted(sum(rank) for rank in pairs_per_step(4, 40, "zigzag"))
    assert sorted(sums.num_pairs for sums in made) == pairs


def test_what_does_not_fit_is_refused():
    q = torch.randn(10, 2, 8)
    with pytest.raises(ValueError, match=r"rank \d holds 5 of 10 tokens \(zigzag\); q, k and v have 10, 10 and 10"):
        run_threads(lambda link: ring_attention(link, q, q, q, 10), [()] * 2)
    with pytest.raises(ValueError, match="placement='spiral': one of contiguous, zigzag, striped"):
        positions_of(0, 2, 10, "spiral")
    with pytest.raises(ValueError, match="rank=2: must be 0 to 1"):
        positions_of(2, 2, 10)
