"""Adapters in the engine: greedy float32 tokens are PEFT's, whatever else is in the batch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from minillm import LLM, LoRARequest, SamplingParams
from minillm.book.roads.pickled import pickle_steps
from minillm.kernels import native
from tests.helpers.adapters import peft_tokens, save_adapter
from tests.helpers.model_zoo import make_model
from tests.helpers.tiny import VOCAB_SIZE, byte_tokenizer

MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
PROMPTS = [[3 + i * 7 % 90 for i in range(32)], [5], [11, 12, 13, 14], [*range(20, 60)]]
QUIET = {"use_tqdm": False}
# Ranks, targets and scalings; key and value heads are fewer than those of queries.
KINDS: dict[str, dict] = {
    "all": dict(r=4),
    "q and v": dict(r=8, targets=["q_proj", "v_proj"]),
    "rslora": dict(r=16, targets="all-linear", use_rslora=True),
    "patterns": dict(
        r=2, targets=r".*\.(o|gate|up|down)_proj", rank_pattern={"up_proj": 6, r"layers\.0\.self_attn\.o_proj": 3},
        alpha_pattern={"layers.1.mlp.down_proj": 9},
    ),
    "some layers": dict(r=64, targets=["k_proj", "down_proj"], layers_to_transform=[1]),
}  # fmt: skip


class World:
    """A random model, its adapters, and what PEFT says with each."""

    def __init__(self, folder: Path):
        self.model = folder / "model"
        make = dict(vocab_size=VOCAB_SIZE, num_hidden_layers=2, head_dim=16, eos_token_id=VOCAB_SIZE - 1)
        make_model(1, model_type="llama", **make).save_pretrained(self.model)
        byte_tokenizer().save_pretrained(self.model)
        self.folders = {
            name: save_adapter(self.model, folder / name, seed, **kind)
            for seed, (name, kind) in enumerate(KINDS.items())
        }
        self.said = {name: peft_tokens(self.model, path, PROMPTS, MAX_TOKENS) for name, path in self.folders.items()}
        self.said[None] = peft_tokens(self.model, None, PROMPTS, MAX_TOKENS)
        assert len({str(said) for said in self.said.values()}) == len(self.said), "no adapter passes for another"

    def request(self, name: str | None) -> LoRARequest | None:
        return None if name is None else LoRARequest(name, 1 + list(KINDS).index(name), str(self.folders[name]))

    def llm(self, **settings) -> LLM:
        common = dict(dtype="float32", device="cpu", enable_lora=True, max_lora_rank=64, block_size=4)
        llm = LLM(self.model, **common | settings)
        pickle_steps(llm.engine)
        return llm

    def check(self, llm: LLM, names: list[str | None], **options) -> list:
        """Every prompt with every one of these adapters in one call."""
        asked = [(name, index) for name in names for index in range(len(PROMPTS))]
        prompts = [{"prompt_token_ids": PROMPTS[index]} for _, index in asked]
        requests = [self.request(name) for name, _ in asked]
        outputs = llm.generate(prompts, GREEDY, lora_request=requests, **QUIET, **options)
        for (name, index), output in zip(asked, outputs):
            assert output.outputs[0].token_ids == self.said[name][index], (name, index)
            assert output.lora_request == output.outputs[0].lora_request == self.request(name)
        return outputs


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def llm(world) -> LLM:
    return world.llm()


EVERYONE = [None, *KINDS]


@pytest.mark.parametrize("name", EVERYONE)
def test_tokens_equal_those_of_peft(world, llm, name):
    world.check(llm, [name])


@pytest.mark.parametrize("attention", ["torch", "native"])
@pytest.mark.parametrize("max_loras", [1, 2, 8])
def test_a_mixed_batch_serves_each_request_with_its_adapter(world, attention, max_loras):
    if attention == "native" and native.library() is None:
        pytest.skip("no C compiler here")
    llm = world.llm(attention_backend=attention, max_loras=max_loras, max_num_seqs=7, max_num_batched_tokens=40)
    most = []
    step = llm.engine.executor.execute

    def counted(output):
        states = llm.engine.scheduler.requests
        most.append(len({states[row.request_id].adapter for row in output.rows} - {None}))
        return step(output)

    llm.engine.executor.execute = counted
    world.check(llm, EVERYONE)
    assert max(most) <= max_loras and (max_loras == 8 or max(most) == max_loras)


def test_adapters_share_no_cached_block_and_the_same_one_does(world):
    llm = world.llm()
    world.check(llm, EVERYONE)
    first = [output.num_cached_tokens for output in world.check(llm, ["all"])]
    assert first == [28, 0, 0, 36], "the same adapter finds its own blocks"
    prompt = {"prompt_token_ids": PROMPTS[0]}
    llm.reset_prefix_cache()
    for name in EVERYONE:
        assert llm.generate(prompt, GREEDY, lora_request=world.request(name), **QUIET)[0].num_cached_tokens == 0
    # Another name and number for the same content: the blocks are the same.
    twin = LoRARequest("twin", 77, str(world.folders["all"]))
    assert llm.generate(prompt, GREEDY, lora_request=twin, **QUIET)[0].num_cached_tokens == 28


def test_a_folder_that_is_written_anew_is_another_adapter(world, tmp_path):
    llm = world.llm()
    folder = tmp_path / "changing"
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def said(**more) -> list[list[int]]:
        request = LoRARequest("changing", 1, str(folder), **more)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, lora_request=request, **QUIET)]

    shutil.copytree(world.folders["all"], folder)
    assert said() == world.said["all"]
    shutil.copytree(world.folders["rslora"], folder, dirs_exist_ok=True)
    assert said() == world.said["all"], "it is read once"
    assert said(load_inplace=True) == world.said["rslora"] == said()
    assert llm.add_lora(LoRARequest("changing", 1, str(folder))) is False
    assert llm.remove_lora(1) and not llm.remove_lora(1) and llm.list_loras() == set()
    shutil.copytree(world.folders["q and v"], folder, dirs_exist_ok=True)
    assert llm.add_lora(LoRARequest("changing", 1, str(folder))) is True
    assert said() == world.said["q and v"]


def test_the_least_recently_used_adapter_goes_first(world):
    llm = world.llm(max_loras=2, max_cpu_loras=3)
    cache = llm.engine.runner.adapters
    names = list(KINDS)
    for name in (*names[:3], names[0], names[3]):
        world.check(llm, [name])
    assert llm.list_loras() == {1, 3, 4} and cache.num_read == 4
    assert list(cache.on_device) == [cache.keys()[1], cache.keys()[2]], "the two that were used last"
    world.check(llm, EVERYONE)
    assert len(cache.on_host) == 3 and cache.num_read > 6


def test_what_is_no_adapter_request_is_refused(world, llm, tmp_path):
    prompt = {"prompt_token_ids": [5]}
    for given, error, told in (
        ("all", TypeError, "lora_request='all' is not allowed"),
        ([world.request("all")] * 2, ValueError, "2 entries for 1 prompts"),
        (LoRARequest("x", 1, str(tmp_path / "nowhere")), ValueError, "is not a folder"),
    ):
        with pytest.raises(error, match=told):
            llm.generate(prompt, GREEDY, lora_request=given, **QUIET)
    with pytest.raises(ValueError, match="enable_lora=True"):
        LLM(world.model, device="cpu").generate(prompt, GREEDY, lora_request=world.request("all"), **QUIET)
    with pytest.raises(ValueError, match=r"r=64.*max_lora_rank=16.*larger"):
        world.llm(max_lora_rank=16).add_lora(world.request("some layers"))
    for name, value in (("max_loras", 0), ("max_lora_rank", 65), ("max_cpu_loras", 2), ("lora_int_id", 0)):
        with pytest.raises(ValueError, match=name):
            LoRARequest("x", 0, "y") if name == "lora_int_id" else world.llm(**{"max_loras": 4, name: value})
    world.check(llm, ["all"])
