"""What passes between scheduler and runner is plain data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.book.roads.pickled import passed, pickle_steps
from minillm.engine.input_batch import InputBatch, StepInputs
from minillm.engine.request import Request, RequestStatus
from minillm.engine.step import NewRequest, ScheduledRequest, SchedulerOutput, StepResult
from tests.helpers.small_engine import ask, engine_of
from tests.helpers.tiny import save_tiny_llama


def test_an_object_that_lives_on_one_side_is_refused():
    request = Request("a", [1, 2], SamplingParams(), 4)
    for output in (SchedulerOutput(preempted=[request]), StepResult({"a": [torch.tensor(3)]})):
        with pytest.raises(TypeError, match="a step holds plain data alone"):
            passed(output)


@pytest.mark.parametrize("ahead", [False, True])
def test_grammars_samples_scores_and_drafts_cross_as_data(tmp_path, ahead):
    save_tiny_llama(tmp_path, eos_token_id=1)
    params = [
        SamplingParams(
            temperature=1.0,
            seed=3,
            n=3,
            max_tokens=12,
            structured_outputs={"regex": "[ab]{3}cde[fg]+", "jump_forward": True},
        ),
        SamplingParams(
            temperature=0.0, max_tokens=9, logprobs=2, prompt_logprobs=1, repetition_penalty=1.2, ignore_eos=True
        ),
        SamplingParams(temperature=1.0, max_tokens=9, logit_bias={7: 2.0}, min_tokens=4),
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in ([5, 6, 7, 8, 5, 6], [20, 21, 22], [9] * 12)]
    heard = []
    for pickled in (False, True):
        llm = LLM(
            tmp_path,
            device="cpu",
            dtype="float32",
            speculative_config={"method": "ngram", "prompt_lookup_min": 1},
            async_scheduling=ahead,
        )
        if pickled:
            pickle_steps(llm.engine)
        heard.append(
            [(output.outputs, output.prompt_logprobs) for output in llm.generate(prompts, params, use_tqdm=False)]
        )
        beams = llm.beam_search(prompts[:1], beam_width=3, max_tokens=6)
        heard[-1].append([beam.token_ids for beam in beams[0].outputs])
    assert heard[0] == heard[1]


def test_a_request_moves_along_its_table_only():

    engine = engine_of()
    request = ask("a", [1] * 9, 2)
    engine.add_request(request)
    with pytest.raises(RuntimeError, match="cannot go from running to waiting; allowed: finished, preempted"):
        engine.step()
        request.move(RequestStatus.WAITING)
    while engine.has_unfinished:
        engine.step()
    with pytest.raises(RuntimeError, match="cannot go from finished to running; allowed: none"):
        request.move(RequestStatus.RUNNING)


def new_request(name: str, token_ids: list[int]) -> NewRequest:
    return NewRequest(name, token_ids, len(token_ids), SamplingParams(), 0, 0, frozenset())


def test_a_token_of_a_request_that_was_removed_is_not_given_to_who_has_its_slot_now():
    batch = InputBatch(4, "cpu")
    gone, stays = (batch.add(new_request(name, [1, 2, 3])) for name in "ab")
    slots, num_removed = np.array([gone.slot, stays.slot]), batch.num_removed
    batch.remove("a")
    late = batch.add(new_request("c", [5, 6]))
    assert late.slot == slots[0]
    batch.extend([gone, stays], slots, [7, 8], num_removed)
    assert batch.num_known[late.slot] == 2 and batch.last_token[late.slot] == 6
    assert batch.num_known[stays.slot] == 4 and batch.last_token[stays.slot] == 8


def test_a_parent_that_writes_into_a_block_it_shares_with_its_fork_gets_a_copy():
    engine = engine_of(max_num_seqs=4)
    parent = ask("a", [1] * 5, 6)
    engine.add_request(parent)
    engine.step(), engine.step()
    manager = engine.kv_cache
    manager.fork(parent, ask("b", [1] * 5))
    assert manager.allocate_slots(parent, 1) and len(manager.moves.copies) == 1


def test_after_a_step_that_failed_the_runner_forgets_the_requests_in_it():
    engine = engine_of()
    engine.add_request(ask("a", [1] * 9))
    engine.step()
    execute, engine.runner.execute = engine.runner.execute, lambda output: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.runner.execute = execute
    assert engine.runner.requests
    engine.step()
    assert not engine.runner.requests


def test_a_request_that_is_announced_again_has_its_new_text_in_the_next_step():
    """The step names the same requests as the one before."""
    batch = InputBatch(4, "cpu")
    row = ScheduledRequest("a", 3, 1, [1], 1)
    batch.add(new_request("a", [1, 2, 3, 4]))
    batch.inputs([row])
    batch.add(new_request("a", [1, 2, 3, 9]))
    step = batch.inputs([row._replace(block_ids=())])
    assert step.states == [batch["a"]] and step.token_ids.tolist() == [9]


def test_a_step_that_is_computed_twice_draws_the_same_tokens(tmp_path):
    """The second time it does not begin where the first one ended."""
    save_tiny_llama(tmp_path)
    engine = LLM(tmp_path, dtype="float32", device="cpu", max_model_len=64, num_kv_blocks=20).engine
    params = SamplingParams(temperature=5.0, seed=3, max_tokens=20, ignore_eos=True)
    engine.add_request(Request("a", [5, 6, 7], params, 20, seed=3))
    engine.step(), engine.step()
    output = engine._schedule()
    once, twice = (engine.executor.execute(output).token_ids for _ in range(2))
    assert once == twice


def test_full_blocks_that_come_back_without_a_hash_are_a_prefix_after_that_very_step():
    """A swapped request comes back for a token that fills no block; its hashes were forgotten while it was away."""
    engine = engine_of(block_size=4, host=8, preemption_mode="swap")
    request = ask("a", [1] * 9, max_tokens=6)
    engine.add_request(request)
    engine.step()
    engine.scheduler.preempt(request)
    engine.kv_cache.pool.evict_all()
    engine.step()
    assert request.num_preemptions == 1 and request.num_computed_tokens == 10
    assert engine.kv_cache.get_computed_blocks(ask("b", [1] * 9)).found == {"device": 8, "host": 0, "disk": 0}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("settings", [{}, {"preemption_mode": "swap"}, {"speculative_config": {"method": "ngram"}}])
def test_the_inputs_of_one_token_further_are_those_that_a_step_makes_anew(tmp_path, monkeypatch, settings, ahead):
    """Arrivals, ends, preemptions, forks, drafts and the tokens that only the device knows come between the steps."""
    save_tiny_llama(tmp_path, eos_token_id=1)
    compared, taken = [0], [0]
    inputs, further = InputBatch.inputs, InputBatch._further

    def counted(batch, *args):
        step = further(batch, *args)
        taken[0] += step is not None
        return step

    def both(batch, rows):
        step = inputs(batch, rows)
        left, last = batch._num_further, getattr(batch, "_last", None)
        batch._num_further = 0
        anew = inputs(batch, rows)
        batch._num_further, batch._last = left, last
        for name in StepInputs.__dataclass_fields__:
            one, other = getattr(step, name), getattr(anew, name)
            same = np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
            assert same, f"{name} is {one!r}, made anew {other!r}"
        compared[0] += 1
        return step

    monkeypatch.setattr(InputBatch, "_further", counted)
    monkeypatch.setattr(InputBatch, "inputs", both)
    options = dict(block_size=4, num_kv_blocks=26, max_model_len=64, host_kv_bytes=2**20, async_scheduling=ahead)
    llm = LLM(tmp_path, device="cpu", dtype="float32", **options, **settings)
    draw = np.random.default_rng(0)
    sinks = []
    for turn in range(120):
        if turn < 60 and draw.random() < 0.4:
            prompt = draw.integers(2, 60, draw.integers(1, 20)).tolist()
            params = SamplingParams(
                temperature=1.0, seed=turn, n=1 + int(draw.random() < 0.2), max_tokens=int(draw.integers(1, 16))
            )
            sinks.append(llm.submit({"prompt_token_ids": prompt}, params))
        if llm.engine.has_unfinished:
            llm.step()
    while llm.engine.has_unfinished:
        llm.step()
    assert all(sink.is_finished for sink in sinks) and len(sinks) > 15
    assert compared[0] > 60 and taken[0] > 10
