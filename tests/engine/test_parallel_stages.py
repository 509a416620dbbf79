"""A pipeline of any depth: 5 layers on 3, 4 and 5 stages generate the tokens of one process, with a step in each."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace

import pytest

from minillm import LLM, SamplingParams
from minillm.engine.distributed.engine import PipelineScheduler
from minillm.engine.distributed.runner import ParallelRunner
from minillm.engine.request import Request
from minillm.engine.runner import ModelRunner
from minillm.engine.step import ScheduledRequest, SchedulerOutput
from minillm.kv_cache.manager import KVCacheManager
from minillm.model.checkpoint import load_config
from minillm.parallel.communicator import Traffic
from minillm.parallel.layout import Layout, check_layout
from minillm.parallel.traffic import step_traffic
from tests.helpers.tiny import save_tiny_llama

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9] * 4, [20, 21], [33] * 9, [40, 41, 42])]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, top_k=7, min_p=0.02, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, top_p=0.8, logprobs=2, repetition_penalty=1.2, max_tokens=8),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep")
    save_tiny_llama(folder, num_hidden_layers=5, tie_word_embeddings=True)
    return folder


def settings(model, stages: int = 1, tensor_parallel: int = 1, **more) -> dict:
    sizes = dict(pipeline_parallel_size=stages, tensor_parallel_size=tensor_parallel)
    return dict(model=model, device="cpu", dtype="float32", max_model_len=64, num_kv_blocks=60) | sizes | more


def tokens(llm: LLM, params=PARAMS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    return tokens(LLM(**settings(model)))


@pytest.mark.parametrize("stages, tensor_parallel", [(3, 1), (4, 1), (5, 1), (3, 2)])
def test_uneven_stages_generate_the_tokens_of_one_process(stages, tensor_parallel, model, expected):
    """And send what the formula says; as many steps are under way as there are stages, and no request is in two."""
    with LLM(**settings(model, stages, tensor_parallel)) as llm:
        most, launch = 0, llm.engine.executor.launch

        def watched(output):
            nonlocal most
            under_way = [{row.request_id for row in other.rows if row.samples} for other, _ in llm.engine.flying]
            assert all(ids.isdisjoint(row.request_id for row in output.rows) for ids in under_way)
            most = max(most, 1 + len(under_way))
            return launch(output)

        llm.engine.executor.launch = watched
        assert tokens(llm) == expected
        assert most == min(stages, len(PROMPTS))
        llm.reset_prefix_cache()
        llm.engine.executor.collective("take_traffic")
        llm.generate([{"prompt_token_ids": [*range(50, 57)]}], PARAMS[0].clone(), use_tqdm=False)
        counted: list[Traffic] = llm.engine.executor.collective("take_traffic")
    for rank, of_rank in enumerate(counted):
        wanted = Traffic()
        for num_tokens in (7, *[1] * 7):
            step = step_traffic(load_config(model), tensor_parallel, stages, num_tokens, 1, rank=rank)
            wanted.messages += step.messages
            wanted.bytes += step.bytes
        assert of_rank.as_dict() == wanted.as_dict(), (stages, tensor_parallel, rank)


FEATURES = {
    "chunks of 4 tokens, few blocks, swapped": dict(
        max_num_batched_tokens=4, block_size=4, num_kv_blocks=16, preemption_mode="swap", host_kv_bytes=10**6
    ),
    "n-grams": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3}),
    "low-bit": dict(quantization={"weights": "int4", "group_size": 8}, kv_cache_dtype="int8"),
    "preemptive": dict(scheduling_policy="preemptive_priority", max_num_seqs=2),
}


@pytest.mark.parametrize("name", FEATURES)
def test_what_two_stages_serve_three_do_too(name, model):
    alone = LLM(**settings(model, **FEATURES[name]))
    with LLM(**settings(model, 3, **FEATURES[name])) as llm:
        assert tokens(llm) == tokens(alone)


def be_late(worker) -> None:
    """Let the first stage look for its next call only when the engine has sent it."""
    if worker.layout.is_first:
        launch = worker.runner.launch

        def late(output):
            launched = launch(output)
            time.sleep(0.03)
            return launched

        worker.runner.launch = late


ANSWER = {
    "type": "object",
    "properties": {"kind": {"enum": ["ab", "cd"]}, "right": {"type": "boolean"}},
    "required": ["kind", "right"],
    "additionalProperties": False,
}


def test_a_first_stage_that_is_late_knows_all_tokens_of_the_last_step(model):
    """The engine has the tokens of a step from the last stage, and sends the next step before the first one has read
    them. Where a grammar forced several, the next row began behind tokens that the first stage did not know."""
    params = SamplingParams(temperature=0.0, max_tokens=30, structured_outputs={"json": ANSWER, "jump_forward": True})
    texts = lambda llm: llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(**settings(model, 2)) as llm:
        llm.collective_rpc(be_late)
        assert texts(llm) == texts(LLM(**settings(model)))


def test_more_stages_than_layers_are_refused_before_a_process_starts(model, monkeypatch):
    monkeypatch.setattr("minillm.engine.distributed.model.start_workers", None)
    said = "pipeline_parallel_size=6 exceeds this model's num_hidden_layers=5; use at most 5"
    with pytest.raises(ValueError, match=said):
        LLM(**settings(model, 6))
    check_layout(load_config(model), 1, 5)
    layers = [len(Layout(1, 3, stage).layers(5)) for stage in range(3)]
    assert layers == [2, 2, 1]


@pytest.mark.parametrize(
    "num_requests, stages, shares",
    [(4, 3, [2, 1, 1]), (5, 3, [2, 2, 1]), (6, 4, [2, 2, 1, 1]), (2, 3, [1, 1, 0]), (5, 2, [3, 2])],
)
def test_requests_are_shared_among_all_stages(num_requests, stages, shares):
    """4 requests on 3 stages as 2 and 2 would leave a stage without work for ever."""
    scheduler = PipelineScheduler(stages, KVCacheManager(64, 4))
    scheduler.flying = flying = deque()
    for number in range(num_requests):
        scheduler.add(Request(f"r{number}", [5, 6, 7], SamplingParams(), 4))
    for _ in shares:
        output = scheduler.schedule()
        scheduler.advance(output)
        flying.append((output, None))
    assert [len(output.rows) for output, _ in flying] == shares


def test_the_chunks_of_a_prompt_wait_for_no_token_of_other_requests(monkeypatch):
    """Chunk p is in all three steps; beside it another request draws a token in each."""
    waited = []
    step = lambda name: SimpleNamespace(wait=lambda: waited.append(name), is_plain=True)
    launched = iter("abcd")
    monkeypatch.setattr(ModelRunner, "launch", lambda self, output: step(next(launched)))
    runner = ParallelRunner.__new__(ParallelRunner)
    runner.unread, runner.sampler = deque(), SimpleNamespace(arrival=SimpleNamespace(wait=lambda: None))
    row = lambda name, samples: ScheduledRequest(name, 0, 1, [], samples, (), 0, ())
    for number in range(3):
        runner.launch(SchedulerOutput(rows=[row(f"d{number}", 1), row("p", 0)]))
    assert waited == []
    runner.launch(SchedulerOutput(rows=[row("d0", 1)]))
    assert waited == ["a"]


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_step_waits_for_the_last_one_where_its_tokens_are_not_one_each(is_plain, monkeypatch):
    waited = []
    launched = SimpleNamespace(wait=lambda: waited.append(1), is_plain=is_plain)
    monkeypatch.setattr(ModelRunner, "launch", lambda self, output: launched)
    runner = ParallelRunner.__new__(ParallelRunner)
    runner.unread, runner.sampler = deque(), SimpleNamespace(arrival=SimpleNamespace(wait=lambda: None))
    for name in "aba":  # the second step has nothing of the first, and the third nothing of the second
        runner.launch(SchedulerOutput(rows=[ScheduledRequest(name, 0, 1, [], 1, (), 0, ())]))
    assert waited == [1]
    runner.launch(SchedulerOutput(rows=[ScheduledRequest("a", 1, 1, [], 1, (), 0, ())]))
    assert waited == ([1] if is_plain else [1, 1, 1])
