"""Adapters in the engine: greedy float32 tokens are PEFT's, whatever else is in the batch."""

from __future__ import annotations

import shutil

import pytest

from minillm import LLM, LoRARequest
from minillm.kernels import native
from tests.helpers.adapter_world import EVERYONE, GREEDY, KINDS, PROMPTS, QUIET, World


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def llm(world) -> LLM:
    return world.llm()


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
