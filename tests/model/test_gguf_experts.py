"""GGUF files of mixtures of experts: the tensors of all experts of a layer in one, plain and in few bits."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minillm.bench import llama_cpp
from minillm.model.attention import NoCacheAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import CheckpointError, load_config, load_model, read_model
from tests.helpers.gguf_writer import write
from tests.helpers.model_zoo import EXPERTS
from tests.helpers.tiny import save_tiny_llama

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2)  # whole blocks of 32
FAMILIES = {
    "mixtral": EXPERTS["mixtral"],
    "qwen3-moe": EXPERTS["qwen3-moe"] | {"moe_intermediate_size": 32},
    "qwen2-moe": EXPERTS["qwen2-moe"] | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "olmoe": EXPERTS["olmoe"] | {"num_key_value_heads": 4},  # llama.cpp reads no other
}
TOKENS = [5 + i * 7 % 250 for i in range(30)]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    return {name: (folder, save_tiny_llama(folder, **FAMILIES[name] | SIZES)) for name, folder in folders.items()}


def logits(model) -> torch.Tensor:
    batch = ForwardBatch.single(TOKENS, all_logits=True)
    return model(batch, NoCacheAttention(model.config.layer_windows))


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_files_are_the_safetensors_model(name, families, tmp_path):
    folder, theirs = families[name]
    path = write(tmp_path / "float32.gguf", theirs)
    assert load_config(path).moe == load_config(folder).moe
    found, expected = logits(load_model(path, "float32", "cpu")), logits(load_model(folder, "float32", "cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if llama_cpp.installed():
        peer = llama_cpp.LlamaCpp(path, 1, 64)
        assert next(iter(peer(TOKENS))) == int(expected[-1].argmax())
        peer.close()


@pytest.mark.parametrize("kind, bits", [(Type.Q8_0, 8), (Type.Q4_0, 4)])
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_in_few_bits_stay_so_and_mean_what_they_dequantize_to(name, kind, bits, families, tmp_path):
    model = read_model(write(tmp_path / "model.gguf", families[name][1], kind), "float32", "cpu")
    plain = read_model(families[name][0], "float32", "cpu")
    for (place, ours), theirs in zip(model.linears().items(), plain.linears().values()):
        assert ours.quantized is not None and ours.quantized.weight.format.bits == bits, place
        theirs.plain.copy_(ours.quantized.dequantize())
    plain.embed_tokens.copy_(model.embed_tokens)
    for index in model.config.moe.layers:
        assert model.layers[index].mlp.gate.quantized is None
    torch.testing.assert_close(logits(model.prepare()), logits(plain.prepare()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "drop, extra, said",
    [
        (
            ["experts"],
            [("add_expert_count", 5), ("add_expert_used_count", 9)],
            "num_experts_per_tok=9 is not allowed; allowed: 1 to the 5 experts",
        ),
        (
            [],
            [("add_expert_weights_scale", 2.5)],
            "llama.expert_weights_scale=2.5 is not supported; supported: 1.0, or none",
        ),
    ],
)
def test_what_is_not_computed_is_named(drop, extra, said, families, tmp_path):
    path = write(tmp_path / "model.gguf", families["mixtral"][1], drop=drop, extra=extra)
    with pytest.raises(CheckpointError, match=said):
        load_model(path, "float32", "cpu")
