"""Checks of chapter 04: a ragged batch, a fit of two regimes, a plan of batches, a GPU's ridge. Built in chapter 04.

The plan is held against every way of cutting the sorted prompts, and on small cases against every way of
grouping them at all; the ridge against a search that knows no algebra. `ch04_batches` has the plan of batches.
"""

from __future__ import annotations

import math
from fractions import Fraction

from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch04_batches import check_plan_batches

__all__ = ["check_fit_regimes", "check_pack_short_first", "check_plan_batches", "check_ridge_batch"]

check_pack_short_first = Checker(
    "pack_short_first",
    hint=(
        "Sequences stand by the number of tokens they bring, equal ones as given; "
        "only logits_indices is in the order given."
    ),
)
check_fit_regimes = Checker(
    "fit_regimes",
    hint=(
        "Every split k = 0 … n; geometric means; the error over all measurements, of max(floor, slope · B); "
        "the larger k at a tie."
    ),
)
check_ridge_batch = Checker(
    "ridge_batch",
    hint="B · (f · bandwidth - c · flops) ≥ w · flops, in integers; then ask whether weights and B caches fit.",
)

_TENSORS = ("token_ids", "positions", "query_start_loc", "seq_lens", "logits_indices")


@check_pack_short_first.part("example")
def _pack_example(case: Case) -> None:
    got = case.call([[5, 9, 2], [7, 7, 7, 7, 1], [4, 8]], [0, 4, 0])
    expected = {
        "order": [1, 2, 0],
        "token_ids": [1, 4, 8, 5, 9, 2],
        "positions": [4, 0, 1, 0, 1, 2],
        "query_start_loc": [0, 1, 3, 6],
        "seq_lens": [5, 2, 3],
        "logits_indices": [5, 0, 2],
        "max_query_len": 3,
        "max_seq_len": 5,
    }
    _same_batch(case, got, expected)


@check_pack_short_first.part("edges")
def _pack_edges(case: Case) -> None:
    for sequences, computed in (
        ([[3]], [0]),
        ([[3, 1, 4, 1, 5]], [2]),
        ([[1, 2], [3, 4], [5, 6]], [0, 0, 0]),  # all alike: nothing moves
        ([[1, 2, 3, 4], [5, 6, 7], [8, 9], [1]], [3, 2, 1, 0]),  # all bring one, and their lengths fall
        ([[1] * 9, [2] * 8, [3] * 2], [0, 7, 0]),
    ):
        _same_batch(case, case.call(sequences, computed), _packed(sequences, computed))
    case.raises(ValueError, case.student, [], [], hint="A batch of no sequences has nothing to compute.")
    case.raises(
        ValueError, case.student, [[1, 2], [3, 4]], [0, 2], hint="Sequence 1 brings nothing: all of it is computed."
    )


@check_pack_short_first.part("random")
def _pack_random(case: Case) -> None:
    for _ in range(25):
        sequences = [[case.randint(0, 999) for _ in range(case.randint(1, 12))] for _ in range(case.randint(1, 8))]
        computed = [case.rng.choice((0, len(ids) - 1, case.randint(0, len(ids)))) for ids in sequences]
        _same_batch(case, case.call(sequences, computed), _packed(sequences, computed))


def _packed(sequences: list[list[int]], computed: list[int]) -> dict:
    """The batch by its definition, entry by entry."""
    brings = [ids[done:] for ids, done in zip(sequences, computed)]
    order = sorted(range(len(sequences)), key=lambda i: (len(brings[i]), i))
    starts = [sum(len(brings[i]) for i in order[:place]) for place in range(len(order) + 1)]
    return {
        "order": order,
        "token_ids": [t for i in order for t in brings[i]],
        "positions": [p for i in order for p in range(computed[i], len(sequences[i]))],
        "query_start_loc": starts,
        "seq_lens": [len(sequences[i]) for i in order],
        "logits_indices": [starts[order.index(i) + 1] - 1 for i in range(len(order))],
        "max_query_len": max(map(len, brings)),
        "max_seq_len": max(map(len, sequences)),
    }


