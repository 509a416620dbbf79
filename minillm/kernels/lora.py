"""The products of LoRA adapters, for a batch whose tokens have different ones. Built in chapter 23.

output[t] += (x[t] @ A[s].T) @ B[s].T        s = token_slots[t], the batch slot of the token's adapter; -1 is none

token_slots   2  2 -1  0  0  0        the tokens of one adapter share the reading of its two matrices
"""

from __future__ import annotations

from torch import Tensor


def add_lora_(output: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, token_slots: Tensor) -> Tensor:
    """Add to each row of `output` [num_tokens, out_features] what its adapter makes of x [num_tokens, in_features].

    lora_a [max_loras, max_rank, in_features] and lora_b [max_loras, out_features, max_rank], with an adapter's scaling
    in its B, and zeros beyond its rank; token_slots [num_tokens] int32. `output` is changed in place and returned; it
    may be some columns of a wider matrix. Both sums are in float32, and the product is rounded once.
    """
    return torch_add_lora_(output, x, lora_a, lora_b, token_slots)


def torch_add_lora_(output: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, token_slots: Tensor) -> Tensor:
    """The twin: one pair of products for each adapter that the batch has."""
    for slot in token_slots.unique().tolist():
        if slot < 0:
            continue
        tokens = (token_slots == slot).nonzero()[:, 0]
        reduced = x.index_select(0, tokens).float() @ lora_a[slot].float().t()  # [tokens of the slot, max_rank]
        output.index_add_(0, tokens, (reduced @ lora_b[slot].float().t()).to(output.dtype))
    return output
