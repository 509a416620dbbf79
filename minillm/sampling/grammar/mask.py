"""Masks of a batch: what the grammars forbid becomes -inf. Built in chapter 19.

    Grammar.fill_mask -> words, 1 bit a token -> 0 or -inf for each token -> added to the logits

The words are what is cached, copied and sent to a GPU: 32 times smaller than the logits they speak of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minillm.rounding import ceil_div
from minillm.sampling.filters import NEVER
from minillm.sampling.grammar.protocol import Grammar
from minillm.staging import upload

ANY_TOKEN = np.int32(-1)  # all 32 bits
# What a byte of a mask adds to the logits of its eight tokens, float32 [256, 8], the lowest bit first.
ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, NEVER).astype(
    np.float32
)


class Stuck(NamedTuple):
    """A row whose grammar cannot go on."""

    num_tokens: int  # behind so many of its drafted tokens; what is drawn there, and later, is drawn without a mask
    error: Exception


class GrammarMasks:
    """The masks of one step's logits. Owns the memory, which is filled anew each step and grows with the batch."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu"):
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._on_cpu = self.device.type == "cpu"
        self.num_words = ceil_div(vocab_size, 32)
        self.num_rows = 0  # of the logits
        self.rows: list[int] = []  # those with a grammar
        self.stuck: dict[int, Stuck] = {}  # by the place in what was given to `fill`
        self._reserve(1)

    def fill(self, rows: Sequence[tuple[Grammar | None, Sequence[int]]]) -> GrammarMasks | None:
        """Make the masks of a step: for each row that samples its grammar, if it has one, and its drafted tokens.

        A row has 1 + len(draft) rows of logits, each masked by where the grammar stands after the tokens before it; the
        grammar is left as it was. Returns None if no row has a grammar. Raises ValueError for a draft it does not take.
        `stuck` says whose grammar could not go on.
        """
        self.rows, self.num_rows, self.stuck = [], 0, {}
        for grammar, draft in rows:
            if grammar is not None:
                self.rows += range(self.num_rows, self.num_rows + 1 + len(draft))
            self.num_rows += 1 + len(draft)
        if not self.rows:
            return None
        if len(self.rows) > len(self.words):
            self._reserve(len(self.rows))
        first = 0
        for index, (grammar, draft) in enumerate(rows):
            if grammar is not None:
                if (stuck := _fill_row(grammar, draft, self.words, first)) is not None:
                    self.stuck[index] = stuck
                first += 1 + len(draft)
        return self

    def apply(self, logits: Tensor) -> Tensor:
        """logits [num_rows, vocab_size], the rows as they were filled. Returns new logits."""
        if len(logits) != self.num_rows:
            raise ValueError(
                f"the masks are of {self.num_rows} rows and the logits of {len(logits)}; fill them for this step"
            )
        added = self._unpack() if self._on_cpu else self._unpack_there()  # [len(rows), vocab_size]
        if len(self.rows) == self.num_rows:
            return logits + added
        return logits.index_add(0, upload(self.rows, device=logits.device)[0], added)

    def _unpack(self) -> Tensor:
        """Eight tokens at a time, by a table. On a CPU an addition is several times as fast as `masked_fill`."""
        num_rows = len(self.rows)
        if num_rows not in self._views:  # a view takes as long to make as a mask
            floats = self._floats[:num_rows]
            added = torch.from_numpy(floats).flatten(1)[:, : self.vocab_size]
            self._views[num_rows] = (self.words[:num_rows].view(np.uint8), floats, added)
        packed, floats, added = self._views[num_rows]
        ADDED.take(packed, axis=0, out=floats, mode="clip")
        return added

    def _unpack_there(self) -> Tensor:
        """The same on a GPU, to which the words are copied."""
        words = upload(self.words[: len(self.rows)], device=self.device)[0]
        bits = torch.arange(32, dtype=torch.int32, device=self.device)
        allowed = words[:, :, None] >> bits & 1  # [rows, num_words, 32]
        return torch.where(allowed == 1, 0.0, NEVER).flatten(1)[:, : self.vocab_size]

    def _reserve(self, num_rows: int) -> None:
        self.words = np.zeros((num_rows, self.num_words), np.int32)
        self._floats = np.empty((num_rows if self._on_cpu else 0, 4 * self.num_words, 8), np.float32)
        # By number of rows: words, floats, the tensor of these.
        self._views: dict[int, tuple[np.ndarray, np.ndarray, Tensor]] = {}


def _fill_row(grammar: Grammar, draft: Sequence[int], words: np.ndarray, first: int) -> Stuck | None:
    """Write 1 + len(draft) masks, from row `first` of `words` on."""
    num_filled = num_accepted = 0
    try:
        grammar.fill_mask(words[first])
        num_filled = 1
        for token_id in draft:
            grammar.accept(token_id)
            num_accepted += 1
            if grammar.is_terminated:
                words[first + num_filled] = ANY_TOKEN  # it is not read
            else:
                grammar.fill_mask(words[first + num_filled])
            num_filled += 1
        return None
    except Exception as error:
        if isinstance(error, ValueError) and num_filled > num_accepted:
            raise  # a draft that it does not take
        words[first + num_filled : first + 1 + len(draft)] = ANY_TOKEN
        return Stuck(num_filled, error)
    finally:
        if num_accepted:
            grammar.rollback(num_accepted)
