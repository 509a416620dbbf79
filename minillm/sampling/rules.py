"""Rules: what a request does to the logits of its own rows, before every other parameter. Built in chapter 01.

    allowed_token_ids   a mask that never changes: one addition for all rows that have one
    bad_words           the last token of a word is banned where the output ends with the tokens before it
    logits_processors   functions of the caller's own: the output so far and the logits in, new logits out

The last two read the output, so they are asked for each row and each draft token, on the host. What a function raises,
or returns that no token can be drawn from, ends its own request. A function is also asked about draft tokens that are
rejected later: what it returns may depend on its arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minillm.sampling.filters import NEVER
from minillm.staging import upload

if TYPE_CHECKING:
    from minillm.sampling.metadata import SamplingRow
    from minillm.sampling.params import SamplingParams


class Rules:
    """The rules of a batch. `failed` says which rows the last `apply` could make no logits for, and why."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str):
        self.failed: dict[int, Exception] = {}
        self.readers = [(index, row) for index, row in enumerate(rows) if row.params.reads_outputs]
        self.masked = [index for index, row in enumerate(rows) if row.params.allowed_token_ids]
        if self.masked:
            added = np.full((len(self.masked), vocab_size), NEVER, np.float32)
            for place, index in enumerate(self.masked):
                added[place, rows[index].params.allowed_token_ids] = 0
            self.index, self.added = upload(np.asarray(self.masked), added, device=device)

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str) -> Rules | None:
        """None where no row has a rule, as in most batches."""
        return cls(rows, vocab_size, device) if any(row.params.has_rules for row in rows) else None

    def apply(self, logits: Tensor) -> Tensor:
        """logits [num_rows, vocab_size]; returns new ones. A row that failed keeps what the model made of it."""
        logits = logits.index_add(0, self.index, self.added) if self.masked else logits.clone()
        self.failed = {}
        for index, row in self.readers:
            try:
                logits[index] = _read(row, logits[index])
            except Exception as error:
                self.failed[index] = error
        return logits


def _read(row: SamplingRow, logits: Tensor) -> Tensor:
    """The logits of one row, [vocab_size], after the rules that read its output."""
    output, params = list(row.output_token_ids), row.params
    logits = logits.clone()  # a processor may write into it
    for processor in params.logits_processors:
        logits = _checked(processor, processor(output, logits), logits)
    if banned := banned_tokens(params.bad_words_token_ids or (), output):
        logits[banned] = NEVER
    if len(output) < params.min_tokens and row.stop_token_ids:
        possible = logits.clone()
        possible[sorted(row.stop_token_ids)] = NEVER
    else:
        possible = logits
    if bool((possible == NEVER).all()):
        raise ValueError(
            f"after {len(output)} tokens allowed_token_ids, bad_words, min_tokens and logits_processors leave no token"
        )
    return logits


def _checked(processor: Callable, made: object, given: Tensor) -> Tensor:
    name = getattr(processor, "__name__", type(processor).__name__)
    if not isinstance(made, Tensor) or made.shape != given.shape:
        told = f"shape {list(made.shape)}" if isinstance(made, Tensor) else f"{type(made).__name__}"
        raise TypeError(f"logits_processors: {name} returned {told}; allowed: logits of shape {list(given.shape)}")
    if bool(made.isnan().any()) or bool(made.isposinf().any()):
        raise ValueError(f"logits_processors: {name} returned NaN or inf; allowed: finite logits, or -inf for a ban")
    return made.to(given.device, given.dtype)


def banned_tokens(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """The tokens that would complete one of `words`, given as token ids, behind `output`."""
    return [word[-1] for word in words if len(word) == 1 or list(output[1 - len(word) :]) == list(word[:-1])]


def word_token_ids(encode: Callable[[str], list[int]], words: Sequence[str]) -> list[list[int]]:
    """Each word as token ids, at the beginning of a text and, where a space becomes part of its first token, inside
    one. Raises ValueError for a word without tokens."""
    found = []
    for word in words:
        first, inside = (encode(prefix + word.lstrip()) for prefix in ("", " "))
        if not first:
            raise ValueError(f"bad_words has {word!r}, of which the tokenizer makes no token; leave it out")
        found.append(first)
        if inside and inside[0] != first[0] and len(inside) == len(first):
            found.append(inside)
    return found


def check_rules(params: SamplingParams, stop_token_ids: Collection[int]) -> None:
    """Raise ValueError for rules that leave a request no first token, or that need a tokenizer and met none."""
    allowed, words = params.allowed_token_ids, params.bad_words_token_ids
    if params.bad_words and words is None:
        raise ValueError(
            f"bad_words={params.bad_words!r} are text, and this engine has no tokenizer; use LLM, or give a "
            "logits_processor that bans the token ids"
        )
    if not allowed:
        return
    left = set(allowed) - {word[0] for word in words or () if len(word) == 1}
    if not left:
        raise ValueError(f"bad_words={params.bad_words!r} forbid all of allowed_token_ids={allowed}; allow more tokens")
    if params.min_tokens and left <= set(stop_token_ids):
        raise ValueError(
            f"min_tokens={params.min_tokens} forbids the stop tokens, and allowed_token_ids={allowed} allows no other; "
            "allow more tokens, or leave min_tokens out"
        )
