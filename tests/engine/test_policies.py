"""Who goes first: each policy by hand, and the scheduler's promises that no random run would miss."""

from __future__ import annotations

import pytest

from minillm import SamplingParams
from minillm.engine.config import EngineConfig
from minillm.engine.engine import Engine
from minillm.engine.policies import FCFS, Fair, LongestPrefixMatch, cached_tokens_of, make_policy, priority, sjf
from minillm.engine.request import Request, RequestStatus
from minillm.engine.scheduler import Scheduler
from minillm.engine.simulator import CostModel, SimulatedRunner, VirtualClock
from minillm.engine.step import StepResult
from minillm.kv_cache.manager import KVCacheManager
from tests.helpers.block_memory import BlockMemory


def ask(name: str, prompt=4, max_tokens=4, at=0.0, **who) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, list(range(prompt)), params, max_tokens, arrival_time=at, **who)


def order_of(policy, *requests: Request) -> list[str]:
    for request in requests:
        policy.add(request)
    names = []
    while (request := policy.peek()) is not None:
        assert policy.pop() is request
        names.append(request.request_id)
    return names


def test_fcfs_puts_preempted_requests_in_front():
    policy = FCFS()
    policy.add(ask("new"))
    policy.put_back(ask("preempted"))
    assert order_of(policy) == ["preempted", "new"]


def test_priority_takes_the_lowest_number_and_ties_by_arrival():
    assert order_of(priority(), ask("a", priority=2), ask("b", at=2.0, priority=1), ask("c", at=1.0, priority=1)) == [
        "c",
        "b",
        "a",
    ]


def test_sjf_takes_the_shortest_until_waiting_has_paid_for_the_difference():
    short_late = ask("short", prompt=10, max_tokens=10, at=3.0)
    long_early = ask("long", prompt=100, max_tokens=60, at=0.0)
    assert order_of(sjf(ageing=0), long_early, short_late) == ["short", "long"]
    assert order_of(sjf(ageing=46), short_late, long_early) == ["short", "long"]  # 140 tokens longer, 138 earned
    assert order_of(sjf(ageing=47), short_late, long_early) == ["long", "short"]  # 141 earned


def test_fair_serves_whoever_got_least():
    policy = Fair()
    requests = {name: ask(name, user=name[0]) for name in ("a1", "a2", "b1", "b2")}
    for request in requests.values():
        policy.add(request)
    assert policy.peek().request_id == "a1"
    policy.pop()
    policy.charge(requests["a1"], 10)
    assert policy.peek().request_id == "b1"
    policy.pop()
    policy.charge(requests["b1"], 11)
    assert policy.peek().request_id == "a2"
    running = [requests["b1"], requests["a1"]]
    policy.order(running)
    assert [request.request_id for request in running] == ["a1", "b1"]  # b is preempted first


def test_fair_lifts_the_counter_of_a_user_who_returns():
    policy = Fair()
    first = ask("a", user="a")
    policy.add(first)
    policy.charge(first, 5)
    policy.leave(first)  # a has gone, with 5 on the account
    worker = ask("b", user="b")
    policy.add(worker)
    policy.charge(worker, 1000)
    policy.add(ask("a again", user="a"))
    assert policy.counters["a"] == 5 + 1000  # absence saved nothing up
    policy.add(ask("c", user="c"))
    assert policy.counters["c"] == 5 + 1000


def test_fair_lifts_to_the_counter_of_who_left_last_when_nobody_is_there():
    policy = Fair()
    regular = ask("a", user="a")
    policy.add(regular)
    policy.charge(regular, 100_000)
    policy.leave(regular)
    policy.add(ask("b", user="b"))  # after an idle moment
    policy.add(ask("a again", user="a"))
    assert policy.counters == {"a": 100_000, "b": 100_000}  # or a would wait until b had had as much


def test_fair_keeps_no_account_of_those_who_left():
    policy = Fair()
    kv_cache = KVCacheManager(20, 4)
    scheduler = Scheduler(kv_cache, policy=policy)
    for index in range(6):
        scheduler.add(ask(str(index), user=f"user {index}"))
    run(scheduler, BlockMemory(4))
    assert policy.present == {} and policy.queues == {}


def test_recomputed_tokens_are_never_charged():
    policy = Fair()
    scheduler = Scheduler(KVCacheManager(30, 4), policy=policy)
    request = ask("a", prompt=10, max_tokens=5, user="a")
    scheduler.add(request)
    runner = BlockMemory(4)
    for step in range(4):
        output = runner.next_step(scheduler)
        scheduler.update(output, runner.execute(output))
        if step == 1:
            scheduler.preempt(request)
            scheduler.kv_cache.pool.evict_all()  # all of it has to be computed again
    run(scheduler, runner)
    assert request.num_preemptions == 1 and policy.counters["a"] == 10 + 4  # the last token needs no step


