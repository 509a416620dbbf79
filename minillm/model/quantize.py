"""A low-bit decoder: the output matrix, then every matrix of its layers. Built in chapter 15.

Chapter 15 rounds each matrix by itself. Chapter 16 looks at data: texts walk through the layers, a factor moves between
a product and what makes its inputs (AWQ, SmoothQuant), and the matrix is written by the method that `config` names.
With `rotate`, all of this happens to a model in other coordinates (`minillm.model.rotation`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.model.calibration import CalibrationWalk
from minillm.model.decoder import Decoder
from minillm.model.decoder_layer import DecoderLayer
from minillm.model.layers import RMSNorm
from minillm.model.rotation import rotate_decoder
from minillm.quantization.activations import LARGEST
from minillm.quantization.awq import round_clipped, search_scales
from minillm.quantization.config import QuantizationConfig
from minillm.quantization.folding import fold_into_norm, fold_into_rows, scale_columns
from minillm.quantization.gptq import gptq
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.mixed import split_outliers
from minillm.quantization.rtn import in_groups, round_to_nearest
from minillm.quantization.smoothquant import smoothing_scales
from minillm.quantization.statistics import InputStatistics

Statistics = dict[str, InputStatistics]  # by the place of the product in its layer


@torch.no_grad()
def quantize_decoder(
    decoder: Decoder,
    config: QuantizationConfig,
    calibration: list[list[int]] | None = None,
    on_layer: Callable[[str], None] = lambda name: None,
) -> None:
    """Replace the weights of `decoder`, which is filled but not prepared, as `config` says.

    `calibration` are the token ids of some texts, for the methods that look at data; `on_layer` hears of each layer
    that is done. Raises ValueError naming the matrix where the groups do not divide it, or if there is no text.
    """
    if config.is_calibrated and decoder.config.moe is not None:
        raise ValueError(
            f"method={config.method!r} with activation_scales={config.activation_scales!r} is calibrated, and a text "
            f"reaches only some of the experts of model_type={decoder.config.model_type!r}; use rtn, such as "
            "quantization='int8' or 'int4'"
        )
    if config.method in ("awq", "smoothquant") and decoder.config.mla is not None:
        raise ValueError(
            f"method={config.method!r} folds its scales into the norm before qkv_proj, and queries, keys and values of "
            f"model_type={decoder.config.model_type!r} go through latents; use rtn or gptq"
        )
    check_groups(decoder, config)
    if config.method in ("awq", "smoothquant") and decoder.config.norms == "after":
        raise ValueError(
            f"method={config.method!r} folds its scales into the norm before a product, and "
            f"model_type={decoder.config.model_type!r} has none there; use rtn or gptq"
        )
    if config.is_calibrated and not calibration:
        raise ValueError(f"method={config.method!r} is calibrated: it needs texts to look at, and there are none")
    if config.rotate:
        rotate_decoder(decoder, config.seed)
    quantize_head(decoder, config)  # first: where the embedding is the same matrix, the texts walk in through it
    walk = CalibrationWalk(decoder, calibration) if config.is_calibrated else None
    for index, layer in enumerate(decoder.layers):
        for linear in layer.linears().values():  # in full, only one layer at a time is on the device
            linear.move_to(decoder.device)
        statistics = walk.observe(layer) if walk else {}
        rescale(layer, config, statistics, decoder.config.num_heads // decoder.config.num_kv_heads)
        for name, linear in layer.linears().items():
            linear.quantize(
                quantize_linear(linear.plain, config, statistics.get(name), behind_norm=name in norms_before(layer))
            )
        if walk:
            walk.advance(layer)
        on_layer(f"layer {index + 1} of {len(decoder.layers)}")


def quantize_head(decoder: Decoder, config: QuantizationConfig) -> None:
    """The output matrix, whole rows at a time; where the embedding is the same matrix, it is kept once."""
    head = decoder.lm_head
    head.move_to(decoder.device)
    if config.lm_head is None:
        return
    head.quantize(QuantizedLinear(round_to_nearest(head.plain, config.lm_head, group_size=None)))
    if decoder.config.tie_word_embeddings:
        decoder.embed_tokens = None


def check_groups(decoder: Decoder, config: QuantizationConfig) -> None:
    for index, layer in enumerate(decoder.layers):
        for name, linear in layer.linears().items():
            try:
                in_groups(linear.plain, config.group_size)
            except ValueError as error:
                raise ValueError(f"layer {index}, {name}: {error}") from error


def quantize_linear(
    weight: Tensor, config: QuantizationConfig, inputs: InputStatistics | None = None, behind_norm: bool = True
) -> QuantizedLinear:
    """One matrix [out_features, in_features], by the method of `config`.

    LLM.int8() looks for outliers among the model's features, which reach a product through a norm (`behind_norm`):
    what attention and the MLP hand to their second products is of another size, most of it beyond any threshold.
    """
    grid = (config.weights, config.group_size, config.symmetric)
    outliers = None
    if config.method == "gptq":
        quantized = gptq(weight, inputs.hessian, *grid, damping=config.damping, act_order=config.act_order)
    elif config.method == "awq":
        quantized = round_clipped(weight, inputs.hessian, *grid)
    elif config.method == "llm_int8" and behind_norm:
        quantized, outliers = split_outliers(weight, inputs.largest, config.weights, config.outlier_threshold)
    else:
        quantized = round_to_nearest(weight, *grid, config.per_tensor, config.scale_format)
    return QuantizedLinear(quantized, config.activations, static_scale(config, inputs, outliers), outliers)


def static_scale(
    config: QuantizationConfig, inputs: InputStatistics | None, outliers: tuple[Tensor, Tensor] | None
) -> Tensor | None:
    """One scale for all tokens, from the largest input that calibration saw; None where each token has its own."""
    if config.activations is None or config.activation_scales == "token":
        return None
    largest = inputs.largest if outliers is None else inputs.largest.index_fill(0, outliers[0], 0)
    return largest.max() / LARGEST[config.activations]


def rescale(layer: DecoderLayer, config: QuantizationConfig, statistics: Statistics, queries_per_value: int) -> None:
    """Fold what AWQ and SmoothQuant move. The layer computes what it did before, with other numbers.

    Changes the layer's norms and matrices, and `statistics` too: they become those of the inputs that a product gets
    from now on. `queries_per_value` query heads read one value head.
    """
    if config.method == "smoothquant":
        for name, norm in norms_before(layer).items():
            linear = layer.linears()[name]
            scales = fold_into_norm(norm.weight, smoothing_scales(statistics[name].largest, linear.plain, config.alpha))
            scale_columns(linear.plain, scales)
            statistics[name].divide(scales)
    if config.method == "awq":
        awq_rescale(layer, config, statistics, queries_per_value)


def awq_rescale(
    layer: DecoderLayer, config: QuantizationConfig, statistics: Statistics, queries_per_value: int
) -> None:
    """AWQ's scales for the four products of a layer, in the order in which they compute:

        product        what makes its inputs, and is divided        what is multiplied
        qkv_proj       the norm before it                           its columns
        o_proj         qkv_proj's last rows, the values             its columns
        gate_up_proj   the norm before it                           its columns
        down_proj      gate_up_proj's last rows, up                 its columns

    Attention mixes positions, never channels, so that a factor of a value channel comes out of it as it went in. But
    several query heads read one value head: their inputs of o_proj have one maker, and so one scale.
    With two query heads for each of two value heads of two channels:

        input of o_proj     0 1   2 3   4 5   6 7
        value channel       0 1   0 1   2 3   2 3        o_source

    All four are folded while the matrices are still in full, and only then quantized: a fold changes rows of a matrix
    that had its turn before.
    """
    attn, mlp, grid = layer.self_attn, layer.mlp, (config.weights, config.group_size, config.symmetric)
    norms = norms_before(layer)
    inputs = torch.arange(attn.o_proj.in_features, device=attn.o_proj.plain.device)
    value_head, channel = inputs // attn.head_dim // queries_per_value, inputs % attn.head_dim
    o_source = value_head * attn.head_dim + channel
    # The product that makes the inputs, and which of its rows.
    makers = {"self_attn.o_proj": (attn.qkv_proj, "v_proj"), "mlp.down_proj": (mlp.gate_up_proj, "up_proj")}
    for name, linear in layer.linears().items():
        source = o_source if linear is attn.o_proj else None
        scales = search_scales(linear.plain, statistics[name], *grid, source=source)
        if name in norms:
            scales = fold_into_norm(norms[name].weight, scales)
        else:
            maker, part = makers[name]
            fold_into_rows(maker.plain, maker.bias, maker.parts[part].start, scales)
        of_inputs = scales if source is None else scales[source]
        scale_columns(linear.plain, of_inputs)
        statistics[name].divide(of_inputs)


def norms_before(layer: DecoderLayer) -> dict[str, torch.nn.Module]:
    """The products whose inputs come out of a norm, and that norm."""
    norms = {"self_attn.qkv_proj": layer.input_layernorm, "mlp.gate_up_proj": layer.post_attention_layernorm}
    return {name: norm for name, norm in norms.items() if isinstance(norm, RMSNorm)}