def _same_batch(case: Case, got: dict, expected: dict) -> None:
    case.true(isinstance(got, dict), f"returned {type(got).__name__}, not a dictionary")
    case.equal(sorted(got), sorted(expected), "the list of names in the dictionary")
    for name, value in expected.items():
        found = got[name]
        if name in _TENSORS:
            case.true(isinstance(found, Tensor) and str(found.dtype) == "torch.int64", f"{name} is no int64 tensor")
            found = found.tolist()
        case.equal(found, value, f"{name} (order {expected['order']})")


@check_fit_regimes.part("example")
def _fit_example(case: Case) -> None:
    _fitted(case, [1, 2, 4, 8, 16], [0.010, 0.010, 0.010, 0.016, 0.032], (0.010, 0.002))
    _fitted(case, [1, 2, 32], [1.0, 4.0, 6.4], (2.0, 0.2), "The floor of 1 s and 4 s is their geometric mean, 2 s.")


@check_fit_regimes.part("edges")
def _fit_edges(case: Case) -> None:
    _fitted(case, [4], [0.5], (0.5, 0.0), "One measurement fits both regimes; the larger k wins.")
    _fitted(
        case, [1, 2, 4, 8], [0.01] * 4, (0.01, 0.0), "All on the floor: the slope is 0, nothing says where it bends."
    )
    _fitted(
        case,
        [1, 2, 4],
        [0.1, 0.2, 0.4],
        (0.1, 0.1),
        "k = 0 and k = 1 describe these times equally well; the larger k wins.",
    )
    _fitted(case, [8, 16, 32], [0.8, 1.6, 3.2], (0.8, 0.1))
    _fitted(case, [2, 4, 8], [3.0, 2.0, 4.1], _fit([2, 4, 8], [3.0, 2.0, 4.1]))
    # Measurement 2 stands on the floor of its split, but above the line of the slope counts as well.
    for seconds in ([1.0, 1.1, 5.0, 3.0], [4.0, 1.0, 1.2, 3.0], [1.0, 2.0, 2.1, 9.0]):
        _fitted(case, [1, 2, 3, 8], seconds, _fit([1, 2, 3, 8], seconds))


@check_fit_regimes.part("random")
def _fit_random(case: Case) -> None:
    for _ in range(40):
        batches = sorted(case.rng.sample(range(1, 65), case.randint(1, 9)))
        floor, slope, noise = (
            10 ** case.rng.uniform(-3, 0),
            10 ** case.rng.uniform(-4, -1),
            case.rng.choice((0.05, 0.5)),
        )
        seconds = [max(floor, slope * b) * math.exp(case.rng.gauss(0, noise)) for b in batches]
        _fitted(case, batches, seconds, _fit(batches, seconds))


def _fit(batches: list[int], seconds: list[float]) -> tuple[float, float]:
    logs, fits = [math.log(t) for t in seconds], []
    for k in range(len(batches) + 1):
        floor = sum(logs[:k]) / k if k else -math.inf
        slope = (
            sum(t - math.log(b) for b, t in zip(batches[k:], logs[k:])) / (len(batches) - k)
            if k < len(batches)
            else -math.inf
        )
        error = sum((max(floor, slope + math.log(b)) - t) ** 2 for b, t in zip(batches, logs))
        fits.append((error, k, math.exp(floor), math.exp(slope)))
    least = min(fits)[0]
    _, _, floor, slope = max((fit for fit in fits if fit[0] < least + 1e-12), key=lambda fit: fit[1])
    return floor, slope


def _fitted(
    case: Case, batches: list[int], seconds: list[float], expected: tuple[float, float], hint: str | None = None
) -> None:
    got = case.call(batches, seconds)
    case.true(isinstance(got, tuple) and len(got) == 2, f"returned {got!r}, not the pair (floor, slope)")
    told = hint or f"batches {batches}, seconds {[round(t, 5) for t in seconds]}"
    for name, found, value in zip(("the floor", "the slope"), got, expected):
        case.close(float(found), value, f"{name} (s)", rtol=1e-6, atol=1e-12, hint=told)


_LLAMA = {
    "params": 8_030_261_248,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "weight_bytes": 2,
    "kv_bytes": 2,
}
_H100 = {"flops": 989 * 10**12, "bandwidth": 3350 * 10**9, "memory": 80 * 10**9}


