"""Learned sink logits for the attention backends over pages: one number of each head that takes part in its softmax and
brings no value. Built in chapter 17.

A model with them (gpt-oss) needs no first tokens kept in a cache: a head that has nothing to add puts its weight on its
own logit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.torch_attention import TorchAttention
from minillm.kv_cache.triton_attention import TritonAttention

Backend = TorchAttention | NativeAttention | TritonAttention


def with_sink_logits(attention: Backend, sink_logits: Sequence[Tensor] | None) -> Backend:
    """`attention`, told of the logits of each layer, [num_heads] in any float dtype; None takes none.

    Raises ValueError unless there is one tensor for each layer of its cache.
    """
    if sink_logits is None:
        return attention
    num_layers = len(attention.cache.keys)
    if len(sink_logits) != num_layers:
        raise ValueError(f"sink_logits are of {len(sink_logits)} layers, the cache has {num_layers}; give each its own")
    attention.sink_logits = [one.detach().to(torch.float32).contiguous() for one in sink_logits]
    if isinstance(attention, NativeAttention):
        for pages, one in zip(attention.pages, attention.sink_logits):
            pages.sink_logits = one.data_ptr()  # `attention` keeps the tensor alive
    if isinstance(attention, TritonAttention) and attention.torch is not None:  # which prompts are left to
        attention.torch.sink_logits = attention.sink_logits
    return attention
