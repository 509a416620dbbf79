"""What passes between scheduler and runner is plain data."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.book.roads.pickled import passed, pickle_steps
from minillm.engine.request import Request, RequestStatus
from minillm.engine.step import SchedulerOutput, StepResult
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
    from tests.helpers.small_engine import ask, engine_of

    engine = engine_of()
    request = ask("a", [1] * 9, 2)
    engine.add_request(request)
    with pytest.raises(RuntimeError, match="cannot go from running to waiting; allowed: finished, preempted"):
        engine.step()
        engine.scheduler.move(request, RequestStatus.WAITING)
    while engine.has_unfinished:
        engine.step()
    with pytest.raises(RuntimeError, match="cannot go from finished to running; allowed: none"):
        engine.scheduler.move(request, RequestStatus.RUNNING)
