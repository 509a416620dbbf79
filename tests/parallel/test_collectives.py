"""Collectives over links: the right sum on every rank, and the messages and bytes that the formulas say."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from minillm.parallel.collectives import (
    all_gather,
    chunk_bounds,
    direct_all_reduce,
    direct_sent,
    reduce_scatter,
    ring_all_reduce,
    ring_sent,
    tree_all_reduce,
    tree_sent,
)
from minillm.parallel.links import Hang, Sent, run_threads

ALL_REDUCES = {
    ring_all_reduce: ring_sent,
    tree_all_reduce: tree_sent,
    direct_all_reduce: lambda size, itemsize, n, rank: direct_sent(size, itemsize, n),
}


def random_case(rng):
    n = rng.randint(1, 9)
    shape = [rng.randint(1, 7) for _ in range(rng.randint(1, 3))]
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.int64))
    return n, [torch.randint(-99, 99, shape).to(dtype) for _ in range(n)]


@pytest.mark.parametrize("reduce", ALL_REDUCES, ids=lambda f: f.__name__)
def test_every_rank_gets_the_sum_and_sends_what_the_formula_says(reduce):
    rng = random.Random(20)
    for _ in range(25):
        n, tensors = random_case(rng)
        before = [tensor.clone() for tensor in tensors]
        out = run_threads(lambda link, tensor: (reduce(link, tensor), link.sent), [(t,) for t in tensors])
        exact = sum(tensor.double() for tensor in tensors)
        for rank, (got, sent) in enumerate(out):
            assert got.shape == tensors[0].shape and got.dtype == tensors[0].dtype
            torch.testing.assert_close(got.double(), exact, atol=8 if got.dtype == torch.bfloat16 else 0, rtol=0.02)
            assert sent == ALL_REDUCES[reduce](got.numel(), got.element_size(), n, rank), (n, rank)
        assert all(map(torch.equal, tensors, before)), "an argument was changed"


@pytest.mark.parametrize("reduce", ALL_REDUCES, ids=lambda f: f.__name__)
def test_all_ranks_have_the_same_bits(reduce):
    torch.manual_seed(0)
    tensors = [torch.randn(1000) * 10**rank for rank in range(5)]
    first, *others = run_threads(reduce, [(tensor,) for tensor in tensors])
    assert all(torch.equal(first, other) for other in others)


def test_scatter_and_gather_are_the_halves_of_a_ring():
    rng = random.Random(21)
    for _ in range(20):
        n, tensors = random_case(rng)
        size, itemsize = tensors[0].numel(), tensors[0].element_size()
        bounds, total = chunk_bounds(size, n), sum(tensor.double() for tensor in tensors).flatten()
        scattered = run_threads(lambda link, t: (reduce_scatter(link, t), link.sent), [(t,) for t in tensors])
        gathered = run_threads(lambda link, t: (all_gather(link, t), link.sent), [(t,) for t in tensors])
        for rank in range(n):
            part, sent = scattered[rank]
            torch.testing.assert_close(part.double(), total[bounds[rank] : bounds[rank + 1]], atol=8, rtol=0.02)
            assert sent == ring_sent(size, itemsize, n, rank, steps="reduce-scatter")
            assert torch.equal(gathered[rank][0], torch.stack(tensors))
            assert gathered[rank][1] == Sent(n - 1, (n - 1) * size * itemsize)


def test_a_ring_moves_the_least_and_a_tree_the_same_in_fewer_steps():
    n, size = 8, 8 * 1000
    for each in (ring_sent, tree_sent):
        assert sum(each(size, 4, n, rank).bytes for rank in range(n)) == 2 * (n - 1) * size * 4
    assert all(ring_sent(size, 4, n, rank) == Sent(14, 14 * 1000 * 4) for rank in range(n))
    assert tree_sent(size, 4, n, 0) == Sent(3, 3 * size * 4) and tree_sent(size, 4, n, 7) == Sent(1, size * 4)
    with pytest.raises(ValueError, match="steps='up': use all-reduce, reduce-scatter or all-gather"):
        ring_sent(4, 4, 2, 0, steps="up")


def test_a_hang_is_noticed_and_says_who_waits_for_whom():
    def forgotten(link):
        if link.rank != 1:
            ring_all_reduce(link, torch.ones(3))

    with pytest.raises(Hang) as caught:
        run_threads(forgotten, [()] * 3)
    assert "rank 0 receives from rank 2" in str(caught.value) or "rank 2 receives from rank 1" in str(caught.value)
    assert "rank 1 has returned" in str(caught.value)
    with pytest.raises(Hang, match="rank 0 receives from rank 1, rank 1 receives from rank 0"):
        run_threads(lambda link: link.recv(torch.ones(1), 1 - link.rank), [()] * 2)


def test_sends_that_wait_for_their_receiver_hang_around_a_ring_and_exchanges_do_not():
    def all_send_first(link):
        link.send(torch.ones(2), (link.rank + 1) % 3)
        return link.recv(torch.ones(2), (link.rank - 1) % 3)

    assert len(run_threads(all_send_first, [()] * 3)) == 3  # buffered: each send returns at once
    with pytest.raises(Hang, match="rank 0 sends to rank 1, rank 1 sends to rank 2, rank 2 sends to rank 0"):
        run_threads(all_send_first, [()] * 3, buffered=False)
    for reduce in ALL_REDUCES:
        run_threads(reduce, [(torch.ones(4),)] * 3, buffered=False)


def test_the_first_error_ends_all_ranks():
    def one_fails(link):
        if link.rank == 2:
            raise KeyError("rank 2")
        link.recv(torch.ones(1), 2)

    before = threading.active_count()
    with pytest.raises(KeyError, match="rank 2"):
        run_threads(one_fails, [()] * 4)
    assert threading.active_count() == before


def test_what_does_not_fit_is_refused():
    def other_shape(link):
        tensor = torch.ones(2 + link.rank)
        link.exchange(tensor, 1 - link.rank, tensor, 1 - link.rank)

    with pytest.raises(ValueError, match=r"expects \[\d\] torch.float32 from rank \d, which sent \[\d\]"):
        run_threads(other_shape, [()] * 2)
    for peer in (0, 2, -1):
        with pytest.raises(ValueError, match=f"rank 0 cannot exchange with rank {peer}; the others are 0 to 1"):
            run_threads(lambda link: link.rank or link.send(torch.ones(1), peer), [()] * 2)
