"""The thresholds of min-p, top-k and top-p: what the kernels keep is what the sampler's filters keep, in few passes."""

from __future__ import annotations

import random

import pytest
import torch

from minillm.book.traffic import record_traffic
from minillm.kernels import sampling_filters
from minillm.kernels.language import MODE
from minillm.kernels.sampling import sample
from minillm.kernels.sampling_edges import ROOM
from minillm.kernels.sampling_filters import find_thresholds
from minillm.sampling import filters
from tests.helpers.kernel_cases import device, needs_triton

pytestmark = needs_triton
needs_interpreter = pytest.mark.skipif(MODE != "interpreted", reason="counts accesses in Triton's interpreter")
NEVER = float("-inf")


def row_of(kind: str, vocab_size: int, rng: random.Random) -> torch.Tensor:
    """A row of logits [vocab_size] that is likely, or that is chosen to be hard."""
    x = torch.randn(vocab_size) * 3
    few = torch.full_like(x, NEVER)
    few[0], few[-1] = -1.0, x[-1]
    return {
        "likely": x, "flat": x / 300, "steep": x * 20, "ties": x.round(), "bfloat16": (x * 4).bfloat16().float(),
        "equal": torch.full_like(x, -3.25), "two values": torch.where(x > 3, 2.0, -1.0),
        "zeros": torch.where(x > 0, 0.0, -0.0), "huge": x * 1e30, "tiny": x * 1e-39, "few": few,
        "one": few.where(few == x, NEVER), "negative": -x.abs() - 100, "rising": x.sort().values,
        "clustered": x + 30 * (torch.arange(vocab_size) % 2048 == 7), "masked": x.where(x > 4, few),
    }[kind]  # fmt: skip


KINDS = ["likely", "flat", "steep", "ties", "bfloat16", "equal", "two values", "zeros",
         "huge", "tiny", "few", "one", "negative", "rising", "clustered", "masked"]  # fmt: skip


def between_two_sums(x: torch.Tensor, p: float) -> float:
    """A top_p near `p`, halfway between two sums of x's probabilities: rounding never decides.
    1 where they are too near."""
    probs = x.double().softmax(-1).sort(descending=True).values
    sums = probs.cumsum(-1)
    place = min(int((sums < p).sum()), len(x) - 1)
    return float(sums[place] - probs[place] / 2) if probs[place] > 1e-5 else 1.0


def twin(x: torch.Tensor, min_p, top_k, top_p) -> torch.Tensor:
    """What the sampler's filters keep: bool [num_rows, vocab_size]."""
    x = filters.min_p_filter(x, min_p)
    x = filters.top_k_filter(x, top_k, int(top_k.max()))
    return filters.top_p_filter(x, top_p) > NEVER


def kept(logits, temperature, *columns) -> torch.Tensor:
    """The same, as the thresholds of the kernels say it."""
    bound, last_tie = find_thresholds(logits, temperature, *columns)
    x, ids = logits / temperature[:, None], torch.arange(logits.shape[1], device=logits.device)
    above = (x > bound[:, None]) | ((x == bound[:, None]) & (ids <= last_tie[:, None]))
    return above & (x > NEVER)


