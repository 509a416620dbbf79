"""What changes logits before a token is drawn: penalties, min-p, top-k, top-p. Built in chapter 01.

Every function takes all rows of a batch at once, each row with its own parameter, and returns new logits
of the same shape; a token that is filtered out gets -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")


def apply_penalties(
    logits: Tensor,
    in_prompt: Tensor,
    output_counts: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
) -> Tensor:
    """Make tokens that were seen less probable (repetition: Keskar et al. 2019; the other two: OpenAI's API).

    logits [num_rows, vocab_size]; in_prompt bool and output_counts float, both [num_rows, vocab_size];
    each penalty [num_rows]. Repetition looks at prompt and output, the other two at the output only.
    """
    seen = in_prompt | (output_counts > 0)
    factor = torch.where(seen, repetition_penalty[:, None], 1.0)
    # Dividing a negative logit would raise it, so that one is multiplied.
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - frequency_penalty[:, None] * output_counts
    return logits - presence_penalty[:, None] * (output_counts > 0)


def min_p_filter(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens whose probability is at least min_p times the largest (Nguyen et al. 2024). min_p [num_rows].

    A ratio of probabilities is a difference of logits, so no softmax is taken.
    """
    threshold = logits.amax(dim=-1, keepdim=True) + min_p.log()[:, None]  # log(0) = -inf keeps all
    return logits.masked_fill(logits < threshold, NEVER)


def top_k_filter(logits: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """Keep the k largest logits of a row (Fan et al. 2018), and all that equal the k-th. top_k int64 [num_rows].

    `largest_k` is top_k's largest value, which the caller knows without waiting for the device.
    """
    best = logits.topk(largest_k, dim=-1).values  # [num_rows, largest_k], falling
    kth = best.gather(-1, top_k[:, None] - 1)
    return logits.masked_fill(logits < kth, NEVER)


def top_p_filter(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the fewest tokens that together hold probability top_p (Holtzman et al. 2019). top_p [num_rows].

    Of equal tokens the smaller id goes first. The most probable token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # what the tokens in front of each hold already
    # A sum of floats may reach 1 too early, and top_p = 1 means every token.
    drop = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), NEVER)
