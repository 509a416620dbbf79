"""gpt-oss in several processes: sinks and biases by heads, experts cut or spread, plain or in MXFP4, tokens of one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from minillm import LLM, SamplingParams
from minillm.model.adapted import adapted
from minillm.model.checkpoint import load_config
from minillm.model.decoder import Decoder
from minillm.parallel.layout import Layout, check_layout, cut_of, expert_part, local_config
from tests.helpers import mxfp4_writer
from tests.helpers.model_zoo import make_model
from tests.helpers.tiny import byte_tokenizer
from tests.model.test_gpt_oss import PROMPTS, SETTINGS
from tests.model.test_mxfp4 import TOKENS, random_model

PARAMS = [
    *[SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 3,
    SamplingParams(temperature=0.9, seed=4, top_k=7, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, top_p=0.9, max_tokens=12, ignore_eos=True),
]
TIGHT = dict(num_kv_blocks=17, block_size=4, max_num_batched_tokens=16, preemption_mode="swap", host_kv_bytes=10**6)
DRAFTS = dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, block_size=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Six plain experts, stacked as transformers writes them, and five in blocks, which two ranks have two and one
    of."""
    plain, blocks = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("blocks")
    model = make_model(seed=3, **SETTINGS | {"num_local_experts": 6, "tie_word_embeddings": True})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "router" in name:
                parameter.normal_(std=0.5)
            elif name.endswith("sinks"):
                parameter.normal_(std=2.0)
    model.save_pretrained(plain)
    mxfp4_writer.write(blocks, random_model(5), **TOKENS)
    for folder in (plain, blocks):
        byte_tokenizer().save_pretrained(folder)
    return {"plain": plain, "blocks": blocks}


def tokens(folder, **settings) -> list[list[int]]:
    settings = dict(device="cpu", dtype="float32", max_model_len=64, num_kv_blocks=60) | settings
    with LLM(folder, **settings) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [
            output.outputs[0].token_ids for _ in range(2) for output in llm.generate(prompts, PARAMS, use_tqdm=False)
        ]


@pytest.mark.parametrize(
    "name, sizes, settings",
    [
        ("plain", dict(tensor_parallel_size=2), TIGHT),
        ("plain", dict(tensor_parallel_size=2, pipeline_parallel_size=2, enable_expert_parallel=True), DRAFTS),
        ("plain", dict(tensor_parallel_size=2), dict(quantization="int8", kv_cache_dtype="int8")),
        ("blocks", dict(tensor_parallel_size=2), DRAFTS),
        ("blocks", dict(tensor_parallel_size=2, pipeline_parallel_size=2), TIGHT),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_process(name, sizes, settings, folders):
    assert tokens(folders[name], **sizes, **settings) == tokens(folders[name], **settings)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_a_part_of_a_stacked_file_is_the_part_of_each_expert(sizes, expert_parallel, folders):
    """Cut while the file is read, where all experts of a layer are one tensor, as it would be when they are apart."""
    config = load_config(folders["plain"])
    with safe_open(folders["plain"] / "model.safetensors", "pt") as file:
        stacked = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    apart = dict(adapted(config, stacked.items()))
    for rank in range(sizes[0] * sizes[1]):
        layout = Layout(*sizes, rank, expert_parallel)
        config_here = local_config(config, layout)
        cuts = [(cut_of(name, config, layout), tensor) for name, tensor in stacked.items()]
        read = dict(adapted(config_here, [(cut.name, cut.of(tensor)) for cut, tensor in cuts if cut]))
        cuts = [(cut_of(name, config, layout), tensor) for name, tensor in apart.items()]
        wanted = {cut.name: cut.of(tensor) for cut, tensor in cuts if cut}
        views = Decoder(config_here, torch.float32, "meta").checkpoint_views()
        assert read.keys() == wanted.keys() <= views.keys()
        for name, tensor in wanted.items():
            assert torch.equal(read[name], tensor) and tensor.shape == views[name].shape, (rank, name)
        heads = layout.query_heads(config)
        assert torch.equal(
            read["model.layers.0.self_attn.sinks"],
            apart[f"model.layers.{layout.layers(4).start}.self_attn.sinks"][heads.start : heads.stop],
        )


def test_experts_are_cut_between_blocks_and_more_ranks_than_blocks_are_refused(folders):
    config = load_config(folders["blocks"])  # 96 inputs in blocks of 32
    assert [len(expert_part(config, Layout(2, 1, rank))) for rank in range(2)] == [64, 32]
    large = replace(config, moe=replace(config.moe, intermediate_size=2880))  # gpt-oss-20b: 90 blocks
    parts = [expert_part(large, Layout(4, 1, rank)) for rank in range(4)]
    assert [len(part) // 32 for part in parts] == [23, 23, 22, 22] and parts[-1].stop == 2880
    with pytest.raises(ValueError, match="intermediate_size=96 has 3 blocks of 32; use at most 3, or enable_expert"):
        check_layout(config, 4, 1)
    with pytest.raises(ValueError, match="num_experts=5"):
        check_layout(config, 2, 1, expert_parallel=True)
