"""Randomised operations on scheduler and cache: no leak, no double free, no wrong page, never over budget,
nobody starves."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minillm import SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.policies import make_policy
from minillm.engine.preemptive import PreemptiveScheduler
from minillm.engine.request import Request, RequestStatus
from minillm.engine.scheduler import Scheduler
from minillm.engine.simulator import VirtualClock
from minillm.kv_cache.manager import KVCacheManager
from tests.helpers.block_memory import BlockMemory
from tests.helpers.tiny import examples

POLICIES = ("fcfs", "priority", "preemptive_priority", "sjf", "fair", "lpm")


def build(
    policy="fcfs",
    num_blocks=12,
    block_size=4,
    host=0,
    window=None,
    caching=True,
    chunked=True,
    seqs=4,
    budget=9,
    mode="recompute",
):
    kv_cache = KVCacheManager(num_blocks, block_size, caching, window, host)
    chosen = make_policy(policy, lambda request: kv_cache.get_computed_blocks(request).num_tokens)
    kind = PreemptiveScheduler if policy == "preemptive_priority" else Scheduler
    scheduler = kind(kv_cache, seqs, budget, chosen, chunked, mode)
    runner = BlockMemory(block_size, window, max_tokens=budget, max_rows=seqs)
    return Engine(scheduler=scheduler, runner=runner, clock=VirtualClock())


class Operations(RuleBasedStateMachine):
    """Whatever order they come in."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        num_blocks=st.integers(6, 20),
        block_size=st.sampled_from([1, 3, 4]),
        host=st.sampled_from([0, 3, 30]),
        window=st.sampled_from([None, None, 1, 5, 8]),
        caching=st.booleans(),
        chunked=st.booleans(),
        seqs=st.integers(1, 5),
        budget=st.integers(1, 40),
        mode=st.sampled_from(["recompute", "swap"]),
    )
    def start(self, budget, chunked, **settings):
        self.engine = build(budget=budget if chunked else max(budget, 24), chunked=chunked, **settings)
        self.added: list[Request] = []
        self.num_split = 0

    @property
    def alive(self) -> list[Request]:
        return list(self.engine.scheduler.requests.values())

    @rule(
        shared=st.integers(0, 2), length=st.integers(1, 14), max_tokens=st.integers(1, 10),
        n=st.sampled_from([1, 1, 1, 2, 3]), priority=st.integers(0, 3), user=st.sampled_from("ab"),
        salt=st.sampled_from([None, None, "s"]), logprobs=st.sampled_from([None, None, 0]),
    )  # fmt: skip
    def add(self, shared, length, max_tokens, n, priority, user, salt, logprobs):
        prompt = [shared] * length  # a few texts, so that prefixes are shared
        params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True, prompt_logprobs=logprobs)
        request = Request(
            str(len(self.added)), prompt, params, max_tokens, arrival_time=float(len(self.added)),
            priority=priority, user=user, cache_salt=salt,
        )  # fmt: skip
        scheduler = self.engine.scheduler
        most = length + max_tokens
        fits = (
            scheduler.kv_cache.blocks_needed(most, min(most, scheduler.max_num_batched_tokens))
            <= scheduler.kv_cache.pool.num_blocks
        )
        fits &= scheduler.enable_chunked_prefill or most <= scheduler.max_num_batched_tokens
        if fits:
            self.engine.add_request(request)
            self.added.append(request)
        else:
            with pytest.raises(ValueError, match=r"blocks|max_num_batched_tokens"):
                self.engine.add_request(request)

    @rule()
    def step(self):
        for delta in self.engine.step():
            assert len(delta.request.output_token_ids) <= delta.request.max_tokens

    @rule(data=st.data())
    def abort(self, data):
        if self.alive:
            request = data.draw(st.sampled_from(self.alive))
            self.engine.abort(request.request_id)
            assert request.is_finished and request.request_id not in self.engine.kv_cache.tables

    @rule(data=st.data())
    def preempt(self, data):
        if running := self.engine.scheduler.running:
            self.engine.scheduler.preempt(data.draw(st.sampled_from(running)))

    @rule(data=st.data())
    def fork(self, data):
        """A sample splits off somewhere in the middle, as beams do."""
        if candidates := [r for r in self.alive if r.output_token_ids and not r.num_forks and len(self.alive) < 8]:
            parent = data.draw(st.sampled_from(candidates))
            self.num_split += 1
            self.engine.scheduler.fork(parent, 1000 + self.num_split)

    @rule()
    def evict(self):
        self.engine.kv_cache.pool.evict_all()

    @invariant()
    def every_block_is_accounted_for(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self):
        """Whatever happened, all that is left finishes, and the pool is whole again."""
        if not hasattr(self, "engine"):
            return
        work = sum(r.num_tokens + r.params.n * (len(r.prompt_token_ids) + r.max_tokens) for r in self.alive)
        for _ in range(50 + 20 * work):
            if not self.engine.has_unfinished:
                break
            self.engine.step()
        assert not self.engine.has_unfinished, [self.alive, self.engine.scheduler.running]
        for request in self.added:
            assert request.finish_reason == "abort" or len(request.output_token_ids) == request.max_tokens
        pool = self.engine.kv_cache.pool
        assert pool.num_free == pool.num_blocks and not self.engine.kv_cache.records
        assert self.engine.kv_cache.host.num_free == self.engine.kv_cache.host.num_blocks
        assert list(self.engine.scheduler.waiting) == []


