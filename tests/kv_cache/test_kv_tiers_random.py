"""Random requests through device, host and disk: every slot that is read holds what was computed."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minillm import SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.engine.simulator import VirtualClock
from minillm.kv_cache.manager import KVCacheManager
from tests.helpers.shelf import Shelf, TieredMemory
from tests.helpers.tiny import examples


class Tiered(RuleBasedStateMachine):
    """Requests of a few texts through all tiers, in whatever order: every slot that is read holds what was computed."""

    @initialize(
        num_blocks=st.integers(4, 9), host=st.integers(0, 6), disk=st.booleans(),
        window=st.sampled_from([None, None, 5]), mode=st.sampled_from(["recompute", "swap"]), budget=st.integers(2, 20),
        at_once=st.booleans(),
    )  # fmt: skip
    def start(self, num_blocks, host, disk, window, mode, budget, at_once):
        self.shelf = Shelf(at_once) if disk and host else None
        self.kv_cache = KVCacheManager(num_blocks, 2, True, window, host, disk=self.shelf)
        self.engine = Engine(
            scheduler=Scheduler(self.kv_cache, 3, budget, preemption_mode=mode),
            runner=TieredMemory(2, self.shelf, window=window),
            clock=VirtualClock(),
        )
        self.count = 0

    @rule(text=st.integers(0, 2), length=st.integers(4, 9), max_tokens=st.integers(1, 3), n=st.sampled_from([1, 1, 2]))
    def add(self, text, length, max_tokens, n):
        if -(-(length + max_tokens) // 2) <= self.kv_cache.pool.num_blocks and len(self.engine.scheduler.requests) < 6:
            params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
            self.engine.add_request(
                Request(str(self.count), [text] * length, params, max_tokens, arrival_time=float(self.count))
            )
            self.count += 1

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()
            self.kv_cache.check_integrity()

    @rule(data=st.data())
    def preempt(self, data):
        if running := self.engine.scheduler.running:
            self.engine.scheduler.preempt(data.draw(st.sampled_from(running)))

    @rule(data=st.data())
    def abort(self, data):
        if alive := list(self.engine.scheduler.requests.values()):
            self.engine.abort(data.draw(st.sampled_from(alive)).request_id)

    @rule()
    def evict(self):
        self.kv_cache.pool.evict_all()

    @rule()
    def land(self):
        if self.shelf:
            self.shelf.land()

    @rule(data=st.data())
    def lose(self, data):
        if self.shelf and self.shelf.files:
            self.shelf.files.pop(data.draw(st.sampled_from(sorted(self.shelf.files))))

    @invariant()
    def whole(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(400):
            self.engine.step()
            if not self.engine.has_unfinished:
                break
        assert not self.engine.has_unfinished
        host = self.kv_cache.host
        assert self.kv_cache.pool.num_free == self.kv_cache.pool.num_blocks and host.num_free == host.num_blocks
        assert not self.kv_cache.records


TestTiered = Tiered.TestCase
TestTiered.settings = settings(examples(100), stateful_step_count=40)