@check_ridge_batch.part("example")
def _ridge_example(case: Case) -> None:
    case.equal(
        case.call(_LLAMA, _H100, 0),
        296,
        "the batch for Llama-3.1-8B on an H100 without any context",
        hint=(
            "989e12 / 3350e9 = 295.2 FLOP/byte, and B rows do B FLOP with each byte of 16-bit weights: "
            "296 is the first beyond."
        ),
    )
    case.equal(
        case.call(_LLAMA, _H100, 1024),
        None,
        "the batch with 1,024 positions of context",
        hint="A request alone reads 134 MB and computes too little for that: no batch will do.",
    )


@check_ridge_batch.part("edges")
def _ridge_edges(case: Case) -> None:
    tiny = {"params": 100, "layers": 1, "heads": 4, "kv_heads": 1, "head_dim": 5, "weight_bytes": 2, "kv_bytes": 2}
    gpu = {"flops": 7000, "bandwidth": 1000, "memory": 10**6}
    _ridge(
        case,
        tiny,
        gpu,
        0,
        "7 FLOP/byte: batch 7 stands exactly on the ridge, and that counts as waiting for arithmetic.",
    )
    _ridge(case, tiny | {"kv_heads": 4}, gpu, 1)
    _ridge(case, tiny | {"weight_bytes": 1}, gpu, 0, "Half the bytes, half the batch, rounded up.")
    _ridge(case, tiny | {"kv_bytes": 1}, gpu, 3)
    _ridge(case, tiny, gpu | {"flops": 1}, 0, "The smallest batch is 1.")
    need = _search(tiny, gpu, 2)
    filled = 200 + need * 2 * 5 * 2 * 2
    _ridge(case, tiny, gpu | {"memory": filled}, 2, "It fits to the last byte.")
    _ridge(case, tiny, gpu | {"memory": filled - 1}, 2, "One byte too little: weights and caches must both fit.")
    _ridge(case, tiny, gpu | {"memory": 199}, 0, "Not even the weights fit.")
    equal = {"params": 10, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "weight_bytes": 1, "kv_bytes": 1}
    # 24 FLOP and 2 bytes for each request: at 12 FLOP/byte both take equally long, and the weights come on top.
    _ridge(
        case,
        equal,
        {"flops": 12, "bandwidth": 1, "memory": 10**9},
        1,
        "Each request reads exactly as long as it computes, so the weights are never made up for.",
    )
    large = {
        "params": 10**15 + 1,
        "layers": 1,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 1,
        "weight_bytes": 1,
        "kv_bytes": 1,
    }
    _ridge(
        case,
        large,
        {"flops": 2 * 10**15 * 10**3, "bandwidth": 10**3 - 1, "memory": 10**40},
        0,
        "Compare in integers: a float keeps 53 bits.",
    )


@check_ridge_batch.part("random")
def _ridge_random(case: Case) -> None:
    for _ in range(60):
        kv_heads = case.rng.choice((1, 2, 4, 8))
        model = {
            "params": case.randint(10**6, 10**10),
            "layers": case.randint(1, 80),
            "heads": kv_heads * case.rng.choice((1, 2, 4, 8)),
            "kv_heads": kv_heads,
            "head_dim": case.rng.choice((32, 64, 128)),
            "weight_bytes": case.rng.choice((1, 2, 4)),
            "kv_bytes": case.rng.choice((1, 2)),
        }
        gpu = {
            "flops": case.randint(10**12, 10**15),
            "bandwidth": case.randint(10**11, 5 * 10**12),
            "memory": case.randint(10**10, 10**12),
        }
        _ridge(case, model, gpu, case.rng.choice((0, case.randint(1, 64), case.randint(1, 4000))))


def _ridge(case: Case, model: dict, gpu: dict, context: int, hint: str | None = None) -> None:
    told = hint or f"model {model}, gpu {gpu}, context {context}"
    case.equal(
        case.call(model, gpu, context), _search(model, gpu, context), f"the batch at context {context}", hint=told
    )


def _search(model: dict, gpu: dict, context: int) -> int | None:
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
