"""Checks of chapter 04: a ragged batch, a fit of two regimes, a plan of batches, a GPU's ridge. Built in chapter 04.

A ridge is compared with a search that uses no algebra. `ch04_batches` has the plan of batches, `ch04_experts` the
bend of a mixture.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise

import torch

from minillm.book.checks import Draw, FunctionChecker, Timed
from minillm.book.checks.ch04_batches import check_plan_batches
from minillm.book.checks.ch04_experts import check_expert_bend

__all__ = [
    "check_expert_bend",
    "check_fit_regimes",
    "check_pack_short_first",
    "check_plan_batches",
    "check_ridge_batch",
]

# 1 · a ragged batch


def packed(sequences, num_computed, *, size=lambda ids, done: len(ids) - done, ties=1, empty=False) -> dict:
    new = [ids[done:] for ids, done in zip(sequences, num_computed)]
    if not empty and not (new and all(new)):
        raise ValueError("there is nothing to compute")
    order = sorted(range(len(new)), key=lambda i: (size(sequences[i], num_computed[i]), ties * i))
    starts = [sum(len(new[i]) for i in order[:place]) for place in range(len(order) + 1)]
    return {
        "order": order,
        "token_ids": torch.tensor([token for i in order for token in new[i]]),
        "positions": torch.tensor([at for i in order for at in range(num_computed[i], len(sequences[i]))]),
        "query_start_loc": torch.tensor(starts),
        "seq_lens": torch.tensor([len(sequences[i]) for i in order]),
        "logits_indices": torch.tensor([starts[order.index(i) + 1] - 1 for i in range(len(order))]),
        "max_query_len": max(map(len, new)),
        "max_seq_len": max(map(len, sequences)),
    }


def _but(entry: str, rule: Callable) -> Callable:
    """The right batch, with one entry by another rule."""

    def wrong(sequences, num_computed) -> dict:
        batch = packed(sequences, num_computed)
        return batch | {entry: rule(batch, sequences, num_computed)}

    return wrong


def _random_batch(draw: Draw) -> tuple:
    sequences = [[draw.randint(0, 999) for _ in range(draw.randint(1, 12))] for _ in range(draw.randint(1, 8))]
    # Now and then a sequence has no new token, and that must raise.
    return sequences, [draw.rng.choice((0, len(ids) - 1, draw.randint(0, len(ids)))) for ids in sequences]


check_pack_short_first = FunctionChecker(
    "pack_short_first",
    packed,
    hint="Sequences are sorted by their number of new tokens; only logits_indices is in the order given.",
    examples=[([[5, 9, 2], [7, 7, 7, 7, 1], [4, 8]], [0, 4, 0])],
    edges=[
        ([[3]], [0]),
        ([[3, 1, 4, 1, 5]], [2]),
        ([[1, 2], [3, 4], [5, 6]], [0, 0, 0]),  # all alike: nothing moves
        ([[1, 2, 3, 4], [5, 6, 7], [8, 9], [1]], [3, 2, 1, 0]),  # one new token each, and their lengths fall
        ([[1] * 9, [2] * 8, [3] * 2], [0, 7, 0]),
        ([], []),
        ([[1, 2], [3, 4]], [0, 2]),
        ([[1, 2], [3, 4]], [0, 3]),
    ],
    random=_random_batch,
    raises=(ValueError,),
    returns="the batch",
    misconceptions={
        "A batch without sequences, or a sequence without a new token, raises ValueError.": dict(empty=True),
        "Sort by the number of new tokens, not by the length of the sequence.": dict(size=lambda ids, done: len(ids)),
        "Sequences with equally many new tokens keep the order in which they were given.": dict(ties=-1),
        "Entry i of logits_indices belongs to sequence i as it was given, not to the i-th of the batch.": _but(
            "logits_indices", lambda batch, *_: batch["query_start_loc"][1:] - 1
        ),
        "A sequence with 4 cached tokens goes on at position 4.": _but(
            "positions",
            lambda batch, *_: torch.cat([torch.arange(b - a) for a, b in pairwise(batch["query_start_loc"].tolist())]),
        ),
        "seq_lens counts the new tokens, too: it is the length after the step.": _but(
            "seq_lens", lambda batch, _, done: torch.tensor([done[i] for i in batch["order"]])
        ),
        "query_start_loc begins with 0, and has one entry more than there are sequences.": _but(
            "query_start_loc", lambda batch, *_: batch["query_start_loc"][1:]
        ),
        "max_seq_len is the length of the longest sequence, with its cached tokens.": _but(
            "max_seq_len", lambda batch, *_: batch["max_query_len"]
        ),
    },
)

# 2 · a fit of two regimes


def fitted(
    batches, seconds, *, mean=statistics.geometric_mean, first=0, last=0, ties=max, ends=False, log=math.log, near=1e-12
) -> tuple[float, float]:
    n, fits = len(batches), []
    for k in range(first, n + 1 - last):
        floor = mean(seconds[:k]) if k else 0.0
        slope = mean([t / b for b, t in zip(batches[k:], seconds[k:])]) if k < n else 0.0
        fit = [max(floor, slope * b) if not ends else floor if i < k else slope * b for i, b in enumerate(batches)]
        fits.append((sum((log(found) - log(t)) ** 2 for found, t in zip(fit, seconds)), k, floor, slope))
    least = min(fits)[0]
    return ties((fit for fit in fits if fit[0] <= least + near), key=lambda fit: fit[1])[2:]


def _random_times(draw: Draw) -> tuple:
    batches = sorted(draw.rng.sample(range(1, 65), draw.randint(1, 9)))
    floor, slope = 10 ** draw.rng.uniform(-3, 0), 10 ** draw.rng.uniform(-4, -1)
    noise = draw.rng.choice((0.05, 0.5))
    return batches, [max(floor, slope * b) * math.exp(draw.rng.gauss(0, noise)) for b in batches]


check_fit_regimes = FunctionChecker(
    "fit_regimes",
    fitted,
    hint=(
        "Every split k = 0 … n; geometric means; the error over all measurements, of max(floor, slope · B); "
        "the largest k at a tie."
    ),
    examples=[([1, 2, 4, 8, 16], [0.010, 0.010, 0.010, 0.016, 0.032]), ([1, 2, 32], [1.0, 4.0, 6.4])],
    edges=[
        # Measurement 2 belongs to the floor, but the line of the slope is above it.
        *(([1, 2, 3, 8], seconds) for seconds in ([1.0, 1.1, 5.0, 3.0], [4.0, 1.0, 1.2, 3.0], [1.0, 2.0, 2.1, 9.0])),
        ([1, 2, 4, 8], [0.010, 0.012, 0.010, 0.008]),  # all belong to the floor
        ([1, 2, 4, 8], [0.01] * 4),
        ([4], [0.5]),  # one measurement fits both regimes
        ([1, 2, 4], [0.1, 0.2, 0.4]),  # k = 0 and k = 1 describe these times equally well
        ([1, 2], [1.0, 1.0000004]),  # k = 1 has no error and k = 2 one of 8e-14, which counts as equal
        ([8, 16, 32], [0.8, 1.6, 3.2]),
        ([1, 2], [1.0, 1.0002]),  # k = 1 has no error, k = 2 one of 2e-8: that is no tie
        # k = 1 has an error of 0.8171810343648, k = 2 one that is larger by 2e-11: no tie either
        ([1, 2, 4, 8], [0.8, 2.6, 2.4, 2.925616875783]),
        ([2, 4, 8], [3.0, 2.0, 4.1]),
    ],
    random=_random_times,
    returns=("the floor (s)", "the slope (s per request)"),
    rtol=1e-9,
    misconceptions={
        "The means are geometric: the floor of 1 s and 4 s is 2 s.": dict(mean=statistics.mean),
        "Of equally good splits the largest k wins.": dict(ties=min),
        "k = 0 is a split, too: all measurements belong to the slope.": dict(first=1),
        "k = n is a split, too: all measurements belong to the floor, and the slope is 0.": dict(last=1),
        "Errors count as equal only if they differ by less than 1e-12.": dict(near=1e-6),
        "Each measurement is compared with the larger of floor and slope · B, on both sides of the split.": dict(
            ends=True
        ),
        "The error is the sum of squared differences of logarithms.": dict(log=lambda value: value),
    },
)

# 4 · the ridge of a GPU


def ridge(model, gpu, context) -> int | None:
    """Doubling, then bisection on the definition itself, in fractions."""
    weights = model["params"] * model["weight_bytes"]
    cache = 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * model["kv_bytes"] * context
    flops = 2 * model["params"] + 4 * model["layers"] * model["heads"] * model["head_dim"] * context

    def computes(batch: int) -> bool:
        return Fraction(batch * flops, gpu["flops"]) >= Fraction(weights + batch * cache, gpu["bandwidth"])

    high = 1
    while not computes(high):
        high *= 2
        if high > 2**200:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if computes(middle) else (middle, high)
    return high if weights + high * cache <= gpu["memory"] else None


def by_formula(
    model, gpu, context, *, up=lambda a, b: -(-a // b), tensors=2, kv="kv_heads", attends=True,
    fits=lambda need, room: need <= room,
) -> int | None:  # fmt: skip
    """The same by algebra; with switches for mistakes."""
    flops = 2 * model["params"] + attends * 4 * model["layers"] * model["heads"] * model["head_dim"] * context
    cache = tensors * model["layers"] * model[kv] * model["head_dim"] * context * model["kv_bytes"]
    weights, gain = model["params"] * model["weight_bytes"], flops * gpu["bandwidth"] - cache * gpu["flops"]
    if gain <= 0:
        return None
    batch = up(weights * gpu["flops"], gain)
    return batch if fits(weights + batch * cache, gpu["memory"]) else None


def _one_by_one(model, gpu, context) -> int | None:
    batch, right = 1, ridge(model, gpu, context)
    while right is not None and batch < right:
        batch += 1
    return right


_LLAMA = dict(params=8_030_261_248, layers=32, heads=32, kv_heads=8, head_dim=128, weight_bytes=2, kv_bytes=2)
_H100 = {"flops": 989 * 10**12, "bandwidth": 3350 * 10**9, "memory": 80 * 10**9}
_TINY = dict(params=100, layers=1, heads=4, kv_heads=1, head_dim=5, weight_bytes=2, kv_bytes=2)
_ONES = dict(params=10, layers=1, heads=1, kv_heads=1, head_dim=1, weight_bytes=1, kv_bytes=1)
_SMALL = {"flops": 7000, "bandwidth": 1000, "memory": 10**6}
_FILLED = 200 + ridge(_TINY, _SMALL, 2) * 2 * 5 * 2 * 2  # bytes: the weights, and the caches at the ridge


def _random_ridge(draw: Draw) -> tuple:
    kv_heads = draw.rng.choice((1, 2, 4, 8))
    model = {
        "params": draw.randint(10**6, 10**10),
        "layers": draw.randint(1, 80),
        "heads": kv_heads * draw.rng.choice((1, 2, 4, 8)),
        "kv_heads": kv_heads,
        "head_dim": draw.rng.choice((32, 64, 128)),
        "weight_bytes": draw.rng.choice((1, 2, 4)),
        "kv_bytes": draw.rng.choice((1, 2)),
    }
    rates = {"flops": draw.randint(10**12, 10**15), "bandwidth": draw.randint(10**11, 5 * 10**12)}
    return model, rates | {"memory": draw.randint(10**10, 10**12)}, draw.rng.choice((0, 0, draw.randint(1, 64), 4000))


_TOO_MANY = "Solve the inequality for the batch."

check_ridge_batch = FunctionChecker(
    "ridge_batch",
    ridge,
    hint="B · (f · bandwidth - c · flops) ≥ w · flops, in integers; then check that the weights and B caches fit.",
    examples=[(_LLAMA, _H100, 0), (_LLAMA, _H100, 1024)],
    edges=[
        (_TINY, _SMALL, 0),  # 7 FLOP/byte: batch 7 is exactly on the ridge
        (_TINY | {"kv_heads": 4}, _SMALL, 1),
        (_TINY | {"weight_bytes": 1}, _SMALL, 0),
        (_TINY | {"kv_bytes": 1}, _SMALL, 3),
        (_TINY, _SMALL | {"flops": 1}, 0),
        (_TINY, _SMALL | {"memory": _FILLED}, 2),
        (_TINY, _SMALL | {"memory": _FILLED - 1}, 2),
        (_TINY, _SMALL | {"memory": 199}, 0),  # not even the weights fit
        (_TINY, _SMALL | {"memory": 200}, 0),  # the weights fill the memory, and caches of no tokens take nothing
        # 24 FLOP and 2 bytes for each request: at 12 FLOP/byte both take equally long, and the weights come on top.
        (_ONES, {"flops": 12, "bandwidth": 1, "memory": 10**9}, 1),
        (
            _ONES,
            {"flops": 14 * 10**17 + 1, "bandwidth": 10**17, "memory": 10**9},
            0,
        ),  # a little beyond 7: not in floats
    ],
    random=_random_ridge,
    trials=60,
    returns="the batch",
    misconceptions={
        "A batch exactly at the ridge point is compute-bound.": partial(by_formula, up=lambda a, b: a // b + 1),
        "Compare in integers: a float keeps 53 bits.": partial(by_formula, up=lambda a, b: math.ceil(a / b)),
        "Round up: the batch below the quotient is still memory-bound.": partial(by_formula, up=lambda a, b: a // b),
        "A batch fits if weights and caches take exactly the memory.": partial(
            by_formula, fits=lambda need, room: need < room
        ),
        "The cache has keys and values.": partial(by_formula, tensors=1),
        "The cache has kv_heads heads, not heads.": partial(by_formula, kv="heads"),
        "Attention computes, too: 4 · layers · heads · head_dim FLOP for each cached token.": partial(
            by_formula, attends=False
        ),
        "Weights and caches must fit into the memory.": partial(by_formula, fits=lambda need, room: True),
        _TOO_MANY: _one_by_one,
    },
    timed=(
        Timed(
            "a batch of more than 10**20",
            lambda draw: (
                _ONES | {"params": 10**9},
                {"flops": 10**20 * draw.randint(50, 99), "bandwidth": 10, "memory": 10**12},
                0,
            ),
            hint=_TOO_MANY,
            seconds=1,
        ),
    ),
)
