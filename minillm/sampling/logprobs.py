"""Log-probabilities that are reported with a token: of the raw logits, before any parameter. Built in chapter 01."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minillm.staging import upload


@dataclass(frozen=True)
class Logprob:
    """How probable the model itself found one token."""

    logprob: float  # natural logarithm
    rank: int  # 1 is the most probable token
    # "" where the token ends inside a character; the token that completes it has all of it
    decoded_token: str | None = None


class LogprobTensors(NamedTuple):
    """The log-probabilities of some rows, where the logits are. `dictionaries` needs them on the host."""

    token_ids: Tensor  # [num_rows] int64, the chosen ones
    chosen: Tensor  # [num_rows] float32
    ranks: Tensor  # [num_rows]
    best_ids: Tensor  # [num_rows, max count], falling
    best: Tensor  # [num_rows, max count]


def score_tokens(logits: Tensor, token_ids: Tensor, counts: list[int]) -> LogprobTensors:
    """For each row its chosen token and its `counts[row]` best (-1: all of them); nothing is copied to the host.

    logits [num_rows, vocab_size] raw, token_ids int64 [num_rows].
    """
    logprobs = logits.float().log_softmax(dim=-1)
    vocab_size = logits.shape[-1]
    chosen = logprobs.gather(-1, token_ids[:, None])  # [num_rows, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    best, best_ids = _best(logprobs, [_within(count, vocab_size) for count in counts])
    return LogprobTensors(token_ids, chosen[:, 0], ranks, best_ids, best)


def _best(logprobs: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """The `counts[row]` largest of each row and their places, [num_rows, max count]; the rest is filled with zeros.

    Which of equal numbers `topk` takes depends on how many it is asked for, so each row asks for its own.
    """
    if len(set(counts)) == 1:
        return logprobs.topk(counts[0], dim=-1)
    best = logprobs.new_zeros(len(counts), max(counts))
    ids = torch.zeros_like(best, dtype=torch.int64)
    groups = {count: [row for row, own in enumerate(counts) if own == count] for count in set(counts)}
    for count, rows in zip(groups, upload(*groups.values(), device=logprobs.device)):
        best[rows, :count], ids[rows, :count] = logprobs[rows].topk(count, dim=-1)
    return best, ids


def dictionaries(tensors: LogprobTensors, counts: list[int]) -> list[dict[int, Logprob]]:
    """One dictionary a row. The chosen token comes first; when it is among the best it does not appear twice."""
    result = []
    for token_id, logprob, rank, ids, values, count in zip(*(tensor.tolist() for tensor in tensors), counts):
        row = {token_id: Logprob(logprob, rank)}
        count = _within(count, len(ids))
        for place, (other, value) in enumerate(zip(ids[:count], values[:count]), start=1):
            row.setdefault(other, Logprob(value, place))
        result.append(row)
    return result


def gather_logprobs(logits: Tensor, token_ids: Tensor, counts: list[int]) -> list[dict[int, Logprob]]:
    """`score_tokens`, and at once the dictionaries: this waits for a GPU."""
    return dictionaries(score_tokens(logits, token_ids, counts), counts) if counts else []


class NamedScores(NamedTuple):
    """The log-probabilities of tokens that rows asked for by id, where the logits are; the sampled one comes first."""

    rows: list[int]
    counts: list[int]  # of tokens, of each row
    token_ids: Tensor  # [len(rows), max count] int64
    logprobs: Tensor  # [len(rows), max count]
    ranks: Tensor  # [len(rows), max count]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.token_ids, self.logprobs, self.ranks

    def read(self, *tensors: Tensor) -> dict[int, dict[int, Logprob]]:
        """One dictionary a row; of `tensors` on the host."""
        of_rows = zip(self.rows, self.counts, *(tensor.tolist() for tensor in tensors))
        return {
            row: {one: Logprob(value, rank) for one, value, rank in zip(ids[:count], values, ranks)}
            for row, count, ids, values, ranks in of_rows
        }


def score_named(logits: Tensor, token_ids: Tensor, named: list[tuple[int, list[int]]]) -> NamedScores:
    """For each (row, token ids) of `named` the log-probabilities of these and of the row's chosen token.

    logits [num_rows, vocab_size] raw, token_ids int64 [num_rows].
    """
    counts = [len(ids) + 1 for _, ids in named]
    rows = [row for row, _ in named]
    padded = [[*ids, *ids[:1] * (max(counts) - count)] for (_, ids), count in zip(named, counts)]
    index, wanted = upload(rows, np.asarray(padded, np.int64), device=logits.device)
    wanted = torch.cat([token_ids.index_select(0, index)[:, None], wanted], dim=1)  # [len(rows), max count]
    logprobs = logits.index_select(0, index).float().log_softmax(dim=-1)
    values = logprobs.gather(-1, wanted)
    not_above = torch.searchsorted(logprobs.sort(dim=-1).values, values, right=True)
    return NamedScores(rows, counts, wanted, values, logprobs.shape[-1] - not_above + 1)


def _within(count: int, most: int) -> int:
    return most if count == -1 else min(count, most)
