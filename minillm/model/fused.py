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

if TYPE_CHECKING:
    from minillm.model.batch import ForwardBatch
    from minillm.model.decoder import Decoder


class FusedAttention(Protocol):
    """A backend that takes the projection as it is; see `minillm.kv_cache.triton_attention.TritonAttention`."""

    def attend_fused(
        self,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        layer: int,
        batch: ForwardBatch,
    ) -> Tensor: ...


def run_layers(
    decoder: Decoder, residual: Tensor, rotary: tuple[Tensor, Tensor], attention: FusedAttention, batch: ForwardBatch
) -> Tensor:
    """All layers and the last norm, for the tokens whose logits are wanted: [num_logits, hidden_size].

    residual [num_tokens, hidden_size] are the embeddings; every layer adds to it in place.
    """
    eps = decoder.config.rms_norm_eps
    layers = list(decoder.layers)
    hidden = rms_norm(residual, layers[0].input_layernorm.weight, eps)
    for layer, following in zip(decoder.in_order(), [*layers[1:], None]):
        attn, mlp = layer.self_attn, layer.mlp
        qkv = attn.qkv_proj(hidden).view(hidden.shape[0], -1, attn.head_dim)
        q_weight, k_weight = attn.q_norm and attn.q_norm.weight, attn.k_norm and attn.k_norm.weight
        out = attention.attend_fused(qkv, rotary, q_weight, k_weight, eps, attn.index, batch)
        hidden = add_rms_norm(attn.o_proj(out.flatten(1)), residual, layer.post_attention_layernorm.weight, eps)
        hidden = mlp.down_proj(silu_mul(mlp.gate_up_proj(hidden)))
        if following is not None:
            hidden = add_rms_norm(hidden, residual, following.input_layernorm.weight, eps)
    wanted = batch.logits_indices
    return add_rms_norm(hidden.index_select(0, wanted), residual.index_select(0, wanted), decoder.norm.weight, eps)
