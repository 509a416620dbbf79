"""The layers of the decoder with fused kernels, for a GPU. Built in chapter 14.

`DecoderLayer.forward` is what a layer means; this is the same in fewer launches. The sum that ends one half of a layer
and the norm that begins the next are one kernel, and so are rotation and the write to the cache, and silu and the
product. Between them stand four matrix products, and nothing else.

    hidden -> qkv_proj -> [norm of heads + rotate + store] -> attention -> o_proj -> [add + norm]
           -> gate_up_proj -> [silu * up] -> down_proj -> [add + norm of the next layer]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from minillm.kernels.activation import silu_mul
from minillm.kernels.norm import add_rms_norm, rms_norm
from minillm.model.batch import adapted

if TYPE_CHECKING:
    from minillm.kernels.lora import TokenSlots
    from minillm.model.batch import ForwardBatch
    from minillm.model.decoder import Decoder
    from minillm.model.decoder_layer import DecoderLayer


class FusedAttention(Protocol):
    """What a backend has that declares `fused_store`: it takes the projection as it is. See
    `minillm.kv_cache.triton_attention.TritonAttention`."""

    def rotate_and_store(
        self,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        layer: int,
        slot_mapping: Tensor,
    ) -> Tensor: ...
    def attend_stored(self, q: Tensor, layer: int, batch: ForwardBatch, out: Tensor | None = None) -> Tensor: ...


def run_layers(
    decoder: Decoder, residual: Tensor, rotary: tuple[Tensor, Tensor], attention: FusedAttention, batch: ForwardBatch
) -> Tensor:
    """All layers and the last norm, for the tokens whose logits are wanted: [num_logits, hidden_size].

    residual [num_tokens, hidden_size] are the embeddings; every layer adds to it in place.
    """
    layers = list(decoder.layers)
    hidden = rms_norm(residual, layers[0].input_layernorm.weight, decoder.config.rms_norm_eps)
    for layer, following in zip(decoder.in_order(), [*layers[1:], None]):
        q = before_attention(decoder, layer, hidden, rotary, attention, batch.slot_mapping, batch.token_slots)
        out = attention.attend_stored(q, layer.self_attn.index, batch)
        hidden = after_attention(decoder, layer, following, out, residual, batch.token_slots)
        tell(layer, following, hidden, residual)
    return last_norm(decoder, hidden, residual, batch.logits_indices)


def before_attention(
    decoder: Decoder,
    layer: DecoderLayer,
    hidden: Tensor,
    rotary: tuple[Tensor, Tensor],
    attention: FusedAttention,
    slot_mapping: Tensor,
    token_slots: TokenSlots | None = None,
) -> Tensor:
    """From the normed hidden states to the rotated queries [num_tokens, num_heads, head_dim]; keys and values are in
    the cache then."""
    if not decoder.config.is_plain:
        raise ValueError(
            f"layers of model_type={decoder.config.model_type!r} have no fused kernels; declare no fused_store"
        )
    attn = layer.self_attn
    qkv = adapted(attn.qkv_proj, hidden, token_slots).view(hidden.shape[0], -1, attn.head_dim)
    q_weight, k_weight = attn.q_norm and attn.q_norm.weight, attn.k_norm and attn.k_norm.weight
    return attention.rotate_and_store(
        qkv, layer.angles(rotary), q_weight, k_weight, decoder.config.rms_norm_eps, attn.index, slot_mapping
    )


def after_attention(
    decoder: Decoder,
    layer: DecoderLayer,
    following: DecoderLayer | None,
    out: Tensor,
    residual: Tensor,
    token_slots: TokenSlots | None = None,
) -> Tensor:
    """From the output of attention to the normed hidden states of the layer that follows; of the last layer,
    to those that `last_norm` takes."""
    eps = decoder.config.rms_norm_eps
    out = adapted(layer.self_attn.o_proj, out.flatten(1), token_slots)
    hidden = add_rms_norm(out, residual, layer.post_attention_layernorm.weight, eps)
    gate_up = adapted(layer.mlp.gate_up_proj, hidden, token_slots)
    hidden = adapted(layer.mlp.down_proj, silu_mul(gate_up), token_slots)
    return hidden if following is None else add_rms_norm(hidden, residual, following.input_layernorm.weight, eps)


def tell(layer: DecoderLayer, following: DecoderLayer | None, hidden: Tensor, residual: Tensor) -> None:
    """Behind a layer: let a draft head's tap, if there is one (chapter 18), have the residual stream."""
    if layer.tap is not None:
        layer.tap(residual + hidden if following is None else residual)


def last_norm(decoder: Decoder, hidden: Tensor, residual: Tensor, wanted: Tensor) -> Tensor:
    """The last addition and norm, of the tokens `wanted` only."""
    eps = decoder.config.rms_norm_eps
    return add_rms_norm(hidden.index_select(0, wanted), residual.index_select(0, wanted), decoder.norm.weight, eps)
