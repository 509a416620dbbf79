"""The structures that the CPU's kernels read: the same fields in the same order as in C. Built in chapter 14.

A structure holds addresses only: the caller keeps the tensors alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.rounding import round_up

LANES = 16  # outputs of a panel: see native_linear.h
# Pages of codes: chapter 17. Bytes are pairs of int4.
KV_FLAGS = {torch.int8: ("-DKV_INT8",), torch.float8_e4m3fn: ("-DKV_FP8",), torch.uint8: ("-DKV_INT4",)}


class Pages(ctypes.Structure):
    """The pages of one layer, and which of their keys a query sees; see native_pages.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "sink_logits")),
        *((name, ctypes.c_long) for name in ("kv_heads", "dim", "size", "window", "sinks")),
    )

    @classmethod
    def of(
        cls,
        keys: Tensor,
        values: Tensor,
        scales: tuple[Tensor, Tensor] | None = None,
        window: int | None = None,
        sinks: int = 0,
        sink_logits: Tensor | None = None,
    ) -> Pages:
        """keys, values and the scales of both as `PagedKVCache` has them. A query sees the last `window` keys, and the
        first `sinks` in any case. sink_logits float32 [num_heads] stand in the softmax's denominators."""
        _, kv_heads, bytes_of_key, size = keys.shape
        dim = 2 * bytes_of_key if keys.dtype is torch.uint8 else bytes_of_key
        places = [*([None] * 2 if scales is None else scales), sink_logits]
        places = [None if place is None else place.data_ptr() for place in places]
        pages = cls(keys.data_ptr(), values.data_ptr(), *places, kv_heads, dim, size, window or 0, sinks)
        pages.dtype = keys.dtype if keys.dtype in KV_FLAGS else None
        return pages


class Latents(ctypes.Structure):
    """The pages of latents of one layer; see native_latents.h."""

    _fields_ = (("latents", ctypes.c_void_p), *((name, ctypes.c_long) for name in ("dim", "value_dim", "size")))

    @classmethod
    def of(cls, latents: Tensor, value_dim: int) -> Latents:
        """latents [num_blocks + 1, block_size, latent_dim] as `LatentKVCache` has them; values are the first
        `value_dim` columns."""
        _, size, dim = latents.shape
        return cls(latents.data_ptr(), dim, value_dim, size)


class Sequences(ctypes.Structure):
    """The sequences of a batch, and where their tokens lie: made once for all layers of a step; see
    native_pages.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")),
        *((name, ctypes.c_long) for name in ("num_seqs", "max_blocks", "max_seq_len")),
        ("token_slots", ctypes.c_void_p),
    )

    @classmethod
    def of(
        cls,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        max_seq_len: int,
        token_slots: Tensor | None = None,
    ) -> Sequences:
        """From the index tensors of a `ForwardBatch`, of any integer dtype. token_slots [num_tokens] name each token's
        adapter, -1 for none."""
        longs = [_plain(index, torch.int64) for index in (query_start_loc, seq_lens, slot_mapping)]
        table = _plain(block_table, torch.int32)
        places = [index.data_ptr() for index in (*longs[:2], table, longs[2])]
        made = cls(*places, seq_lens.shape[0], block_table.shape[1], max_seq_len)
        if token_slots is not None:
            token_slots = _plain(token_slots, torch.int32)
            made.token_slots = token_slots.data_ptr()
        made.tensors = (*longs, table, token_slots)  # the addresses are theirs
        return made


def _plain(index: Tensor, dtype: torch.dtype) -> Tensor:
    return index if index.dtype is dtype and index.is_contiguous() else index.to(dtype).contiguous()


def padded_inputs(packed: Tensor, out_features: int) -> int:
    """How many inputs a packed weight has, missing ones included."""
    return packed.numel() // round_up(out_features, LANES)


class Matrix(ctypes.Structure):
    """A packed weight of any kind (0: numbers, others in `native_quant`); see native_codes.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "table", "sums")),
        *((name, ctypes.c_long) for name in ("kind", "in_features", "out_features", "group", "half_scales")),
        ("activation_scale", ctypes.c_float),
    )

    @classmethod
    def of(cls, packed: Tensor, out_features: int) -> Matrix:
        in_features = padded_inputs(packed, out_features)
        return cls(packed.data_ptr(), in_features=in_features, out_features=out_features, group=in_features)


