"""Which part of a model each rank holds: together the ranks hold all of it, and what cannot be cut is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minillm.book.roads.models import config_of
from minillm.model.decoder import Decoder
from minillm.parallel.layout import Layout, check_layout, cut_of, local_config
from minillm.parallel.quantized import cut_quantized
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.rtn import round_to_nearest

SIZES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 3)]


def weights_of(config):
    """Each tensor of a checkpoint of this shape, with different numbers."""
    generator = torch.Generator().manual_seed(0)
    views = Decoder(config, torch.float32, "meta").checkpoint_views()
    return {name: torch.randn(view.shape, generator=generator) for name, view in views.items()}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_parts_of_all_ranks_are_the_whole(sizes):
    """Each row and column is on some rank; those of KV heads that outnumbered by ranks on several."""
    config = replace(config_of("qwen3"), num_layers=3, qkv_bias=True, o_bias=True)
    for name, tensor in weights_of(config).items():
        seen = torch.zeros(tensor.shape)
        for rank in range(sizes[0] * sizes[1]):
            if (cut := cut_of(name, config, Layout(*sizes, rank))) is not None:
                place = torch.zeros(tensor.shape)
                for one in cut.ranges or (range(tensor.shape[0]),):
                    where = slice(one.start, one.stop)
                    place[(slice(None), where) if cut.dim else where] = 1
                seen += place
                assert cut.of(tensor).numel() == place.sum()
        assert (seen > 0).all(), name


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_part_has_the_shape_that_the_rank_s_decoder_expects(sizes):
    config = replace(config_of("qwen3"), num_layers=3, qkv_bias=True, o_bias=True)
    for rank in range(sizes[0] * sizes[1]):
        layout = Layout(*sizes, rank)
        views = Decoder(local_config(config, layout), torch.float32, "meta").checkpoint_views()
        for name, tensor in weights_of(config).items():
            if (cut := cut_of(name, config, layout)) is not None:
                assert cut.of(tensor).shape == views[cut.name].shape, (rank, name)


def test_query_heads_stand_with_the_kv_head_that_they_read():
    config = replace(config_of("llama"), num_heads=12, num_kv_heads=3, intermediate_size=48)
    for tp in (1, 3, 6, 12):
        check_layout(config, tp, 1)
        for rank in range(tp):
            layout = Layout(tp, 1, rank)
            read = {head // 4 for head in layout.query_heads(config)}
            assert read == set(layout.kv_heads(config))


def test_a_fused_tensor_of_a_checkpoint_is_cut_in_each_of_its_parts():
    config = config_of("llama")  # 4 query heads, 2 KV heads of 16
    cut = cut_of("model.layers.1.self_attn.qkv_proj.weight", config, Layout(2, 1, 1))
    assert cut.ranges == (range(32, 64), range(80, 96), range(112, 128))
    cut = cut_of("model.layers.1.mlp.gate_up_proj.weight", config, Layout(2, 1, 1))
    assert cut.ranges == (range(32, 64), range(96, 128))


@pytest.mark.parametrize(
    "changes, sizes, said",
    [
        ({}, (3, 1), "tensor_parallel_size=3 does not divide this model's num_attention_heads=4; use 1 or 2 or 4"),
        ({"intermediate_size": 66}, (4, 1), "intermediate_size=66"),
        ({"num_heads": 12, "num_kv_heads": 6}, (4, 1), "neither divides this model's num_key_value_heads=6 nor"),
        ({}, (1, 3), "pipeline_parallel_size=3 exceeds this model's num_hidden_layers=2; use at most 2"),
        ({"vocab_size": 9}, (8, 1), "vocabulary of 9"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_way_out(changes, sizes, said):
    more = {"num_heads": 8, "intermediate_size": 64} if sizes[0] == 8 else {}
    with pytest.raises(ValueError, match=said):
        check_layout(replace(config_of("llama"), **more, **changes), *sizes)


def test_stages_are_even_and_the_first_ones_have_what_is_left():
    layers = [list(Layout(1, 3, stage).layers(8)) for stage in range(3)]
    assert layers == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_columns_in_few_bits_are_cut_between_whole_groups():
    name, config = "layers.0.mlp.down_proj", config_of("llama")  # 64 inputs
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    for group_size in (None, 16):
        whole = QuantizedLinear(round_to_nearest(weight, "int4", group_size))
        parts = [
            cut_quantized(name, whole, cut_of(f"{name}.weight", config, layout), layout, torch.device("cpu"))
            for layout in (Layout(4, 1, rank) for rank in range(4))
        ]
        assert torch.equal(torch.cat([part.dequantize() for part in parts], dim=1), whole.dequantize())
    whole, layout = QuantizedLinear(round_to_nearest(weight, "int4", 32)), Layout(4, 1, 0)
    with pytest.raises(
        ValueError, match="groups of 32 inputs share a scale; quantize with a group_size that divides 16"
    ):
        cut_quantized(name, whole, cut_of(f"{name}.weight", config, layout), layout, torch.device("cpu"))
