"""Judges merged softmax states: against one softmax over all keys, in any grouping and order. Built in chapter 12."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.book.checks import Case
from minillm.book.checks.ch12_oracle import state_of


def merges(case: Case, scores: Tensor, values: Tensor, parts: list[list[int]], groups: bool = False) -> None:
    """The parts' states merged, against the softmax over all of their keys; with `groups` also merged in two steps."""
    states = [state_of(scores[:, keys].double(), values[keys].double(), scores.dtype) for keys in parts]
    for number, (best, total, acc) in enumerate(states):  # the rest of an empty state was not stored
        total[best == -torch.inf], acc[best == -torch.inf] = (
            (torch.nan, torch.nan),
            (3.0, torch.inf),
            (torch.inf, -5.0),
        )[number % 3]
    keys = [key for part in parts for key in part]
    whole = state_of(scores[:, keys].double(), values[keys].double(), scores.dtype)
    told = f"for {len(parts)} parts of {[len(keys) for keys in parts]} keys"
    got = _merge(case, states, told)
    _is_state(case, got, whole, told)
    if groups and len(parts) > 1:
        cut = case.randint(1, len(parts))
        told = f"{told}, those before part {cut} and the others merged first, and then the two"
        _is_state(
            case, _merge(case, [_merge(case, states[:cut], told), _merge(case, states[cut:], told)], told), whole, told
        )
        order = case.rng.sample(range(len(parts)), len(parts))
        _is_state(case, _merge(case, [states[i] for i in order], told), whole, f"in the order {order}")


def _merge(case: Case, states: list, told: str) -> tuple[Tensor, Tensor, Tensor]:
    best, total, acc = (torch.stack(parts) for parts in zip(*states))
    got = case.call(best, total, acc)
    case.true(isinstance(got, tuple) and len(got) == 3, f"the result {told} is not a tuple (best, total, acc)")
    for name, tensor, shape in zip(("best", "total", "acc"), got, (best.shape[1:], best.shape[1:], acc.shape[1:])):
        case.is_a(tensor, best.dtype, name)
        case.equal(
            tuple(tensor.shape),
            tuple(shape),
            f"the shape of {name}",
            hint="Parts are the first dimension, and merging ends it.",
        )
    return got


def _is_state(case: Case, got: tuple, expected: tuple, told: str) -> None:
    best, total, acc = got
    case.equal(
        best,
        expected[0],
        f"best {told}\n  best",
        hint="The largest score of all parts; -inf where no part has seen any.",
    )
    tolerance = {"atol": 1e-12, "rtol": 1e-11} if best.dtype is torch.float64 else {"atol": 1e-5, "rtol": 1e-4}
    hint = None
    if total.isnan().any() or acc.isnan().any():
        empty = expected[0][(total.isnan() | acc.isnan().any(1))] == -torch.inf
        hint = (
            "-inf minus -inf is not a number: take away something else where no part has seen anything."
            if empty.any()
            else (
                "The total and the acc of an empty part were never stored, and 0 times NaN, or infinity, "
                "is NaN: leave them out by torch.where, not by a product."
            )
        )
    elif total.isinf().any():
        hint = "exp(best) overflows at 89 in float32: only a difference to the largest best may be raised."
    elif not acc.abs().amax() and expected[2].abs().amax():
        hint = "Everything vanished: exp(best) underflows at -104 in float32. Take the largest best away first."
    elif torch.allclose(acc.double(), (expected[2] / expected[1][:, None]).nan_to_num().double(), atol=1e-4):
        hint = "acc is a sum, not a mean: it is divided by total when it is used, and not before."
    case.close(total, expected[1], f"total {told}\n  total", hint=hint, **tolerance)
    case.close(acc, expected[2], f"acc {told}\n  acc", hint=hint, **tolerance)