class Adapters(ctypes.Structure):
    """The LoRA matrices of all batch slots for `add_lora`; see native_lora.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_long) for name in ("a_slot", "b_slot", "b_out", "b_rank")),
        *((name, ctypes.c_long) for name in ("in_features", "out_features", "rank", "first")),
    )

    @classmethod
    def of(cls, lora_a: Tensor, lora_b: Tensor, first: int = 0) -> Adapters:
        """lora_a [max_loras, max_rank, in_features], each slot in one piece, and lora_b [max_loras, out_features,
        max_rank], strided as it may be. Rank 0 is a part that no adapter changes. `first`: the first output of the
        matrix that is theirs."""
        return cls(lora_a.data_ptr(), lora_b.data_ptr(), lora_a.stride(0), *lora_b.stride(), lora_a.shape[2],
                   lora_b.shape[1], lora_a.shape[1], first)  # fmt: skip


class AdaptedMatrix(ctypes.Structure):
    """The adapters of one matrix, an `Adapters` for each part of its outputs that a checkpoint has."""

    _fields_ = (("parts", ctypes.POINTER(Adapters)), ("count", ctypes.c_long))


class LayerAdapters(ctypes.Structure):
    """The adapters of a layer that runs as a whole; see native_lora.h. A part is changed by writing to its place in
    the array that it was made from."""

    MATRICES = ("qkv", "o", "gate_up", "down")
    _fields_ = tuple((name, AdaptedMatrix) for name in MATRICES)

    @classmethod
    def of(cls, parts: dict[str, ctypes.Array[Adapters]]) -> LayerAdapters:
        """An array of `Adapters` for each matrix, by name; one that no adapter can change may be missing."""
        return cls(**{name: AdaptedMatrix(array, len(array)) for name, array in parts.items() if len(array)})


class Experts(ctypes.Structure):
    """The weights of all experts of a layer for `run_experts`; see native_experts.h."""

    _fields_ = (
        *((name, ctypes.POINTER(Matrix)) for name in ("gate_up", "down")),
        *((name, ctypes.c_long) for name in ("experts", "hidden", "intermediate")),
    )


class Mixture(ctypes.Structure):
    """The router and the experts of a layer that runs as a whole; see native_experts.h. While `told` holds the address
    of an int64 tensor [num_tokens, each], the chosen experts are written there."""

    _fields_ = (
        ("experts", Experts),
        ("router", Matrix),
        *((name, ctypes.c_void_p) for name in ("bias", "told")),
        *((name, ctypes.c_long) for name in ("each", "scoring", "renormalise", "tokens_at_once")),
        ("factor", ctypes.c_float),
    )


class Layer(ctypes.Structure):
    """The weights of a decoder layer for `decoder_layer`; see native.c."""

    MATRICES = ("qkv", "o", "gate_up", "down")
    WEIGHTS = ("qkv_bias", "o_bias", "gate_up_bias", "down_bias", "input_norm", "q_norm", "k_norm", "post_norm")
    SIZES = ("hidden", "heads", "kv_heads", "dim", "intermediate")
    _fields_ = (
        *((name, Matrix) for name in MATRICES),
        *((name, ctypes.c_void_p) for name in WEIGHTS),
        *((name, ctypes.c_long) for name in SIZES),
        ("eps", ctypes.c_float),
        ("mixture", ctypes.POINTER(Mixture)),
        ("adapters", ctypes.POINTER(LayerAdapters)),  # set by whatever has some: `minillm.model.lora_slots`
    )

    @classmethod
    def of(
        cls,
        matrices: dict[str, Matrix],
        weights: dict[str, Tensor | None],
        sizes: dict[str, int],
        eps: float,
        mixture: Mixture | None = None,
    ) -> Layer:
        """By name; a bias or a norm that the layer does not have is None. With a mixture of experts the layer has no
        matrices of an MLP."""
        places = {name: None if weights.get(name) is None else weights[name].data_ptr() for name in cls.WEIGHTS}
        layer = cls(**matrices, **places, **{name: sizes[name] for name in cls.SIZES}, eps=eps)
        if mixture is not None:
            layer.mixture = ctypes.pointer(mixture)  # which also keeps it alive
        return layer


class DecoderWeights(ctypes.Structure):
    """What a decoder has besides the pages of its layers, for `native_decoder.logits`; see native.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "norm", "frequencies", "sin_scale")),
        ("head", Matrix),
        *((name, ctypes.c_long) for name in ("count", "hidden", "dim")),
        *((name, ctypes.c_float) for name in ("cos_scale", "eps")),
    )

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        norm: Tensor,
        eps: float,
        frequencies: Tensor,
        sin_scale: Tensor,
        cos_scale: float,
        head: Matrix,
    ) -> DecoderWeights:
        """norm [hidden_size] is the last one's weight; frequencies, sin_scale and cos_scale are those of `Rotary`. It
        keeps all but the head's memory alive, even if a module gets another tensor."""
        places, tensors = addresses_of(layers), [tensor.detach() for tensor in (norm, frequencies, sin_scale)]
        starts = [tensor.data_ptr() for tensor in tensors]
        sizes = len(layers), norm.shape[0], frequencies.shape[0]
        weights = cls(ctypes.addressof(places), *starts, head, *sizes, cos_scale, eps)
        weights.memory = layers, places, tensors
        return weights


def addresses_of(structures: Sequence[ctypes.Structure]) -> ctypes.Array[ctypes.c_void_p]:
    """Where structures lie, one address behind the other, as C reads them. The caller keeps them alive."""
    return (ctypes.c_void_p * len(structures))(*map(ctypes.addressof, structures))
