"""Adapters beside everything else an engine does: queues, forks, beams, tiers, sleep, folders that change."""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch

from minillm import LLM, BeamSearchParams, LoRARequest, PoolingParams, SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.lora_gate import AdapterGate
from minillm.engine.lora_request import AdapterRef
from minillm.engine.policies import FCFS
from minillm.engine.request import Request
from minillm.model.errors import AdapterError
from minillm.model.lora_slots import LoraSlots
from minillm.programs import State, gen, select
from tests.helpers.adapter_world import EVERYONE, GREEDY, KINDS, PROMPTS, QUIET, World

NAMES = list(KINDS)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def llm(world) -> LLM:
    return world.llm(max_loras=2)


def ids(index: int) -> dict:
    return {"prompt_token_ids": PROMPTS[index]}


def merged(world: World, name: str, folder) -> LLM:
    """The model with the adapter in its weights, by PEFT: an oracle of what is not greedy."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.helpers.tiny import byte_tokenizer

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(world.model), world.folders[name])
    model.merge_and_unload().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return LLM(folder, dtype="float32", device="cpu")


def test_forks_beams_and_vectors_are_those_of_the_merged_model(world, llm, tmp_path):
    plain, request = merged(world, "rslora", tmp_path / "merged"), world.request("rslora")
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    found, wanted = (one.generate(ids(0), params, **QUIET, **more)[0] for one, more in both(llm, plain, request))
    assert [sample.token_ids for sample in found.outputs] == [sample.token_ids for sample in wanted.outputs]
    search = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    found, wanted = (one.beam_search(ids(3), search, **more)[0] for one, more in both(llm, plain, request))
    assert [one.tokens for one in found.sequences] == [one.tokens for one in wanted.sequences]
    assert found.lora_request == request
    options = QUIET | {"pooling_params": PoolingParams()}
    vectors = [one.embed([ids(0), ids(3)], **options, **more) for one, more in both(llm, plain, request)]
    for found, wanted in zip(*vectors):
        torch.testing.assert_close(
            torch.tensor(found.outputs.embedding), torch.tensor(wanted.outputs.embedding), atol=1e-4, rtol=1e-3
        )
    assert llm.score(ids(0), ids(3), **QUIET)[0].outputs.score != pytest.approx(
        llm.score(ids(0), ids(3), lora_request=request, **QUIET)[0].outputs.score, abs=1e-4
    )


def both(llm: LLM, plain: LLM, request: LoRARequest):
    return ((llm, {"lora_request": request}), (plain, {}))


def test_programs_have_adapters(world, llm, tmp_path):
    plain, request = merged(world, "all", tmp_path / "merged"), world.request("all")
    said = []
    for one, more in both(llm, plain, request):
        with State(one, "the cat", **more) as state:
            state += gen("first", max_tokens=5, temperature=0.0)
            branches = state.fork(2)
            for branch, letter in zip(branches, "ab"):
                branch += letter
                branch += gen("rest", max_tokens=4, temperature=0.0)
            state += select("choice", ["x", "yy", "z"])
            said.append((state["first"], [branch["rest"] for branch in branches], state["choice"], state.token_ids))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "settings",
    [
        dict(preemption_mode="swap", host_kv_bytes=10**6, num_kv_blocks=22, max_loras=2),
        dict(preemption_mode="recompute", num_kv_blocks=22, max_loras=1),
        dict(num_kv_blocks=24, host_kv_bytes=10**6, disk_kv_bytes=10**6, disk_kv_path="here", max_loras=3),
    ],
    ids=["swap", "recompute", "disk"],
)
def test_where_memory_is_short_every_request_keeps_its_adapter(world, tmp_path, settings):
    if "disk_kv_path" in settings:
        settings = settings | {"disk_kv_path": tmp_path}
    for _ in range(2):  # the second LLM finds the prefixes of the first on disk
        with world.llm(**settings, max_num_batched_tokens=12) as llm:
            llm.engine.trace.enabled = True
            for _ in range(2):
                outputs = world.check(llm, EVERYONE)
            if "disk_kv_path" not in settings:
                assert sum(output.metrics.num_preemptions for output in outputs) > 0
                break
    if "disk_kv_path" in settings:
        assert sum(output.metrics.cached_tokens.get("disk", 0) for output in outputs) + sum(
            output.metrics.cached_tokens.get("host", 0) for output in outputs
        )


def test_adapters_outlive_sleep(world):
    llm = world.llm(max_loras=2)
    world.check(llm, ["all"])
    for level in (1, 2):
        llm.sleep(level)
        with pytest.raises(RuntimeError, match="asleep"):
            llm.add_lora(world.request("rslora"))
        llm.wake_up()
        assert llm.list_loras() == set(), "host memory was freed too"
        world.check(llm, EVERYONE)


def test_a_pinned_adapter_keeps_its_batch_slot(world):
    llm = world.llm(max_loras=2, max_cpu_loras=2)
    with pytest.raises(ValueError, match="stands for no adapter"):
        llm.pin_lora(1)
    llm.add_lora(world.request("all"))
    assert llm.pin_lora(1) and llm.pin_lora(1)
    world.check(llm, ["all"])
    cache = llm.engine.runner.adapters
    [key] = cache.pinned
    slot = cache.on_device[key]
    world.check(llm, EVERYONE)
    assert cache.on_device[key] == slot and 1 in llm.list_loras()
    llm.add_lora(world.request("rslora"))
    with pytest.raises(ValueError, match=r"max_loras=2 lets 1 adapters be pinned"):
        llm.pin_lora(3)
    llm.remove_lora(1)
    assert llm.pin_lora(3)
    world.check(llm, EVERYONE)


def test_an_adapter_that_is_pinned_while_others_have_all_batch_slots_waits_for_one(world):
    llm = world.llm(max_loras=2, max_num_seqs=20)
    names = ["all", "rslora", "patterns", "all", "patterns"]
    sinks = [llm.submit(ids(0), GREEDY, lora_request=world.request(name)) for name in names[:2]]
    llm.step()
    llm.add_lora(world.request("patterns"))
    llm.pin_lora(1 + NAMES.index("patterns"))
    sinks += [llm.submit(ids(0), GREEDY, lora_request=world.request(name)) for name in names[2:]]
    while llm.step():
        assert len({one.adapter for one in llm.engine.scheduler.running}) <= 2
    assert [sink.output().outputs[0].token_ids for sink in sinks] == [world.said[name][0] for name in names]


def test_a_folder_that_changes_while_its_request_waits_ends_that_request_alone(world, tmp_path):
    folder = shutil.copytree(world.folders["all"], tmp_path / "all")
    llm = world.llm(max_loras=1, max_cpu_loras=1)
    first = llm.submit(ids(0), GREEDY, lora_request=LoRARequest("all", 1, folder))
    other = llm.submit(ids(0), GREEDY, lora_request=world.request("rslora"))  # takes the only place on the host
    shutil.copytree(world.folders["q and v"], folder, dirs_exist_ok=True)
    plain = llm.submit(ids(0), GREEDY)
    while llm.step():
        llm.engine.scheduler.check_integrity()
    assert isinstance(first.error, AdapterError) and "has changed since" in str(first.error)
    assert other.output().outputs[0].token_ids == world.said["rslora"][0]
    assert plain.output().outputs[0].token_ids == world.said[None][0]
    llm.generate(ids(0), GREEDY, **QUIET)
    stale = LoRARequest("all", 1, folder)
    llm.add_lora(stale)
    llm.add_lora(world.request("rslora"))
    shutil.rmtree(folder)
    with pytest.raises(AdapterError, match="is not a folder"):
        llm.generate(ids(0), GREEDY, lora_request=stale, **QUIET)
    world.check(llm, ["rslora", None])


def test_an_adapter_that_cannot_be_prepared_ends_its_request_alone(world, monkeypatch):
    llm = world.llm(max_loras=2)
    llm.add_lora(world.request("all"))

    def prepare(ref, in_use):
        raise AdapterError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler.gate, "prepare", prepare)
        other = llm.submit(ids(0), GREEDY)
        with pytest.raises(AdapterError, match="the disk is gone"):
            llm.generate([ids(0), ids(1)], GREEDY, lora_request=[None, world.request("all")], **QUIET)
        with pytest.raises(RuntimeError, match="aborted"):
            llm.beam_search(ids(0), BeamSearchParams(beam_width=2, max_tokens=3), lora_request=world.request("all"))
        while llm.step():
            pass
        assert other.output().outputs[0].token_ids == world.said[None][0]
    world.check(llm, EVERYONE)


def test_a_request_is_served_to_its_end_with_an_adapter_that_was_removed(world, tmp_path):
    folder = shutil.copytree(world.folders["all"], tmp_path / "all")
    llm = world.llm(max_loras=1, max_cpu_loras=1)
    sink = llm.submit(ids(0), GREEDY, lora_request=LoRARequest("all", 1, folder))
    llm.step()
    assert llm.remove_lora(1)
    shutil.rmtree(folder)
    other = llm.submit(ids(0), GREEDY, lora_request=world.request("rslora"))
    while llm.step():
        pass
    assert sink.output().outputs[0].token_ids == world.said["all"][0]
    assert other.output().outputs[0].token_ids == world.said["rslora"][0]


def test_no_adapter_waits_for_ever():
    """A stream of requests of the adapters that run passes one that waits, but only so many of them."""
    gate, queue = AdapterGate(max_loras=1, patience=3), FCFS()

    def request(name: str, adapter: str | None) -> Request:
        ref = None if adapter is None else AdapterRef(adapter, "")
        return Request(name, [1], SamplingParams(), max_tokens=1, adapter=ref)

    running, passed = [request("r", "a")], Counter()
    queue.add(request("late", "b"))
    for number in range(20):
        queue.add(request(f"a{number}", "a"))
        queue.add(request(f"plain{number}", None))
        gate.begin(running)
        while (one := queue.peek()) is not None:
            queue.pop()
            if gate.admits(one):
                gate.admitted(one)
                passed[one.adapter and one.adapter.key] += 1
            elif not gate.set_aside(one):
                break
        gate.end(queue)
        assert queue.peek().request_id == "late"
    assert passed == {"a": 3, None: 20}
    gate.begin([])
    assert gate.admits(queue.pop())


def test_a_random_crowd_is_served_with_the_right_adapters(world):
    """Requests come, leave, and name adapters that are loaded, reloaded, removed and pinned meanwhile."""
    for seed in range(6):
        rng = random.Random(seed)
        llm = world.llm(
            max_loras=rng.choice((1, 2, 3)), max_cpu_loras=rng.choice((3, 5)), max_num_seqs=rng.choice((2, 5, 20)),
            num_kv_blocks=rng.choice((40, 200)), max_num_batched_tokens=rng.choice((7, 30, 500)),
            scheduling_policy=rng.choice(("fcfs", "preemptive_priority", "fair", "sjf", "lpm")),
            async_scheduling=rng.random() < 0.5,
            speculative_config=rng.choice((None, {"method": "ngram", "prompt_lookup_min": 1})),
        )  # fmt: skip
        sinks = []
        for _ in range(60):
            if rng.random() < 0.5 and len(sinks) < 25:
                name, index = rng.choice(EVERYONE), rng.randrange(len(PROMPTS))
                more = {"priority": rng.randrange(3), "user": rng.choice("ab")}
                sinks.append((name, index, llm.submit(ids(index), GREEDY, lora_request=world.request(name), **more)))
            if sinks and rng.random() < 0.05:
                rng.choice(sinks)[2].withdraw()
            match rng.randrange(12):
                case 0:
                    llm.remove_lora(rng.randint(1, len(NAMES)))
                case 1:
                    llm.add_lora(world.request(rng.choice(NAMES)))
                case 2 if llm.config.max_loras > 2 and not llm.engine.runner.adapters.pinned and llm.list_loras():
                    llm.pin_lora(rng.choice(sorted(llm.list_loras())))
            llm.step()
            llm.engine.scheduler.check_integrity()
        while llm.step():
            llm.engine.scheduler.check_integrity()
        for name, index, sink in sinks:
            if sink.collected().outputs[0].finish_reason != "abort":
                assert sink.output().outputs[0].token_ids == world.said[name][index], (seed, name, index)
        cache = llm.engine.runner.adapters
        assert len(cache.on_host) <= cache.max_cpu_loras + 1, "one more while all of those are in use"
        taken = list(cache.on_device.values())
        assert len(set(taken)) == len(taken) and set(taken) <= set(range(llm.config.max_loras))


def test_an_adapter_of_the_step_is_never_sent_twice(world, monkeypatch):
    """The least recently used adapter is in the step itself: another one gives up its batch slot."""
    llm, sent = world.llm(max_loras=2), []
    put = LoraSlots.put
    monkeypatch.setattr(LoraSlots, "put", lambda self, slot, one: (sent.append(one.key), put(self, slot, one)))
    for name in ("all", "rslora"):
        world.check(llm, [name])
    world.check(llm, ["patterns", "all"])
    assert len(sent) == 3


def test_two_engines_may_share_a_model(world):
    llm = world.llm(max_loras=2)
    other = Engine(llm.model, config=replace(llm.config, block_size=8, max_loras=3))
    first, names = llm.engine, ["all", "rslora", "patterns"]
    for engine in (other, first, other):
        llm.engine = engine
        world.check(llm, names)
        names.reverse()


def test_threads_may_load_adapters_while_another_generates(world):
    llm, errors = world.llm(max_loras=2, max_cpu_loras=2), []

    def load(name: str) -> None:
        try:
            for _ in range(15):
                llm.add_lora(LoRARequest(name, 1 + NAMES.index(name), world.folders[name], load_inplace=True))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=load, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for _ in range(3):
        world.check(llm, EVERYONE)
    for thread in threads:
        thread.join()
    assert not errors
