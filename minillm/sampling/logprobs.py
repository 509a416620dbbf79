"""Log-probabilities that are reported with a token: of the raw logits, before any parameter. Built in chapter 01."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Logprob:
    """How probable the model itself found one token."""

    logprob: float  # natural logarithm
    rank: int  # 1 is the most probable token
    decoded_token: str | None = None


def gather_logprobs(logits: Tensor, token_ids: Tensor, counts: list[int]) -> list[dict[int, Logprob]]:
    """For each row its chosen token and its `counts[row]` best (-1: all of them).

    logits [num_rows, vocab_size] raw, token_ids int64 [num_rows]. The chosen token comes first in each
    dictionary; when it is among the best it does not appear twice.
    """
    if not counts:
        return []
    logprobs = logits.float().log_softmax(dim=-1)
    vocab_size = logits.shape[-1]
    counts = [vocab_size if count == -1 else min(count, vocab_size) for count in counts]
    chosen = logprobs.gather(-1, token_ids[:, None])  # [num_rows, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    best, best_ids = logprobs.topk(max(counts), dim=-1)  # [num_rows, max count]

    rows = zip(token_ids.tolist(), chosen[:, 0].tolist(), ranks.tolist(), best_ids.tolist(), best.tolist(), counts)
    result = []
    for token_id, logprob, rank, ids, values, count in rows:
        row = {token_id: Logprob(logprob, rank)}
        for place, (other, value) in enumerate(zip(ids[:count], values[:count]), start=1):
            row.setdefault(other, Logprob(value, place))
        result.append(row)
    return result
