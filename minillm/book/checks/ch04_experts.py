"""Check of chapter 04: the batch at which the experts of a mixture are compute-bound. Built in chapter 04."""

from __future__ import annotations

from minillm.book.checks import Draw, FunctionChecker, Timed


def bend(
    num_experts, top_k, weight_bytes, flops, bandwidth, largest, *, touched=None, rows=None, first=1, bytes_of=None,
    checks=True, beyond=False,
) -> int | None:  # fmt: skip
    """The smallest compute-bound batch, by doubling and bisection; with switches for mistakes."""
    if checks and not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k}")
    touched = touched or (lambda batch, e, k: e * (1 - (1 - k / e) ** batch))
    rows = rows or (lambda batch, e, k: batch * k)

    def computes(batch: int) -> bool:
        moved = (bytes_of or weight_bytes) * touched(batch, num_experts, top_k)
        return 2 * rows(batch, num_experts, top_k) / flops >= moved / bandwidth

    high = first
    while high < largest and not computes(high):
        high = min(2 * high, largest)
    if not computes(high):
        return largest if beyond else None
    low = first - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if computes(middle) else (middle, high)
    return high


def _one_by_one(num_experts, top_k, weight_bytes, flops, bandwidth, largest) -> int | None:
    right, batch = bend(num_experts, top_k, weight_bytes, flops, bandwidth, largest), 1
    while batch < (largest if right is None else right):
        batch += 1
    return right


def _random_layer(draw: Draw) -> tuple:
    while True:
        num_experts = draw.rng.choice((1, draw.randint(2, 16), 64, draw.randint(100, 300)))
        top_k = draw.rng.choice((1, 2, 8, num_experts))
        if draw.rng.random() < 0.05:
            return num_experts, draw.rng.choice((0, num_experts + 1)), 2.0, 1e15, 1e12, 100
        ridge = draw.rng.choice((draw.rng.uniform(0.3, 9), draw.rng.uniform(50, 400)))  # FLOP/byte
        bandwidth = draw.rng.uniform(1e11, 8e12)
        given = (min(top_k, num_experts), draw.rng.choice((0.5625, 1.0, 2.0)), ridge * bandwidth, bandwidth)
        right = bend(num_experts, *given, 10**12)
        if _is_apart(num_experts, *given, right):
            limits = (right, right - 1, right // 2, right + 1, 10**12, draw.randint(1, 2 * right))
            return num_experts, *given, max(1, draw.rng.choice(limits))


def _is_apart(num_experts, top_k, weight_bytes, flops, bandwidth, batch) -> bool:
    """Whether rounding cannot decide: at this batch and the one before, the two times differ."""
    for one in (batch - 1, batch):
        touched = num_experts * (1 - (1 - top_k / num_experts) ** one)
        compute, read = 2 * one * top_k / flops, weight_bytes * touched / bandwidth
        if one and abs(compute - read) < 1e-9 * read:
            return False
    return True


_H100 = (989e12, 3350e9)
_SLOW = "Do not try one batch after another: `largest` may be 1,000,000,000,000."

check_expert_bend = FunctionChecker(
    "expert_bend",
    bend,
    hint="Compute-bound: 2 · B · top_k / flops ≥ weight_bytes · T(B) / bandwidth, with the experts that B rows choose.",
    examples=[(8, 2, 2.0, *_H100, 10**6), (1, 1, 2.0, *_H100, 10**6)],
    edges={
        "all experts are chosen by each row": (4, 4, 1.0, *_H100, 10**6),
        "one row is enough": (8, 2, 2.0, 1.3e12, 1e12, 10),
        "the last batch allowed is the first that is compute-bound": (8, 1, 1.0, 5.5e12, 1e12, 21),
        "the batch before the ridge point is the last one allowed": (8, 1, 1.0, 5.5e12, 1e12, 20),
        "a ridge point far below the limit": (8, 1, 1.0, 4.1e12, 1e12, 10**12),
        "more chosen than there are": (4, 5, 2.0, *_H100, 10),
        "no expert chosen": (4, 0, 2.0, *_H100, 10),
        "fewer than none chosen": (4, -1, 2.0, *_H100, 10),
        "many experts": (256, 8, 0.5625, 9e15, 7.7e12, 10**12),
    },
    random=_random_layer,
    raises=(ValueError,),
    returns="the batch",
    timed=(Timed("a limit of 1,000,000,000,000", lambda draw: (64, 1, 2.0, 1e18, 1e8, 10**12), _SLOW),),
    misconceptions={
        "A small batch does not read all experts: multiply with T(B), not with num_experts.": dict(
            touched=lambda batch, e, k: e
        ),
        "Each row multiplies with top_k experts.": dict(rows=lambda batch, e, k: batch),
        "A row chooses top_k different experts: it misses one with probability 1 - k / E.": dict(
            touched=lambda batch, e, k: e * (1 - (1 - 1 / e) ** batch)
        ),
        "A weight has weight_bytes bytes: 0.5625 in NVFP4, not always 2.": dict(bytes_of=2.0),
        "A batch beyond `largest` does not count: return None.": dict(beyond=True),
        "top_k must lie between 1 and num_experts: raise ValueError.": dict(checks=False),
        _SLOW: _one_by_one,
    },
)