TestOperations = Operations.TestCase
TestOperations.settings = settings(examples(150), stateful_step_count=40)


@pytest.mark.parametrize("policy", [name for name in POLICIES if "priority" not in name])
def test_nobody_starves(policy):
    """One long request, and short ones of other people that never stop coming and would always be preferred."""
    engine = build(policy, num_blocks=40, seqs=2, budget=20)
    shared = [1] * 8

    def request(name, prompt, max_tokens, user):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(name, prompt, params, max_tokens, arrival_time=engine.clock(), user=user)

    waiting = deque(request(f"warm{i}", [*shared, 2], 4, "others") for i in range(6))
    for one in waiting:
        engine.add_request(one)
    long = request("long", list(range(10, 40)), 30, "mine")
    engine.add_request(long)
    for step in range(3000):
        engine.clock.advance(0.1)
        if step % 2 == 0:
            engine.add_request(request(f"short{step}", [*shared, step % 50], 4, "others"))
        engine.step()
        if long.is_finished:
            break
    assert long.finish_reason == "length" and engine.has_unfinished  # they still come; it was served among them
    engine.scheduler.check_integrity()


def test_strict_priority_lets_the_least_wait_for_ever():
    engine = build("priority", num_blocks=40, seqs=1)
    for name, priority in [("low", 9), *((f"high{i}", 0) for i in range(5))]:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        engine.add_request(Request(name, [1, 2], params, 3, arrival_time=0.0, priority=priority))
    order = []
    while engine.has_unfinished:
        order += [delta.request.request_id for delta in engine.step() if delta.finish_reason]
    assert order[-1] == "low"


def started(policy, *asked, **limits):
    """An engine in which requests of these (name, priority, prompt length) came one after the other, a step each."""
    engine = build(policy, **limits)
    for number, (name, priority, length) in enumerate(asked):
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        prompt = [20 * number + i for i in range(length)]
        engine.add_request(Request(name, prompt, params, 8, arrival_time=float(number), priority=priority))
        engine.step()
    return engine


def running(engine):
    return sorted(request.request_id for request in engine.scheduler.running)


FULL = [("a", 1, 2), ("b", 2, 2), ("c", 2, 2)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_an_urgent_request_takes_the_place_of_the_one_that_matters_least(mode):
    limits = {"num_blocks": 40, "seqs": 3, "mode": mode, "host": 9 if mode == "swap" else 0}
    assert running(started("priority", *FULL, ("urgent", 0, 2), **limits)) == ["a", "b", "c"]
    engine = started("preemptive_priority", *FULL, ("urgent", 0, 2), **limits)
    assert running(engine) == ["a", "b", "urgent"]  # of two equals the one that came last had to go
    order = []
    while engine.has_unfinished:
        order += [delta.request.request_id for delta in engine.step() if delta.finish_reason]
        engine.scheduler.check_integrity()
    assert order == ["a", "b", "urgent", "c"]


def test_equal_priorities_do_not_preempt_each_other():
    engine = started("preemptive_priority", *FULL, ("late", 2, 2), num_blocks=40, seqs=3)
    assert running(engine) == ["a", "b", "c"]


def test_no_more_are_preempted_than_the_urgent_request_needs_blocks_of():
    """Twelve blocks of four tokens: each of the three has two, and six are free."""
    asked = [(name, 2, 6) for name in "abc"]
    limits = {"num_blocks": 12, "seqs": 8, "budget": 40}
    assert running(started("preemptive_priority", *asked, ("urgent", 0, 17), **limits)) == ["a", "b", "c", "urgent"]
    assert running(started("preemptive_priority", *asked, ("urgent", 0, 25), **limits)) == ["a", "b", "urgent"]
    assert running(started("preemptive_priority", *asked, ("urgent", 0, 33), **limits)) == ["a", "urgent"]
    asked[0] = ("a", 0, 10)  # as urgent as the fourth, with three blocks: the two others have too few for it
    assert running(started("preemptive_priority", *asked, ("urgent", 0, 37), **limits)) == ["a", "b", "c"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_thousands_of_requests_through_a_cache_for_ten(policy, mode):
    engine = build(policy, num_blocks=30, block_size=4, seqs=16, budget=64, host=10 if mode == "swap" else 0, mode=mode)
    requests = []
    for i in range(2000):
        params = SamplingParams(max_tokens=1 + i % 7, ignore_eos=True)
        prompt = [i % 5] * (i % 6) + [i % 50] * (1 + i % 4)
        requests.append(
            Request(str(i), prompt, params, params.max_tokens, arrival_time=float(i), user=str(i % 3), priority=i % 2)
        )
        engine.add_request(requests[-1])
    while engine.has_unfinished:
        engine.step()
    assert all(len(r.output_token_ids) == r.max_tokens and r.status is RequestStatus.FINISHED for r in requests)
    assert sum(r.num_preemptions for r in requests) > 0
    assert engine.kv_cache.pool.num_free == 30
