"""All experts of a layer in one call of the CPU's kernels: see native_experts.h. Built in chapter 21.

The twin is `minillm.kernels.grouped_matmul` with `F.linear`. A token's result has the same bits whatever shares its
batch. Weights are packed by `native.pack` or `native_quant.pack`, each expert's by itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.kernels import native
from minillm.kernels.native_structs import Experts, Matrix, Mixture

SCORES = ("softmax", "softmax_after_topk", "sigmoid")  # in the order of native_experts.h
MOST_ELEMENTS = 2**24  # of what lies between the two products, for the tokens that are computed at once


@dataclass(frozen=True)
class PackedExperts:
    """The matrices of all experts. `struct` is what the kernels take; it holds addresses of `matrices`, and these hold
    addresses of weights that the caller keeps."""

    struct: Experts
    matrices: tuple[ctypes.Array, ctypes.Array]  # gate_up and down of every expert
    tokens_at_once: int


def join(matrices: Sequence[tuple[Matrix | None, Matrix | None]]) -> PackedExperts | None:
    """gate_up and down of each expert as one structure; None where one is missing, or where they differ in kind, size
    or groups."""
    columns = tuple(zip(*matrices))
    for column in columns:
        if None in column or len({_kind(matrix) for matrix in column}) > 1:
            return None
    gate_up, down = ((Matrix * len(column))(*column) for column in columns)
    struct = Experts(gate_up, down, len(gate_up), down[0].out_features, gate_up[0].out_features // 2)
    width = gate_up[0].in_features + gate_up[0].out_features + down[0].in_features + down[0].out_features
    return PackedExperts(struct, (gate_up, down), max(1, MOST_ELEMENTS // width))


def mixture(
    packed: PackedExperts,
    router: Matrix,
    bias: Tensor | None,
    each: int,
    scoring: str,
    renormalise: bool,
    factor: float,
) -> Mixture:
    """What a whole layer computes in place of an MLP: see `route` and `run_experts`. The caller keeps `packed`, the
    router's weight and `bias`."""
    place = None if bias is None else bias.data_ptr()
    return Mixture(
        packed.struct, router, place, None, each, SCORES.index(scoring), renormalise,
        max(1, packed.tokens_at_once // each), factor,
    )  # fmt: skip


def run_experts(x: Tensor, weights: Tensor, experts: Tensor, packed: PackedExperts) -> Tensor:
    """The weighted sum of what the chosen experts make of each token of x [num_tokens, hidden_size].

    weights float32 and experts int64 [num_tokens, experts_per_token]. Raises IndexError for an expert that is not
    there, MemoryError where what lies between the two products does not fit into memory.
    """
    x, weights, experts = x.contiguous(), weights.contiguous(), experts.contiguous()
    num_tokens, each = experts.shape
    out = torch.empty_like(x)
    step = max(1, packed.tokens_at_once // each)
    for first in range(0, num_tokens, step):
        count = min(step, num_tokens - first)
        places = (tensor[first:].data_ptr() for tensor in (x, experts, weights, out))
        failed = native.library(x.dtype).run_experts(packed.struct, *places, count, each)
        if failed == 2:
            raise IndexError(f"experts {experts.min()} to {experts.max()} of {packed.struct.experts}")
        if failed:
            raise MemoryError(f"no memory for {count} tokens of {each} experts each; use smaller prefill chunks")
    return out


def route(
    logits: Tensor, bias: Tensor | None, each: int, scoring: str, renormalise: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """Weights float32 and experts int64 of each token, [num_tokens, each] both: `minillm.model.routing.route` without
    groups. logits [num_tokens, num_experts], bias float32 [num_experts]; `scoring` is one of SCORES."""
    logits, (num_tokens, num_experts) = logits.contiguous(), logits.shape
    weights = torch.empty(num_tokens, each)
    experts = torch.empty(num_tokens, each, dtype=torch.int64)
    native.library(logits.dtype).route(
        logits.data_ptr(), None if bias is None else bias.data_ptr(), weights.data_ptr(), experts.data_ptr(),
        num_tokens, num_experts, each, SCORES.index(scoring), renormalise, factor,
    )  # fmt: skip
    return weights, experts


def combine(rows: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's rows, [num_tokens, size], as `run_experts` sums them.

    rows [num_rows, size] in any order; inverse int64 and weights float32 [num_tokens * experts_per_token], and
    [num_tokens, experts_per_token]: where the row of each choice is, and its weight.
    """
    rows, inverse, weights = rows.contiguous(), inverse.contiguous(), weights.contiguous()
    out = torch.empty(len(weights), rows.shape[1], dtype=rows.dtype)
    places = (tensor.data_ptr() for tensor in (rows, inverse, weights, out))
    native.library(rows.dtype).combine_rows(*places, *weights.shape, rows.shape[1])
    return out


def _kind(matrix: Matrix) -> tuple:
    names = ("kind", "in_features", "out_features", "group", "half_scales", "activation_scale")
    return tuple(getattr(matrix, name) for name in names)
