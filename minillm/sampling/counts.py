"""TokenCounts: how often each token occurs in a text, as penalties need it, one row a request. Built in chapter 01.

    last batch   a b c        each row: the text that it was built from, and every token that it has drawn since
    new batch    c d a        the rows of c and a are copied on the device; the host reads the text of d alone

A text may have hundreds of thousands of tokens, and under continuous batching the batch changes in most steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from minillm.sampling.metadata import SamplingRow

NONE = np.zeros(0, np.int64)


class TokenCounts:
    """`in_prompt` bool and `output_counts` float32, both [num_rows, vocab_size]; there after `take`.

    A row goes on from `last`, the counts of the batch before, where what it has counted is sure to be the row's text:
    the very same lists, longer by one token for each `advance`, and every one of these tokens known to the host.
    A text that took another token than the one drawn, or several in one step, is counted anew.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, last: TokenCounts | None = None):
        self.rows, self.vocab_size = rows, vocab_size
        # Tokens of each output that are counted; -1 where others are drawn that the host does not know yet.
        lengths = [len(row.output_token_ids) for row in rows]
        self.lengths = [count if row.position in (None, count) else -1 for row, count in zip(rows, lengths)]
        self.num_advanced = 0  # tokens a row that were drawn since
        self.num_arrived = 0  # of these, how many the host has taken into the texts
        self.sources = [None] * len(rows) if last is None else last._rows_of(rows)  # where in `last` a row goes on
        self.fresh = [at for at, source in enumerate(self.sources) if source is None]
        self.num_tokens_read = sum(len(rows[at].prompt_token_ids) + lengths[at] for at in self.fresh)

    def columns(self) -> dict[str, np.ndarray]:
        """What `take` needs on the device: the rows to copy, those to fill,
        and which places of the flattened [num_rows, vocab_size] their prompts and outputs fill."""
        outputs = self._places([self.rows[at].output_token_ids for at in self.fresh])
        places, counts = np.unique(outputs, return_counts=True)
        return {
            "sources": np.asarray([source or 0 for source in self.sources], np.int64),
            "fresh": np.asarray(self.fresh, np.int64),
            "prompt_places": self._places([self.rows[at].prompt_token_ids for at in self.fresh]),
            "output_places": places,
            "output_place_counts": counts.astype(np.float32),
        }

    def take(self, sent: dict[str, Tensor], last: TokenCounts | None, device: torch.device | str) -> None:
        """Make the counts, from `columns` on the device and from the counts of the batch before."""
        shape = (len(self.rows), self.vocab_size)
        if len(self.fresh) == len(self.rows):
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
            self.output_counts = torch.zeros(shape, device=device)
        else:
            self.in_prompt = last.in_prompt.index_select(0, sent["sources"])
            self.output_counts = last.output_counts.index_select(0, sent["sources"])
            if self.fresh:
                self.in_prompt.index_fill_(0, sent["fresh"], False)
                self.output_counts.index_fill_(0, sent["fresh"], 0.0)
        if self.fresh:
            self.in_prompt.view(-1).index_fill_(0, sent["prompt_places"], True)
            self.output_counts.view(-1).index_copy_(0, sent["output_places"], sent["output_place_counts"])

    def advance(self, token_ids: Tensor) -> None:
        """Every row has drawn one more token. token_ids int64 [num_rows]."""
        self.output_counts.scatter_add_(1, token_ids[:, None], torch.ones_like(self.output_counts[:, :1]))
        self.num_advanced += 1

    def arrived(self) -> None:
        """The tokens of one more `advance` are known to the host, and in the texts as far as they were taken."""
        self.num_arrived += 1

    def _rows_of(self, rows: Sequence[SamplingRow]) -> list[int | None]:
        """Where each of the next batch's rows stands here; None where it is new, or its text not certain."""
        if self.num_advanced != self.num_arrived:
            return [None] * len(rows)
        # Of several rows of one request the first drew the token that its text goes on with.
        first = {id(row.output_token_ids): at for at, row in reversed(list(enumerate(self.rows)))}
        return [self._place_of(row, first.get(id(row.output_token_ids))) for row in rows]

    def _place_of(self, row: SamplingRow, at: int | None) -> int | None:
        if at is None or self.lengths[at] < 0 or self.rows[at].prompt_token_ids is not row.prompt_token_ids:
            return None
        return at if self.lengths[at] + self.num_advanced == len(row.output_token_ids) else None

    def _places(self, token_ids: Sequence[Sequence[int]]) -> np.ndarray:
        """The tokens of the fresh rows as places in the flattened [num_rows, vocab_size]."""
        parts = [np.asarray(ids, np.int64) + at * self.vocab_size for at, ids in zip(self.fresh, token_ids)]
        return np.concatenate([NONE, *parts])
