"""Adapters on pipelines of three stages, and on two ranks of two stages: several in a batch, and drafts at the same
time."""

from __future__ import annotations

import shutil

import pytest

from minillm import LLM, LoRARequest, SamplingParams
from tests.helpers.adapters import save_adapter
from tests.helpers.tiny import save_tiny_llama

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9] * 4, [20, 21], [33] * 9, [40, 41, 42], [5, 6, 7] * 5)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, top_k=7, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, structured_outputs={"regex": "[ab]{3}c[de]+"}, max_tokens=8),
]
KINDS = {
    "all": dict(r=4),
    "one layer": dict(r=8, targets=["k_proj", "down_proj"], layers_to_transform=[1]),  # two stages have nothing of it
    "rows": dict(r=3, targets=["o_proj", "up_proj"]),
}
ORDERS = (("all", None, "one layer", "rows", "all"), ("rows", "one layer", "one layer", "all", None))
SPLITS = {
    "3 stages, n-grams": (
        dict(pipeline_parallel_size=3),
        dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3}),
    ),
    "3 stages, few blocks": (
        dict(pipeline_parallel_size=3),
        dict(num_kv_blocks=16, block_size=4, max_num_batched_tokens=8, preemption_mode="swap", host_kv_bytes=10**6),
    ),
    "2 x 2": (dict(tensor_parallel_size=2, pipeline_parallel_size=2), dict(quantization="int8")),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    save_tiny_llama(folder / "model", num_hidden_layers=3, attention_bias=True, mlp_bias=True)
    for seed, (name, kind) in enumerate(KINDS.items()):
        save_adapter(folder / "model", folder / name, seed, **kind)
    return folder


def request(world, name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, 1 + list(KINDS).index(name), str(world / name))


def serve(llm: LLM, world) -> list[list[int]]:
    made = []
    for names in ORDERS:
        asked = [request(world, name) for name in names]
        made += llm.generate(PROMPTS, PARAMS, lora_request=asked, use_tqdm=False)
    return [output.outputs[0].token_ids for output in made]


def build(world, **more) -> LLM:
    common = dict(device="cpu", dtype="float32", max_model_len=64, num_kv_blocks=60, max_lora_rank=8)
    return LLM(world / "model", **common | more, enable_lora=True, max_loras=2, max_cpu_loras=2)


@pytest.mark.parametrize("name", SPLITS)
def test_tokens_are_those_of_one_process(name, world):
    sizes, more = SPLITS[name]
    alone = serve(build(world, **more), world)
    with build(world, **sizes, **more) as llm:
        assert serve(llm, world) == alone
    assert len({str(tokens) for tokens in alone}) > 7


def test_adapters_whose_folder_is_gone_or_that_are_let_go_while_they_run(world, tmp_path):
    """The workers read it with the engine, not when a request comes, and forget with it what was pinned."""
    gone = shutil.copytree(world / "all", tmp_path / "gone")
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    made = []
    for sizes in ({}, dict(tensor_parallel_size=2)):  # whose steps have both of the others
        shutil.copytree(world / "all", gone, dirs_exist_ok=True)
        with build(world, **sizes) as llm:
            llm.add_lora(LoRARequest("gone", 9, str(gone)))
            shutil.rmtree(gone)
            llm.pin_lora(9)
            sink = llm.submit(PROMPTS[0], greedy, lora_request=LoRARequest("gone", 9, str(gone)))
            llm.step()
            assert llm.remove_lora(9)
            others = [request(world, name) for name in ("one layer", "rows")]
            outputs = llm.generate(PROMPTS[1:3], greedy, lora_request=others, use_tqdm=False)
            while not sink.is_finished:
                llm.step()
            outputs += llm.generate(PROMPTS[1:3], greedy, lora_request=others, use_tqdm=False)
            made.append([sink.collected().outputs[0].token_ids] + [one.outputs[0].token_ids for one in outputs])
    assert made[0] == made[1]
