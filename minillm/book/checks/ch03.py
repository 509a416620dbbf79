"""Checks of chapter 03: cache bytes, a doubling cache, a ring, a repaired generator, a ring that rewinds.
Built in chapter 03.

The bytes are in `ch03_bytes`; the caches are driven in `ch03_drives`, their references are in `ch03_oracle`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch03_bytes import check_cache_bytes
from minillm.book.checks.ch03_drives import drive_doubling, drive_rewind, drive_ring, generated
from minillm.book.checks.ch03_oracle import Recorder, said
from minillm.book.chips import Html, table

__all__ = [
    "check_cache_bytes",
    "check_doubling_cache",
    "check_repair_positions",
    "check_rewindable_ring",
    "check_ring_cache",
    "trace_of",
]

_BACKENDS = (
    "minillm.model.attention.causal_attention",
    "minillm.kv_cache.contiguous.ContiguousKVCache",
    "minillm.kv_cache.contiguous.ContiguousAttention",
)

check_doubling_cache = Checker(
    "doubling_cache",
    hint=(
        "keys and values are [num_kv_heads, capacity, head_dim]; query i of a chunk of m is at position length - m + i."
    ),
    forbid=_BACKENDS,
)
check_ring_cache = Checker(
    "ring_cache",
    hint="Position p is in KV slot p % window; a query at position p sees the positions from p - window + 1 to p.",
    forbid=_BACKENDS,
)
check_repair_positions = Checker("repair_positions", hint="A token's position is the number of tokens before it.")
check_rewindable_ring = Checker(
    "rewindable_ring",
    hint=("Position p is in KV slot p % (window + slack); the largest length so far says what has been overwritten."),
    forbid=_BACKENDS,
)


@check_doubling_cache.part("example")
def _doubling_example(case: Case) -> None:
    # One head. A query of zeros weighs all visible keys alike: the output is the mean of the values it sees.
    cache = case.run(case.student, 1, 2, 2)
    case.run(cache.append, torch.ones(3, 1, 2), torch.tensor([[[1.0, 10.0]], [[2.0, 20.0]], [[6.0, 60.0]]]))
    got = case.run(cache.attend, torch.zeros(3, 1, 2))
    case.close(
        got,
        torch.tensor([[[1.0, 10.0]], [[1.5, 15.0]], [[3.0, 30.0]]]),
        "the output [query, head, dimension]",
        hint="Query 0 sees value 0; query 1 the mean of values 0 and 1; query 2 the mean of all three.",
    )
    case.equal(list(cache.keys.shape), [1, 4, 2], "the shape of keys after 3 positions in a cache that began with 2")


@check_doubling_cache.part("edges")
def _doubling_edges(case: Case) -> None:
    drive_doubling(case, [4, 4, 8], capacity=4)  # full to the brim, and then one doubling each
    with case.hinting("A chunk may need more than one doubling: double until it fits."):
        drive_doubling(case, [1, 23, 1], capacity=2)
    drive_doubling(case, [1] * 7, capacity=1)
    drive_doubling(case, [3, 5], heads=6, kv_heads=1)
    drive_doubling(case, [2, 2, 5], heads=8, kv_heads=2)
    drive_doubling(case, [5, 1, 1], heads=3, kv_heads=3, scale=20.0)
    two = [case.run(case.student, 2, 4, 4) for _ in range(2)]
    case.run(two[0].append, torch.ones(2, 2, 4), torch.ones(2, 2, 4))
    case.equal((two[0].length, two[1].length), (2, 0), "the pair of lengths of two caches, one of them used,")


@check_doubling_cache.part("random")
def _doubling_random(case: Case) -> None:
    for _ in range(12):
        kv_heads = case.randint(1, 4)
        chunks = [case.rng.choice((1, 1, 1, 2, 3, 9)) for _ in range(case.randint(2, 9))]
        drive_doubling(case, chunks, kv_heads * case.randint(1, 4), kv_heads, case.randint(2, 9), case.randint(1, 6))


@check_ring_cache.part("example")
def _ring_example(case: Case) -> None:
    ring, ones = case.run(case.student, 3, 1, 1), torch.ones(1, 1, 1)
    means = [float(case.run(ring.step, torch.zeros(1, 1, 1), ones, value * ones)) for value in (1.0, 2.0, 3.0, 10.0)]
    case.close(
        means,
        [1.0, 1.5, 2.0, 5.0],
        "the list of outputs for queries of zeros, window 3, values 1, 2, 3, 10",
        hint="The fourth query sees the values 2, 3 and 10.",
    )
    case.equal(ring.positions(), [3, 1, 2], "positions() after 4 tokens", hint="Position 3 is in KV slot 3 % 3 = 0.")
    case.is_a(ring.positions(), list, "what positions() returns", of=int)
    case.close(ring.values.flatten(), torch.tensor([10.0, 2.0, 3.0]), "values, slot by slot,")


@check_ring_cache.part("edges")
def _ring_edges(case: Case) -> None:
    drive_ring(case, 5, [1, 1])  # never full
    drive_ring(case, 4, [4, 1])  # exactly full, then one more
    drive_ring(case, 4, [3, 3, 3])  # chunks that go over the end of the ring
    drive_ring(case, 3, [8, 1, 7])  # chunks longer than the window
    drive_ring(case, 1, [1, 1, 3])  # every query sees itself only
    drive_ring(case, 4, [2] * 6, heads=6, kv_heads=2)
    drive_ring(case, 7, [3, 50, 1], heads=4, kv_heads=4, head_dim=32)


@check_ring_cache.part("random")
def _ring_random(case: Case) -> None:
    for _ in range(12):
        kv_heads = case.randint(1, 3)
        chunks = [case.rng.choice((1, 1, 2, 3, 5, 12)) for _ in range(case.randint(2, 9))]
        drive_ring(case, case.randint(1, 8), chunks, kv_heads * case.randint(1, 4), kv_heads)


@check_repair_positions.part("example")
def _repair_example(case: Case) -> None:
    generated(case, [3, 1, 4, 1, 5], 4, 0)


@check_repair_positions.part("edges")
def _repair_edges(case: Case) -> None:
    generated(case, [7], 3, 1)
    generated(case, [7, 2, 9], 1, 2)
    generated(case, [7, 2, 9], 0, 3)
    for seed in range(4, 12):  # an end-of-sequence id that comes up early, late, or never
        generated(case, [1, 2], 6, seed, eos_id=said([1, 2], 6, seed)[seed % 6])
    zero_comes = next(seed for seed in range(10**4) if 0 in said([1, 2], 6, seed)[:5])
    generated(
        case,
        [1, 2],
        6,
        zero_comes,
        eos_id=0,
        hint="0 is a token id as good as any: compare with None to see whether there is an eos_id.",
    )


@check_repair_positions.part("random")
def _repair_random(case: Case) -> None:
    for _ in range(20):
        prompt = [case.randint(0, Recorder.VOCAB) for _ in range(case.randint(1, 12))]
        generated(
            case,
            prompt,
            case.randint(0, 9),
            case.randint(0, 10**6),
            case.rng.choice((None, case.randint(0, Recorder.VOCAB))),
        )


def trace_of(generate: Callable, prompt_ids: list[int], max_tokens: int) -> Html:
    """Run a generator on a small model that records each call, and show what it asked for and what was cached then."""
    recorder = Recorder(seed=0, max_calls=100)
    generate(recorder, prompt_ids, max_tokens)
    rows = []
    for number, (start, token_ids, cached) in enumerate(recorder.calls, 1):
        written = ", ".join(str(start + i) for i in range(len(token_ids)))
        rows.append([number, str(token_ids), written, f"up to {cached - 1}" if cached else "none"])
    return table(rows, ["call", "token_ids", "written at positions", "positions cached before"])


@check_rewindable_ring.part("example")
def _rewind_example(case: Case) -> None:
    ring, ones = case.run(case.student, 2, 2, 1, 1), torch.ones(1, 1, 1)

    def step(value: float) -> float:
        return float(case.run(ring.step, torch.zeros(1, 1, 1), ones, value * ones))

    case.close(
        [step(value) for value in (1.0, 2.0, 4.0, 8.0)],
        [1.0, 1.5, 3.0, 6.0],
        "the list of outputs before the rewind, window 2",
    )
    case.run(ring.rewind, 2)
    case.equal(ring.length, 2, "length after rewind(2)")
    case.close(
        [step(100.0), step(0.0)], [51.0, 50.0], "the list of outputs after the rewind: the values are now 1, 2, 100, 0"
    )
    case.raises(
        ValueError, ring.rewind, 3, hint="slack is 2: the length may be at most 2 less than the largest length so far."
    )


@check_rewindable_ring.part("edges")
def _rewind_edges(case: Case) -> None:
    drive_rewind(case, 3, 2, [3, 3, -2, 1, 1, -1, 4])
    drive_rewind(case, 4, 3, [9, -1, -2, 2, -1, 6, -3, 1])
    drive_rewind(case, 1, 1, [1, -1, 1, 1, -1, 1])
    drive_rewind(case, 3, 2, [7, -2, 1, -2, 1], refused={3})  # two back, one forward: two more back would be three
    drive_rewind(case, 3, 2, [2, -3, -2, 5, -1, -2, 2], refused={1, 5})
    drive_rewind(case, 2, 0, [4, -1, 1, -99, 3], refused={1, 3})
    drive_rewind(case, 5, 4, [20, -4, 11, -4, 3], heads=4, kv_heads=2)
    with case.hinting("k = 0 is allowed: nothing is taken back."):
        drive_rewind(case, 3, 1, [0, 4, 0, 0, -1, 0, 2])
    drive_rewind(case, 7, 2, [3, 50, -2, 1], heads=4, kv_heads=4, head_dim=32)
    case.raises(ValueError, case.run(case.student, 2, 2, 1, 1).rewind, -1, hint="k is negative: raise ValueError.")


@check_rewindable_ring.part("random")
def _rewind_random(case: Case) -> None:
    for _ in range(15):
        window, slack, length, high, moves, refused = case.randint(1, 7), case.randint(0, 5), 0, 0, [], set()
        for index in range(case.randint(4, 14)):
            if case.rng.random() < 0.6 or not length:
                moves.append(case.rng.choice((1, 1, 2, 3, 9)))
                length += moves[-1]
                high = max(high, length)
            else:
                moves.append(-case.randint(1, slack + 3))
                if length + moves[-1] < max(0, high - slack):
                    refused.add(index)
                else:
                    length += moves[-1]
        drive_rewind(case, window, slack, moves, refused)