def case_of(kinds: list[str], vocab_size: int, seed: int):
    """A batch with a row of each kind, and its columns: temperature, min-p, top-k, top-p."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    logits = torch.stack([row_of(kind, vocab_size, rng) for kind in kinds])
    temperature = torch.tensor([rng.choice([1.0, 0.05, 0.6, 1.7]) for _ in kinds])
    min_p = torch.tensor([rng.choice([0.0, 0.0, 0.05, 1.0]) for _ in kinds])
    sizes = [1, 20, 1000, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size]
    top_k = torch.tensor([max(min(rng.choice(sizes), vocab_size), 1) for _ in kinds])
    left = filters.top_k_filter(filters.min_p_filter(logits / temperature[:, None], min_p), top_k, vocab_size)
    near = [rng.choice([0.1, 0.5, 0.9, 0.999, 1.0]) for _ in kinds]
    top_p = torch.tensor([between_two_sums(row, p) if p < 1 else 1.0 for row, p in zip(left, near)])
    return [part.to(device()) for part in (logits, temperature, min_p, top_k, top_p)]


@pytest.mark.parametrize("vocab_size, seed", [(7, 0), (7, 1), (1000, 0), (ROOM.value + 1, 0), (32_003, 0)])
def test_what_is_kept_is_what_the_samplers_filters_keep(vocab_size, seed):
    logits, temperature, *columns = case_of(KINDS, vocab_size, seed)
    expected, got = twin(logits / temperature[:, None], *columns), kept(logits, temperature, *columns)
    assert [kind for row, kind in enumerate(KINDS) if not torch.equal(expected[row], got[row])] == []


def test_a_vocabulary_of_151936_in_rows_that_lie_apart():
    """Logits of a wider matrix: rows further apart than their length, and not aligned."""
    logits, temperature, *columns = case_of(["likely", "bfloat16", "masked"], 151_936, 5)
    wide = torch.full((3, 151_936 + 5), 99.0, device=device())
    wide[:, :151_936] = logits
    columns[1] = torch.tensor([20, 151_936, 50], device=device())
    left = filters.top_k_filter(filters.min_p_filter(logits / temperature[:, None], columns[0]), columns[1], 151_936)
    columns[2] = torch.tensor([between_two_sums(row, 0.95) for row in left.cpu()], device=device())
    assert torch.equal(twin(logits / temperature[:, None], *columns), kept(wide[:, :151_936], temperature, *columns))


def test_an_edge_below_the_list_is_found_in_a_list_made_for_it():
    torch.manual_seed(1)
    logits = torch.randn(1, 20_000) / 300
    columns = torch.zeros(1), torch.tensor([15_000]), torch.ones(1)
    left = filters.top_k_filter(logits, columns[1], 15_000)
    columns[2][0] = between_two_sums(left[0], 0.8)
    args = [part.to(device()) for part in (logits, torch.ones(1), *columns)]
    assert torch.equal(twin(args[0], *args[2:]), kept(*args))


def test_a_vocabulary_too_large_for_the_sums_is_refused():
    size = sampling_filters.MAX_VOCAB_SIZE + 1
    with pytest.raises(ValueError, match=rf"vocabulary of {size} tokens: .* take {size - 1} at most"):
        find_thresholds(torch.zeros(1, size), torch.ones(1), None, torch.tensor([5]), None)


def test_minus_zero_equals_zero_where_ties_are_cut():
    logits, one = torch.tensor([[-0.0, 0.0, 0.0, -0.0, -5.0]], device=device()), torch.ones(1, device=device())
    assert kept(logits, one, None, None, one * 0.7).tolist() == [[True, True, True, False, False]]


@pytest.mark.parametrize("used", ["min_p", "top_k", "top_p"])
def test_a_filter_that_no_row_uses_is_no_column(used):
    logits, temperature, *columns = case_of(["likely", "ties", "equal", "one"], 3000, 7)
    nothing = {"min_p": 0.0, "top_k": 3000, "top_p": 1.0}
    full = [
        column if name == used else torch.full_like(column, nothing[name]) for name, column in zip(nothing, columns)
    ]
    given = [column if name == used else None for name, column in zip(nothing, columns)]
    assert torch.equal(twin(logits / temperature[:, None], *full), kept(logits, temperature, *given))


def test_neither_the_order_of_tokens_nor_the_number_of_programs_moves_an_edge_by_a_bit(monkeypatch):
    """Programs append to a list in the order in which they happen to run: sums must not depend on it."""
    torch.manual_seed(3)
    logits, order = torch.randn(1, 20_000, device=device()) * 3, torch.randperm(20_000, device=device())
    one, nothing = torch.ones(1, device=device()), None
    for top_k, p in ((None, 0.9), (20, 0.95)):
        column = None if top_k is None else torch.tensor([top_k], device=device())
        bound, _ = find_thresholds(logits, one, nothing, column, one * p)
        assert torch.equal(bound, find_thresholds(logits[:, order].contiguous(), one, nothing, column, one * p)[0])
        with monkeypatch.context() as patch:
            patch.setattr(sampling_filters, "PROGRAMS", 1)
            assert torch.equal(bound, find_thresholds(logits, one, nothing, column, one * p)[0])


def passes(row: torch.Tensor, top_k: int | None = None, top_p: float | None = None) -> float:
    """How often the filters of a draw read a row's logits: loads of the list do not count,
    nor does the draw's own pass."""
    row, column = row[None].contiguous().to(device()), torch.ones(1, device=device())
    zero = torch.zeros(1, dtype=torch.int64, device=device())
    columns = None, None if top_k is None else zero + top_k, None if top_p is None else column * top_p
    with record_traffic() as traffic:
        sample(row, column, zero, zero, zero.bool(), *columns)
    read = sum(access.num_bytes for access in traffic.loads("logits")) / (4 * row.numel())
    assert len(traffic.launches) == 6
    return read - 1


@needs_interpreter
def test_the_filters_read_the_logits_twice():
    torch.manual_seed(0)
    row = torch.randn(30_000) * 3
    assert passes(row, top_k=20, top_p=0.95) == 2
    assert passes(row, top_k=1000) == 2
    assert passes(row * 2, top_p=0.9) == 2
    # Ties that top-p cuts: one more pass, at most, finds the last one that is kept.
    assert 2 < passes(row.round(), top_k=1000, top_p=0.5) <= 3


@needs_interpreter
def test_what_hard_rows_cost():
    """Where no list holds the edge, passes narrow the interval until one does: a few instead of one for each bit."""
    torch.manual_seed(0)
    row = torch.randn(20_000)
    assert passes(torch.zeros(20_000), top_p=0.9) < 4  # the list overflows, and equal tokens are cut
    assert passes(torch.where(row > 0, 2.0, 1.0), top_k=15_000) <= 4
    assert passes(row / 300, top_p=0.9) <= 8  # nearly flat: 18,000 tokens are kept
    assert passes(row, top_k=15_000) <= 8