def test_longest_prefix_match_prefers_what_is_cached_until_others_waited_long():
    cached = {"old": 0, "hit": 64, "more": 96}
    policy = LongestPrefixMatch(lambda request: cached[request.request_id], ageing=10)
    assert order_of(policy, ask("old", at=0.0), ask("hit", at=1.0), ask("more", at=2.0)) == ["more", "hit", "old"]
    late = LongestPrefixMatch(lambda request: cached[request.request_id], ageing=10)
    assert order_of(late, ask("old", at=0.0), ask("hit", at=7.0)) == ["old", "hit"]


class PlainCache(KVCacheManager):
    """A cache of one's own, after the protocol that the scheduler asks for."""

    def get_computed_blocks(self, request):
        return super().get_computed_blocks(request)


@pytest.mark.parametrize("kind", [KVCacheManager, PlainCache])
def test_lpm_asks_any_cache_that_the_scheduler_can_use(kind):
    clock = VirtualClock()
    engine = Engine(
        kv_cache=kind(num_blocks=64, block_size=4),
        runner=SimulatedRunner(CostModel(1.0, 0.0, 0.0), clock),
        config=EngineConfig("", scheduling_policy="lpm", max_num_seqs=1),
        clock=clock,
    )
    served, prompts = [], {"first": range(16), "other": range(50, 66), "again": range(16)}
    for name, prompt in prompts.items():
        engine.add_request(Request(name, list(prompt), SamplingParams(max_tokens=1), 1, arrival_time=0.0))
    while engine.has_unfinished:
        served += [delta.request.request_id for delta in engine.step()]
    assert served == ["first", "again", "other"]
    assert cached_tokens_of(engine.kv_cache)(Request("x", list(range(50, 70)), SamplingParams(), 1)) == 16


def test_finished_requests_are_skipped_wherever_they_wait():
    for name in ("fcfs", "priority", "preemptive_priority", "sjf", "fair", "lpm"):
        policy = make_policy(name, lambda request: 0)
        gone, here = ask("gone"), ask("here", at=1.0)
        policy.add(gone), policy.add(here)
        gone.status = RequestStatus.FINISHED
        assert [request.request_id for request in policy] == ["here"] and policy.peek() is here
    with pytest.raises(ValueError, match=r"scheduling_policy='lifo' is unknown; choose one of fcfs.*lpm"):
        make_policy("lifo", lambda request: 0)


# What the scheduler promises


def run(scheduler: Scheduler, runner) -> None:
    while scheduler.requests:
        output = runner.next_step(scheduler)
        scheduler.update(output, runner.execute(output))
        scheduler.check_integrity()


def test_nothing_waiting_is_admitted_while_anything_is_preempted():
    kv_cache = KVCacheManager(9, 2, enable_prefix_caching=False)
    scheduler = Scheduler(kv_cache, max_num_batched_tokens=5)  # a piece of the victim would fit at once
    for name, prompt in (("a", 6), ("b", 6), ("c", 5)):
        scheduler.add(ask(name, prompt=prompt, max_tokens=8))
    scheduler.add(ask("tiny", prompt=1, max_tokens=1))
    runner, preempted = BlockMemory(2), []
    while scheduler.requests:
        before = {request.request_id for request in scheduler.running}
        output = runner.next_step(scheduler)
        if output.preempted:
            preempted += output.preempted
            served = {row.request_id for row in output.rows}
            assert served <= before - set(output.preempted)
        for request_id in output.preempted:
            assert scheduler.requests[request_id].num_computed_tokens == 0 and request_id not in kv_cache.tables
        scheduler.update(output, runner.execute(output))
    assert preempted


def test_what_was_aborted_while_its_step_ran_gets_nothing_of_it():
    scheduler = Scheduler(KVCacheManager(10, 4))
    aborted, other = ask("aborted"), ask("other")
    scheduler.add(aborted), scheduler.add(other)
    output = scheduler.schedule()
    scheduler.finish(aborted, "abort")
    added = scheduler.update(output, StepResult({"aborted": [1], "other": [2]}))
    assert [(request.request_id, token_id) for request, token_id in added] == [("other", 2)]
    assert aborted.output_token_ids == [] and aborted.num_computed_tokens == 0
    scheduler.check_integrity()


def test_a_prompt_that_may_not_be_cut_waits_for_a_step_with_room():
    scheduler = Scheduler(
        KVCacheManager(50, 4, enable_prefix_caching=False), max_num_batched_tokens=12, enable_chunked_prefill=False
    )
    with pytest.raises(ValueError, match="up to 13 tokens exceed max_num_batched_tokens=12"):
        scheduler.add(ask("too long", prompt=9, max_tokens=4))
    scheduler.add(ask("a", prompt=8, max_tokens=3)), scheduler.add(ask("b", prompt=8, max_tokens=3))
    steps = []
    runner = BlockMemory(4)
    while scheduler.requests:
        output = runner.next_step(scheduler)
        steps.append([(row.request_id, row.num_tokens) for row in output.rows])
        scheduler.update(output, runner.execute(output))
    assert steps[:2] == [[("a", 8)], [("a", 1), ("b", 8)]]
