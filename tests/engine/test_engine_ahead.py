"""Scheduling ahead: step n + 1 is launched before the tokens of step n are known,
and nobody can tell from the answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.engine.step import StepResult
from minillm.kv_cache.manager import KVCacheManager
from tests.helpers.tiny import save_tiny_llama, seeded

STOP = 7


class ScriptedRunner:
    """Samples what a rule says of the request and the position, when it is waited for."""

    def __init__(self):
        self.launched, self.waited, self.on_launch = [], [], lambda: None

    def launch(self, output):
        self.on_launch()
        self.launched.append(output)
        return Step(self, output)

    def execute(self, output):
        return self.launch(output).wait()


class Step:
    def __init__(self, runner, output):
        self.runner, self.output, self.number = runner, output, len(runner.launched)

    def wait(self):
        self.runner.waited.append(self.number)
        rows = [row for row in self.output.rows if row.samples]
        return StepResult(
            {
                name: [token_of(name, row.start + row.num_tokens)]
                for row in rows
                for name in (row.request_id, *row.fork_ids)
            }
        )


def token_of(request_id: str, position: int) -> int:
    """A number that depends on nothing but the request, the sample and the position."""
    group, _, index = request_id.partition("_")
    return random.Random(f"{group} {index or 0} {position}").randrange(20)


def serve(
    requests: list[Request],
    ahead: bool,
    num_blocks: int = 30,
    budget: int = 12,
    abort_at: dict | None = None,
    mode="recompute",
):
    """Run to the end, integrity checked after each step; what every request and its samples said."""
    kv_cache = KVCacheManager(num_blocks, 4, num_host_blocks=20 if mode == "swap" else 0)
    scheduler = Scheduler(kv_cache, 6, budget, preemption_mode=mode)
    engine = Engine(scheduler=scheduler, runner=ScriptedRunner())
    engine.overlap = ahead
    for request in requests:
        engine.add_request(request)
    said = {}
    while engine.has_unfinished:
        for delta in engine.step():
            said.setdefault(delta.request.request_id, []).append(delta.token_id)
            if (abort_at or {}).get(delta.request.request_id) == len(said[delta.request.request_id]):
                engine.abort(delta.request.group_id)
        scheduler.check_integrity()
        assert engine.num_steps < 2000
    assert kv_cache.pool.num_free == num_blocks and not scheduler.leaving
    return said, engine


def make_requests(seed: int, count: int = 8) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 3]), stop_token_ids=[STOP], presence_penalty=rng.choice([0.0, 0.0, 0.5])
        )
        prompt = [rng.randrange(20) for _ in range(rng.randint(1, 18))]
        requests.append(Request(str(index), prompt, params, max_tokens=rng.randint(1, 20)))
    return requests


@seeded
@given(
    st.integers(0, 10**6),
    st.sampled_from([16, 20, 60]),
    st.sampled_from([3, 12, 100]),
    st.sampled_from(["recompute", "swap"]),
)
def test_ahead_says_what_in_turn_says(seed, num_blocks, budget, mode):
    in_turn, _ = serve(make_requests(seed), False, num_blocks, budget, mode=mode)
    ahead, engine = serve(make_requests(seed), True, num_blocks, budget, mode=mode)
    assert ahead == in_turn
    assert engine.runner.waited == list(range(1, len(engine.runner.launched) + 1)) or not all(
        o.rows for o in engine.runner.launched
    )


@seeded
@given(st.integers(0, 10**6))
def test_aborting_ahead_disturbs_nobody(seed):
    rng = random.Random(seed)
    abort_at = {str(index): rng.randint(1, 5) for index in range(0, 8, 3)}
    alone = list(make_requests(seed))
    in_turn, _ = serve(alone, False)
    ahead, _ = serve(make_requests(seed), True, abort_at=abort_at)
    for request_id, tokens in ahead.items():
        group = request_id.split("_")[0]
        assert tokens == in_turn[request_id] if group not in abort_at else tokens == in_turn[request_id][: len(tokens)]


def one(request_id="a", prompt_len=5, max_tokens=20, **params) -> Request:
    return Request(request_id, list(range(prompt_len)), SamplingParams(**params), max_tokens=max_tokens)


def drive(*requests: Request):
    kv_cache = KVCacheManager(30, 4)
    engine = Engine(scheduler=Scheduler(kv_cache, 6, 100), runner=ScriptedRunner())
    engine.overlap = True
    for request in requests:
        engine.add_request(request)
    return engine


def test_the_next_step_is_launched_before_the_last_one_is_waited_for():
    engine = drive(one())
    assert engine.step() == [] and len(engine.runner.launched) == 1 and engine.runner.waited == []
    deltas = engine.step()
    assert (
        [delta.request.request_id for delta in deltas] == ["a"]
        and len(engine.runner.launched) == 2
        and engine.runner.waited == [1]
    )


def test_nothing_is_computed_beyond_the_last_token_that_max_tokens_allows():
    engine = drive(one(max_tokens=3))
    while engine.has_unfinished:
        engine.step()
    assert [output.num_tokens for output in engine.runner.launched if output.rows] == [5, 1, 1]


def test_a_late_stop_is_dropped_and_its_blocks_wait_for_the_step_in_flight():
    request = one("a", max_tokens=50)
    tokens = [random.Random(f"a 0 {5 + i}").randrange(20) for i in range(50)]
    request.stop_token_ids = frozenset({tokens[4]})
    expected = tokens[: tokens.index(tokens[4]) + 1]
    other = one("b", max_tokens=50)
    engine = drive(request, other)
    said = []
    while not request.is_finished:
        said += [delta.token_id for delta in engine.step() if delta.request is request]
    assert said == expected
    assert any(row.request_id == "a" for row in engine.in_flight[0].rows)  # computed for nothing
    assert "a" in engine.kv_cache.tables and list(engine.scheduler.leaving) == ["a"]
    with pytest.raises(ValueError, match="request_id='a' is in use"):
        engine.add_request(one("a"))
    later = engine.step()
    assert "a" not in engine.kv_cache.tables and not engine.scheduler.leaving
    assert all(delta.request is other for delta in later) and request.output_token_ids == expected


@pytest.mark.parametrize("params", [dict(presence_penalty=0.5), dict(logprobs=1), dict(prompt_logprobs=1), dict(n=2)])
def test_what_needs_the_tokens_on_the_host_is_waited_for(params):
    engine = drive(one(**params))
    assert engine.step() and engine.runner.waited == [1] and engine.in_flight is None


def test_a_step_that_fails_gives_everything_back():
    engine = drive(one("a"), one("b"))
    engine.step()
    engine.step()

    def fail():
        raise RuntimeError("out of memory")

    engine.runner.on_launch = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert not engine.has_unfinished and engine.kv_cache.pool.num_free == 30 and not engine.scheduler.leaving
    engine.runner.on_launch = lambda: None
    engine.add_request(one("a", max_tokens=2))
    count = 0
    while engine.has_unfinished:
        count += len(engine.step())
    assert count == 2


def test_the_real_engine_ahead(tmp_path):
    """Through the runner: tokens that the host has not seen are fed on the device, whatever order the rows take."""
    save_tiny_llama(tmp_path)
    prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 200 for j in range(3 + 5 * i)]} for i in range(6)]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=4 + 5 * i, top_k=20)
        for i, t in enumerate([0, 1, 0, 1, 0.7, 0])
    ]
    params[3] = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=15)
    params[4] = SamplingParams(temperature=1.0, seed=4, frequency_penalty=0.7, logprobs=1, max_tokens=15)
    settings = dict(dtype="float32", num_kv_blocks=24, block_size=4, max_num_batched_tokens=10)
    said = []
    for ahead in (False, True):
        llm = LLM(tmp_path, async_scheduling=ahead, **settings)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        said.append([[sample.token_ids for sample in output.outputs] for output in outputs])
        assert llm.engine.kv_cache.pool.num_free == 24
    assert said[0] == said[1]
    beams = [
        LLM(tmp_path, async_scheduling=ahead, **settings).beam_search("the cat", beam_width=3, max_tokens=6)[0]
        for ahead in (False, True)
    ]
    assert [b.token_ids for b in beams[0].outputs] == [b.token_ids for b in beams[1].outputs]


def test_answers_are_found_again_whoever_made_them(tmp_path):
    """A second turn reuses the first one's answer; scheduled ahead,
    a block must not be named before its last token is known."""
    save_tiny_llama(tmp_path)
    cached = []
    for ahead in (False, True):
        llm = LLM(tmp_path, device="cpu", dtype="float32", block_size=4, async_scheduling=ahead)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        [first] = llm.generate({"prompt_token_ids": list(range(5, 15))}, params, use_tqdm=False)
        turn = first.prompt_token_ids + first.outputs[0].token_ids
        [second] = llm.generate({"prompt_token_ids": turn}, params, use_tqdm=False)
        cached.append(second.metrics.num_cached_tokens)
    assert cached[0] == cached[1] >= 44


def test_only_the_last_token_of_a_request_says_why_it_ended(tmp_path):
    """A step that has to be waited for brings its tokens together with those of the step before it."""
    save_tiny_llama(tmp_path)
    for max_tokens in range(1, 7):
        llm = LLM(tmp_path, device="cpu", dtype="float32", max_num_batched_tokens=8, async_scheduling=True)
        prompts = [{"prompt_token_ids": list(range(5, 8))}, {"prompt_token_ids": list(range(9, 40))}]
        settings = dict(temperature=1.0, seed=1, ignore_eos=True)
        params = [SamplingParams(max_tokens=max_tokens, **settings), SamplingParams(max_tokens=9, n=2, **settings)]
        reasons, step = {}, llm.engine.step

        def watched():
            deltas = step()
            for delta in deltas:
                reasons.setdefault(delta.request.request_id, []).append(delta.finish_reason)
            assert all(not any(said[:-1]) for said in reasons.values()), reasons
            return deltas

        llm.engine.step = watched
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(sample.token_ids) for output in outputs for sample in output.outputs] == [max_tokens, 9, 9]
        assert sorted(said[-1] for said in reasons.values()) == ["length"] * 3


def test_the_switch_says_what_it_allows(tmp_path):
    with pytest.raises(TypeError, match=r"async_scheduling='yes'.*True, False, or None"):
        LLM(tmp_path, async_scheduling="yes")


def test_a_step_that_fails_while_it_is_waited_for_gives_everything_back():
    """The step after it is launched already, and nobody will take that one in."""
    engine = drive(one("a"), one("b"))
    engine.step()

    def fail():
        raise RuntimeError("illegal memory access")

    engine.in_flight[1].wait = fail
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()
    assert not engine.has_unfinished and engine.kv_cache.pool.num_free == 30 and not engine.scheduler.leaving


def test_aborting_all_leaves_no_block_behind():
    request = one("a")
    engine = drive(request)
    engine.step()
    engine.abort(request.request_id)
    assert not engine.has_unfinished and engine.kv_cache.pool.num_free == 30 and not engine.scheduler.leaving
