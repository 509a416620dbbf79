"""Mixtures of experts in several processes generate the tokens of one: each expert cut, or whole experts spread."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.model.checkpoint import load_config
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.parallel.communicator import Traffic
from minillm.parallel.layout import Layout, check_layout, cut_of, local_config
from minillm.parallel.traffic import step_traffic
from tests.helpers.model_zoo import EXPERTS, LATENT
from tests.helpers.tiny import save_tiny_llama

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9] * 4, [20, 21], [33] * 9, [40, 41, 42])]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, top_k=7, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=6, ignore_eos=True),
]
MODELS = {
    "dots1": EXPERTS["dots1"] | {"num_key_value_heads": 2},  # a dense layer first, shared experts, groups
    "qwen2-moe": EXPERTS["qwen2-moe"],
    "deepseek-v2": LATENT["deepseek-v2-groups"],  # softmax in groups, a shared expert, latents, a bottleneck
    "deepseek-v3": LATENT["deepseek-v3"] | {"n_shared_experts": 2},  # sigmoids and a bias in groups
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in folders.items():
        save_tiny_llama(folder, **MODELS[name] | {"num_hidden_layers": 3})
    return folders


def tokens(folder, **settings) -> list[list[int]]:
    """And what the ranks send is what the formula says, however the experts are spread."""
    llm = LLM(str(folder), device="cpu", dtype="float32", max_model_len=64, num_kv_blocks=60, **settings)
    sizes = llm.config.tensor_parallel_size, llm.config.pipeline_parallel_size
    try:
        made = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        if max(sizes) > 1:
            count_a_prompt_and_a_step(llm, sizes, load_config(folder))
        return made
    finally:
        if max(sizes) > 1:
            llm.close()
        del llm
        gc.collect()


def count_a_prompt_and_a_step(llm: LLM, sizes: tuple[int, int], config: ModelConfig) -> None:
    """Two all-reduces of [tokens, hidden_size] in a layer: one for attention, one for all experts, shared ones too."""
    llm.engine.executor.collective("take_traffic")
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [50, 51, 52, 53, 54, 55, 56]}], greedy, use_tqdm=False)
    for rank, counted in enumerate(llm.engine.executor.collective("take_traffic")):
        wanted = Traffic()
        for num_tokens in (7, 1):
            step = step_traffic(config, *sizes, num_tokens, 1, rank=rank)
            wanted.messages += step.messages
            wanted.bytes += step.bytes
        assert counted.as_dict() == wanted.as_dict(), rank


@pytest.mark.parametrize(
    "name, settings",
    [
        ("dots1", dict(tensor_parallel_size=2)),
        ("dots1", dict(tensor_parallel_size=2, enable_expert_parallel=True)),
        ("qwen2-moe", dict(tensor_parallel_size=2, enable_expert_parallel=True, quantization="int8")),
        ("qwen2-moe", dict(tensor_parallel_size=2, pipeline_parallel_size=2)),
        ("deepseek-v2", dict(tensor_parallel_size=2)),
        ("deepseek-v2", dict(tensor_parallel_size=4, enable_expert_parallel=True)),  # a group on each rank
        ("deepseek-v2", dict(tensor_parallel_size=2, quantization="int8")),
        ("deepseek-v3", dict(tensor_parallel_size=2, pipeline_parallel_size=2, enable_expert_parallel=True)),
        ("deepseek-v3", dict(pipeline_parallel_size=3)),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_process(name, settings, models):
    alone = {"quantization": settings["quantization"]} if "quantization" in settings else {}
    assert tokens(models[name], **settings) == tokens(models[name], **alone)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (1, 3), (2, 2)])
def test_the_ranks_hold_all_of_the_model_together(sizes, name, expert_parallel, models):
    """Every number of a layer's experts is on one rank; routers are on each; and each part has the shape it needs."""
    config = load_config(models[name])
    config = config if config.mla else replace(config, num_kv_heads=4)
    whole = {key: view.numel() for key, view in Decoder(config, torch.float32, "meta").checkpoint_views().items()}
    held = dict.fromkeys(whole, 0)
    for rank in range(sizes[0] * sizes[1]):
        layout = Layout(*sizes, rank, expert_parallel)
        part = Decoder(local_config(config, layout), torch.float32, "meta").checkpoint_views()
        for key in whole:
            if ".layers." in key and (cut := cut_of(key, config, layout)) is not None:
                assert cut.of(torch.empty(shape_of(config, key), device="meta")).shape == part[cut.name].shape, key
                held[key] += part[cut.name].numel()
    for key, count in whole.items():
        if ".experts." in key or ".shared_expert." in key:
            assert held[key] == count, key
        if key.endswith(("mlp.gate.weight", "e_score_correction_bias", "shared_expert_gate.weight")):
            assert held[key] == count * sizes[0], key
        if key.endswith(("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight")):  # by heads
            assert held[key] == count, key
        if "kv_a_" in key or "q_a_" in key:  # what makes the latents
            assert held[key] == count * sizes[0], key


def shape_of(config, key: str) -> torch.Size:
    return Decoder(config, torch.float32, "meta").checkpoint_views()[key].shape


@pytest.mark.parametrize(
    "name, changes, settings, said",
    [
        ("dots1", {}, dict(tensor_parallel_size=3, expert_parallel=True), "3 does not divide this model's num_att"),
        (
            "dots1",
            {"num_experts": 9, "n_group": 3},
            dict(tensor_parallel_size=2, expert_parallel=True),
            "num_experts=9",
        ),
        ("dots1", {"intermediate_size": 15}, dict(tensor_parallel_size=2), "moe_intermediate_size=15; use 1"),
    ],
)
def test_what_cannot_be_cut_is_named(name, changes, settings, said, models):
    config = load_config(models[name])
    config = replace(config, moe=replace(config.moe, **changes))
    with pytest.raises(ValueError, match=said):
        check_layout(config, settings.pop("tensor_parallel_size"), 1, **settings)


def test_expert_parallel_without_experts_or_ranks_is_refused(models):
    with pytest.raises(ValueError, match="enable_expert_parallel=True needs experts, and model_type='llama' has none"):
        LLM("tinyworld", tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ValueError, match="spreads experts over tensor-parallel ranks, and tensor_parallel_size=1"):
        LLM(str(models["dots1"]), enable_expert_parallel=True)
    with pytest.raises(ValueError, match=r"mlp.experts.gate_up_proj holds all experts of a layer"):
        cut_of("model.layers.1.mlp.experts.gate_up_proj", load_config(models["dots1"]), Layout(2, 1, 0))
