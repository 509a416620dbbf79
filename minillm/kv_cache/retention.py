"""Retention: which keys are kept of a text that outgrows its cache. Built in chapter 17.

    position        0 1 2 3 | 4 ...... 995 | 996 ...... 2015     sinks 4, window 1020, seen from position 2015
                     sinks    given back      window
    cache position  0 1 2 3                  4 ........ 1023

A window alone fails as soon as the first tokens leave it: models put the attention that has nowhere to go on them. With
these sinks kept, and every key rotated by its place in the cache and not in the text, a model reads on without end
(Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023). It still knows only what is kept.

Keys stay in the cache as they were written, rotated by their position in the text: a score depends on the distance from
query to key alone, and inside the window that is the same in the text and in the cache. Only the sinks are nearer in
the cache. So a query, rotated by its position in the text already, is turned back to its cache position before it meets
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch

ALLOWED = "{'sinks': 0 or more, 'window': 1 or more}, or None to keep every key"


@dataclass(frozen=True)
class RetentionPolicy:
    """The query at position t sees the keys below `sinks` and the last `window` ones, its own included."""

    sinks: int
    window: int

    def __post_init__(self):
        for name, least in (("sinks", 0), ("window", 1)):
            value = getattr(self, name)
            if type(value) is not int:
                raise TypeError(f"kv_retention: {name}={value!r} is not a whole number; allowed: {ALLOWED}")
            if value < least:
                raise ValueError(f"kv_retention: {name}={value} is not allowed; allowed: {ALLOWED}")

    @classmethod
    def of(cls, given: Any) -> RetentionPolicy | None:
        """A policy as `LLM` takes it. Raises TypeError or ValueError naming what is wrong."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"kv_retention={given!r} is not allowed; allowed: {ALLOWED}")
        if set(given) != {"sinks", "window"}:
            raise ValueError(f"kv_retention has the keys {sorted(map(str, given))}; allowed: {ALLOWED}")
        return cls(**given)

    @property
    def num_kept(self) -> int:
        """Positions that a query sees at most: what the model must have been made for."""
        return self.sinks + self.window

    def cache_positions(self, positions: Tensor) -> Tensor:
        """Where the queries at `positions` of the text stand in the cache."""
        return positions.clamp(max=self.num_kept - 1)


class SinkTurn:
    """Turns queries to their cache positions; `frequencies` [head_dim] are the decoder's rotary ones."""

    def __init__(self, policy: RetentionPolicy, frequencies: Tensor):
        self.policy, self.frequencies = policy, frequencies
        self._last: tuple[ForwardBatch, Tensor] | None = None

    def of(self, batch: ForwardBatch, layer: int = 0) -> Tensor:
        """cos and signed sin of every token's turn, [2, num_tokens, head_dim] float32; made once a step, by layer 0: a
        recorded batch is one object for all of its steps.

        The angle undone is the one the decoder rotated by, float32 rounding included: far into a text that rounding is
        larger than what the last bit of a short text's angle means.
        """
        if layer == 0 or self._last is None or self._last[0] is not batch:
            positions = batch.positions[:, None]
            angles = (self.policy.cache_positions(positions) * self.frequencies).double()
            angles -= (positions * self.frequencies).double()
            sin = angles.sin()
            sin[:, : sin.shape[1] // 2].neg_()  # see `minillm.model.layers.apply_rotary`
            self._last = batch, torch.stack([angles.cos(), sin]).float()
        return self._last[1]


def turn_queries(q: Tensor, turn: Tensor) -> Tensor:
    """q [num_tokens, num_heads, head_dim] turned by what `SinkTurn.of` gives."""
    cos, sin = turn[0][:, None], turn[1][:, None]
    return torch.addcmul(q * cos, q.float().roll(q.shape[-1] // 2, dims=-1), sin).to(q.dtype)
