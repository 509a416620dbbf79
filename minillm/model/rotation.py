"""A decoder with a rotated residual stream: the same function, in numbers that round better. Built in chapter 16.

    before     h ──norm──(· g)── W ──▶          every row of h is a token, Q a rotation (Q Qᵀ = 1)
    after     h Q ──norm────── W diag(g) Q ──▶   |h Q| = |h|, so the norm divides by the same number

    embedding                         E Q            what writes into the stream is rotated
    o_proj, down_proj                 Qᵀ W, b Q      (their outputs)
    qkv, gate and up, router, head    W diag(g) Q    what reads it is rotated back (their inputs)
    values, and o_proj's inputs       the same idea for each value head, with a rotation of its own size

So the gains of the norms become ones, and the output matrix, which absorbs the last of them, is no longer the
embedding. Nothing is computed at run time that was not before. Ashkboos et al. 2024 (QuaRot), arXiv:2404.00456; the
inputs of down_proj would need a rotation at run time, which is not built here.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from minillm.model.decoder import Decoder
from minillm.model.decoder_layer import DecoderLayer, SelfAttention
from minillm.model.layers import Linear, RMSNorm, SwiGLU
from minillm.model.moe import MixtureOfExperts
from minillm.quantization.hadamard import Rotation

ROWS = 4096  # of a matrix that are in float64 at once


@torch.no_grad()
def rotate_decoder(decoder: Decoder, seed: int = 0) -> None:
    """Rotate `decoder`, which is filled but neither quantized nor prepared, in place; `seed` draws the signs.

    It computes what it did, up to the rounding of its dtype. `decoder.rotated` is set, and an output matrix that was
    the embedding becomes one of its own. Raises ValueError naming the reason for a model of which that is not true:
    norms behind the halves of a layer, another attention, a size without a Hadamard matrix.
    """
    check_rotates(decoder)
    config = decoder.config
    rotation, of_heads = Rotation(config.hidden_size, seed), Rotation(config.head_dim, seed)
    if config.tie_word_embeddings:
        decoder.lm_head.plain = nn.Parameter(decoder.embed_tokens.clone(), requires_grad=False)
        decoder.config = replace(config, tie_word_embeddings=False)
    rotate_rows(decoder.embed_tokens, rotation)
    for layer in decoder.layers:
        rotate_layer(layer, rotation, of_heads)
    rotate_inputs([decoder.lm_head], decoder.norm, rotation)
    decoder.rotated = True


def rotate_layer(layer: DecoderLayer, rotation: Rotation, of_heads: Rotation) -> None:
    attn, mlp = layer.self_attn, layer.mlp
    rotate_values(attn, of_heads)
    rotate_inputs([attn.qkv_proj], layer.input_layernorm, rotation)
    rotate_outputs(attn.o_proj, rotation)
    readers, mlps = [], [mlp]
    if isinstance(mlp, MixtureOfExperts):
        readers = [linear for linear in (mlp.gate, mlp.shared_expert_gate) if linear is not None]
        mlps = [*mlp.experts] + ([mlp.shared_expert] if mlp.shared_expert is not None else [])
    readers += [one.gate_up_proj for one in mlps]
    rotate_inputs(readers, layer.post_attention_layernorm, rotation)
    for one in mlps:
        rotate_outputs(one.down_proj, rotation)


def rotate_inputs(readers: list[Linear], norm: RMSNorm, rotation: Rotation) -> None:
    """Move the gain of `norm` into the products that read it, and rotate their inputs."""
    for linear in readers:
        rotate_rows(linear.plain, rotation, norm.weight)
    norm.weight.fill_(1.0)


def rotate_outputs(linear: Linear, rotation: Rotation) -> None:
    rotate_rows(linear.plain.t(), rotation)
    if linear.bias is not None:
        rotate_rows(linear.bias[None], rotation)


def rotate_values(attn: SelfAttention, rotation: Rotation) -> None:
    """Rotate each value head, and the inputs of o_proj that come out of it. Attention mixes the positions of a head
    and never its channels; so what it hands on is rotated alike, for all query heads that read the value head."""
    values = attn.qkv_proj.parts["v_proj"]
    dim = attn.head_dim
    for head in range(values.start, values.stop, dim):
        rotate_rows(attn.qkv_proj.plain[head : head + dim].t(), rotation)
        if attn.qkv_proj.bias is not None:
            rotate_rows(attn.qkv_proj.bias[None, head : head + dim], rotation)
    for head in range(0, attn.o_proj.in_features, dim):
        rotate_rows(attn.o_proj.plain[:, head : head + dim], rotation)


def rotate_rows(matrix: Tensor, rotation: Rotation, gain: Tensor | None = None) -> None:
    """Replace each row r of matrix [rows, size] by rotation(r · gain), in place; computed in float64."""
    for part in matrix.split(ROWS):
        part.copy_(rotation(part.double() if gain is None else part.double() * gain.double().to(part.device)))


def check_rotates(decoder: Decoder) -> None:
    """Raise ValueError where the function would not stay."""
    config, refused = decoder.config, "rotate=True is not allowed for this model: "
    if config.norms != "before":
        raise ValueError(
            f"{refused}model_type={config.model_type!r} norms what a half of a layer gives, and the gain of that norm "
            "stands behind it, channel by channel: no later product absorbs it; leave rotate out"
        )
    for index, layer in enumerate(decoder.layers):
        known = type(layer.self_attn) is SelfAttention and isinstance(layer.mlp, SwiGLU | MixtureOfExperts)
        if not known:
            raise ValueError(
                f"{refused}layer {index} of model_type={config.model_type!r} has other products than qkv, o, gate, up "
                "and down; leave rotate out"
            )
    for field in ("hidden_size", "head_dim"):
        try:
            Rotation(getattr(config, field))
        except ValueError as error:
            raise ValueError(f"{refused}{field}: {error}; leave rotate out") from error
