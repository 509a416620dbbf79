"""How chapter 03's checks drive a student's caches and generator, move by move. Built in chapter 03.

What a cache holds beyond its valid positions is overwritten with NaN before it may attend, so that reading it shows.
And a stored key is changed before each call, so that reading another copy shows too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.book.checks import Case
from minillm.book.checks.ch03_oracle import Overlap, Past, Recorder, attended, counted, random_qkv, said


def drive_doubling(
    case: Case,
    chunks: list[int],
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 4,
    capacity: int = 4,
    scale: float = 1.0,
) -> None:
    """Appends the chunks one by one; what lies beyond the length is NaN before the cache may attend."""
    cache, past = case.run(case.student, kv_heads, head_dim, capacity), Past(kv_heads, head_dim)
    case.equal(list(cache.keys.shape), [kv_heads, capacity, head_dim], "the shape of keys in a new cache")
    for count in chunks:
        q, k, v = random_qkv(case, count, heads, kv_heads, head_dim, scale)
        address, room = cache.keys.data_ptr(), capacity >= past.length + count
        past.append(k, v)
        case.true(case.run(cache.append, k, v) is None, "append returned something; it returns nothing")
        k.fill_(7.0), v.fill_(7.0)
        while capacity < past.length:
            capacity *= 2
        case.equal(cache.length, past.length, "length")
        case.equal(
            [list(cache.keys.shape), list(cache.values.shape)],
            [[kv_heads, capacity, head_dim]] * 2,
            f"the pair of shapes of keys and values at length {past.length}",
        )
        case.true(
            not room or cache.keys.data_ptr() == address,
            f"the storage was replaced at length {past.length}, although there was room",
            hint="Write in place while the capacity suffices.",
        )
        for name, held, expected in (("keys", cache.keys, past.k), ("values", cache.values, past.v)):
            case.close(
                held[:, : past.length],
                expected.transpose(0, 1),
                f"{name}[:, :{past.length}] [KV head, position, dimension]",
            )
        cache.keys[:, past.length :], cache.values[:, past.length :] = torch.nan, torch.nan
        before = _change(case, past, past.length - count, lambda p: (cache.keys[:, p], cache.values[:, p]))
        attended(case, case.run(cache.attend, q), q, past, before=before)


def drive_ring(
    case: Case, window: int, chunks: list[int], heads: int = 2, kv_heads: int = 2, head_dim: int = 4
) -> None:
    """Steps over the chunks one by one; slots that hold no position yet are NaN."""
    ring, past = case.run(case.student, window, kv_heads, head_dim), Past(kv_heads, head_dim)
    case.equal(ring.positions(), [-1] * window, "positions() of an empty ring")
    ring.keys[:], ring.values[:] = torch.nan, torch.nan
    address = ring.keys.data_ptr()
    for count in chunks:
        q, k, v = random_qkv(case, count, heads, kv_heads, head_dim)
        before = _change(case, past, past.length, lambda p: (ring.keys[p % window], ring.values[p % window]))
        past.append(k, v)
        attended(case, _step(case, ring, q, k, v), q, past, window, before)
        slots = [max((p for p in range(past.length) if p % window == slot), default=-1) for slot in range(window)]
        case.equal(ring.positions(), slots, f"positions() with window={window} after {past.length} tokens")
        case.equal(list(ring.keys.shape), [window, kv_heads, head_dim], "the shape of keys")
        case.true(
            ring.keys.data_ptr() == address, "the storage was replaced; the ring keeps its slots and overwrites them"
        )
        for slot, position in enumerate(slots):
            if position >= 0:
                case.close(
                    torch.stack([ring.keys[slot], ring.values[slot]]),
                    torch.stack([past.k[position], past.v[position]]),
                    (
                        f"the key and value in slot {slot}, which holds position {position} (window={window}, "
                        f"{past.length} tokens)"
                    ),
                )
    case.is_a(ring.positions(), list, "what positions() returns", of=int)


def generated(
    case: Case, prompt: list[int], max_tokens: int, seed: int, eos_id: int | None = None, hint: str = ""
) -> None:
    """Lets the student's generator talk to a model that records, and judges call by call;
    `hint` is for what it returns."""
    recorder, expected = (
        Recorder(seed, max_calls=2 * (len(prompt) + max_tokens) + 10),
        said(prompt, max_tokens, seed, eos_id),
    )
    got = case.run(case.student, recorder, prompt, max_tokens, eos_id)
    text, cached = prompt + expected, 0
    for number, (start, token_ids, _) in enumerate(recorder.calls[: len(expected)], 1):
        case.equal(start, cached, f"start in call {number} (positions cached before it: {cached})")
        wanted = text[cached : max(len(prompt), cached + 1)]
        case.equal(
            token_ids,
            wanted,
            f"token_ids in call {number}, at position {start}",
            hint="The first call processes the whole prompt, every later one the token that was just chosen.",
        )
        cached += len(wanted)
    ends = f"The text ends with its first token {eos_id}." if eos_id in expected else ""
    case.equal(
        len(recorder.calls),
        len(expected),
        f"the number of calls for {counted(len(expected), 'new token')}",
        hint=hint or ends or "Each call gives one token. Logits that are never read need not be computed.",
    )
    case.equal(got, expected, "the list of new token ids", hint=hint or None)
    case.is_a(got, list, "the list of new token ids", of=int)


def drive_rewind(
    case: Case,
    window: int,
    slack: int,
    moves: list[int],
    refused: set[int] = frozenset(),
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 4,
) -> None:
    """Moves are chunks to append (positive) and rewinds (0 or negative);
    those at the indices in `refused` must raise."""
    ring, past, high, slots = (
        case.run(case.student, window, slack, kv_heads, head_dim),
        Past(kv_heads, head_dim),
        0,
        window + slack,
    )
    case.equal(
        list(ring.keys.shape), [slots, kv_heads, head_dim], "the shape of keys [window + slack, KV heads, dimension]"
    )
    ring.keys[:], ring.values[:] = torch.nan, torch.nan
    for index, move in enumerate(moves):
        if index in refused:
            told = (
                f"length {past.length}, largest length so far {high}, slack {slack}: "
                "the window may be overwritten already."
            )
            if past.length + move < 0:
                told = (
                    f"The length is {past.length}, and would become {past.length + move}: "
                    "no more can be taken back than there is."
                )
            case.raises(ValueError, ring.rewind, -move, hint=told)
        elif move <= 0:
            case.run(ring.rewind, -move)
            past.k, past.v = past.k[: past.length + move], past.v[: past.length + move]
            for position in range(past.length, high):
                ring.keys[position % slots] = ring.values[position % slots] = torch.nan
        else:
            q, k, v = random_qkv(case, move, heads, kv_heads, head_dim)
            before = _change(case, past, past.length, lambda p: (ring.keys[p % slots], ring.values[p % slots]))
            past.append(k, v)
            high = max(high, past.length)
            attended(case, _step(case, ring, q, k, v), q, past, window, before)
        case.equal(ring.length, past.length, f"length after moves {moves[: index + 1]}")


def _step(case: Case, ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`ring.step(q, k, v)`, watched: no assignment may give one slot two tokens."""
    with Overlap() as overlap:
        out = case.run(ring.step, q, k, v)
    case.true(
        not overlap.found,
        f"step wrote two tokens into one slot with one assignment ({overlap.found}); which one stays is not defined",
        hint="Of a chunk longer than the ring, write only the last tokens, those that stay.",
    )
    return out


def _change(case: Case, past: Past, stored: int, at: Callable[[int], tuple[Tensor, Tensor]]) -> Past | None:
    """Puts another key and value in the place of the last of `stored` positions, there and in `past`;
    returns the past as it was."""
    if not stored:
        return None
    position, before = stored - 1, past.copy()
    for held, known in zip(at(position), (past.k, past.v)):
        known[position] = case.randn(*known[position].shape)
        held.copy_(known[position])
    return before
