"""A whole decoder in one call of native.c. Built in chapter 14."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from minillm.kernels.native import library
from minillm.kernels.native_structs import DecoderWeights, Sequences


def logits(
    weights: DecoderWeights,
    hidden: Tensor,
    positions: Tensor,
    pages: ctypes.Array[ctypes.c_void_p],
    kv_dtype: torch.dtype | None,
    sequences: Sequences,
    turn: Tensor | None,
    wanted: Tensor,
    out: Tensor,
) -> None:
    """Into out [num_logits, vocab_size] float32: the logits of the tokens `wanted` [num_logits].

    hidden [num_tokens, hidden_size] are the embeddings, and are overwritten; positions [num_tokens], as `wanted` int64
    in one piece. `pages` are the addresses of each layer's `Pages`, of `kv_dtype` if they hold codes. The logits are
    rounded to the dtype of `hidden`, as those of a `Linear`. Raises MemoryError where the step does not fit into
    memory, IndexError where it has no such token or the cache no such layer.
    """
    if len(pages) < weights.count:
        raise IndexError(
            f"the model has {weights.count} layers, the cache pages of {len(pages)}; make one of its shape"
        )
    failed = library(hidden.dtype, kv_dtype).decoder(
        weights, pages, hidden.data_ptr(), positions.data_ptr(), sequences, None if turn is None else turn.data_ptr(),
        wanted.data_ptr(), len(wanted), out.data_ptr(), len(hidden),
    )  # fmt: skip
    if failed == 2:
        raise IndexError(f"logits of tokens {wanted.tolist()} are wanted, of a step of {len(hidden)}: count from 0")
    if failed:
        raise MemoryError(f"no memory for a step of {len(hidden)} tokens and {sequences.max_seq_len} positions")
