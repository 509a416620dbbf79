"""References of chapter 03's checks: attention over everything there ever was, a model that records.
Built in chapter 03.

The references keep every key and value in one growing tensor and attend in float64, one query and one head at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.book.checks import Case


class Past:
    """All keys and values there ever were, [num_positions, num_kv_heads, head_dim] each."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        self.k = self.v = torch.zeros(0, kv_heads, head_dim)

    @property
    def length(self) -> int:
        return self.k.shape[0]

    def append(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = torch.cat([self.k, k]), torch.cat([self.v, v])

    def copy(self) -> Past:
        other = Past(*self.k.shape[1:])
        other.append(self.k, self.v)
        return other


def random_qkv(
    case: Case, count: int, heads: int, kv_heads: int, head_dim: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """As a decoder hands them over: three views into one tensor, none of them contiguous."""
    return (case.randn(count, heads + 2 * kv_heads, head_dim) * scale).split([heads, kv_heads, kv_heads], dim=1)


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def attended(
    case: Case, got: Tensor, q: Tensor, past: Past, window: int | None = None, before: Past | None = None
) -> None:
    """As case.close against the plain loops, with a hint for the likeliest mistakes.

    before: the past as it was until a stored key and value were changed from outside; it may lack the newest positions.
    """
    count, length = q.shape[0], past.length
    reach, modulo = window or length, lambda head: head % past.k.shape[1]
    first = [max(0, length - count + i - reach + 1) for i in range(count)]
    last = [length - count + i for i in range(count)]
    what = f"the output [query, head, dimension] of {counted(count, 'new token')} at length {length}" + (
        f", window {window}" if window else ""
    )
    guesses = {
        "These are the values for queries without a causal mask: inside the chunk, a query sees no later position.": (
            first,
            [length - 1] * count,
        ),
        "Query i of the chunk was taken to stand at position i; it is at length - m + i.": (first, range(count)),
        "The first queries of the chunk missed the oldest positions of their windows: "
        "gather window - 1 positions before the chunk, and attend before you write.": (
            [max(f, length - reach) for f in first],
            last,
        ),
        "The window is one too short: a query sees itself and window - 1 positions before it.": (
            [min(p, max(0, p - reach + 2)) for p in last],
            last,
        ),
        "The window is one too long: a query sees itself and window - 1 positions before it.": (
            [max(0, f - 1) for f in first],
            last,
        ),
    }
    expected = attend(q, past, first, last)
    hint = None
    if (
        isinstance(got, Tensor)
        and got.shape == expected.shape
        and not torch.allclose(got.float(), expected, atol=1e-4, rtol=1e-4)
    ):
        hint = "NaN: slots that hold no valid position were read." if got.isnan().any() else None
        for told, (begin, end) in guesses.items():
            hint = hint or (
                told if torch.allclose(got.float(), attend(q, past, begin, end), atol=1e-4, rtol=1e-4) else None
            )
        if before and not hint:
            before.append(past.k[before.length :], past.v[before.length :])
            if torch.allclose(got.float(), attend(q, before, first, last), atol=1e-4, rtol=1e-4):
                hint = (
                    "The check changed the last stored key and value, in keys and values, before this call, "
                    "and the output does not follow: attend to these tensors, not to another copy."
                )
        if not hint and torch.allclose(got.float(), attend(q, past, first, last, modulo), atol=1e-4, rtol=1e-4):
            hint = "Query head h reads KV head h // (num_heads // num_kv_heads), not h % num_kv_heads."
    case.close(got, expected, what, atol=1e-4, rtol=1e-4, hint=hint)


def attend(q: Tensor, past: Past, first, last, kv_head: Callable[[int], int] | None = None) -> Tensor:
    """Query i over positions first[i] to last[i], one head at a time, in float64."""
    group, out = q.shape[1] // past.k.shape[1], torch.empty(q.shape)
    for i, (begin, end) in enumerate(zip(first, last)):
        for head in range(q.shape[1]):
            kv = kv_head(head) if kv_head else head // group
            keys, values = past.k[begin : end + 1, kv].double(), past.v[begin : end + 1, kv].double()
            weights = (keys @ q[i, head].double() / q.shape[2] ** 0.5).softmax(0)
            out[i, head] = weights @ values
    return out


class Overlap(TorchDispatchMode):
    """Notes an assignment through an index that names one place twice; torch does not say which value stays then."""

    found = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, writes = function.name(), ()
        if name == "aten::index_put_" and not (args[3] if len(args) > 3 else (kwargs or {}).get("accumulate", False)):
            writes = [index for index in args[1] if index is not None and index.dtype != torch.bool]
        elif name == "aten::index_copy_":
            writes = [args[2]]
        if writes:
            places = torch.stack(torch.broadcast_tensors(*writes)).flatten(1)  # [num_indices, num_places]
            if places.unique(dim=1).shape[1] < places.shape[1]:
                self.found = f"{places.shape[1]} writes, {places.unique(dim=1).shape[1]} places"
        return function(*args, **(kwargs or {}))


class Recorder:
    """A model of 40 tokens: its logits depend on every token, on its position, and on holes; each call is recorded."""

    VOCAB = 40

    def __init__(self, seed: int, max_calls: int = 1000) -> None:
        self.seed, self.max_calls, self.slots, self.calls = seed, max_calls, {}, []

    def __call__(self, token_ids: list[int], start: int) -> Tensor:
        token_ids = [int(token) for token in token_ids]
        if len(self.calls) == self.max_calls:
            raise RuntimeError(
                f"decode has been called {self.max_calls} times: the loop does not end. "
                "Does it count the tokens that it chose?"
            )
        self.calls.append((start, token_ids, max(self.slots, default=-1) + 1))
        self.slots |= {start + i: token for i, token in enumerate(token_ids)}
        return self.logits([self.slots.get(p) for p in range(start + len(token_ids))])

    def __repr__(self) -> str:
        return "decode"

    def logits(self, text: list[int | None]) -> Tensor:
        rng = random.Random(f"{self.seed}/{text}")
        return torch.tensor([rng.random() for _ in range(self.VOCAB)])


def said(prompt: list[int], max_tokens: int, seed: int, eos_id: int | None = None) -> list[int]:
    """The tokens that the model generates greedily: the whole text anew for each one."""
    text, model = list(prompt), Recorder(seed)
    while len(text) < len(prompt) + max_tokens and (eos_id is None or eos_id not in text[len(prompt) :]):
        text.append(int(model.logits(text).argmax()))
    return text[len(prompt) :]
