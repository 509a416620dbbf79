"""Events of the prefix cache, applied elsewhere, give the same blocks."""

from __future__ import annotations

import random

from minillm.kv_cache.events import CacheEvents
from tests.helpers.small_engine import ask, engine_of


def test_a_copy_that_follows_the_events_has_the_same_blocks_under_random_requests():
    rng = random.Random(3)
    for host in (0, 6):
        engine = engine_of(num_blocks=12, block_size=2, budget=16, host=host)
        events, copy = CacheEvents(engine.kv_cache), set()
        seen = {"stored": 0, "removed": 0}
        for number in range(150):
            head = [rng.randrange(3)] * rng.randrange(1, 9)
            engine.add_request(ask(str(number), [*head, rng.randrange(9)], max_tokens=rng.randrange(1, 6)))
            for _ in range(rng.randrange(6)):
                engine.step()
            if rng.random() < 0.02:
                engine.kv_cache.pool.evict_all()
            if rng.random() < 0.7:
                change = events.take()
                assert copy.isdisjoint(change.stored) and copy.issuperset(change.removed)
                copy = copy - set(change.removed) | set(change.stored)
                assert copy == set(engine.kv_cache.pool.cached) | set(engine.kv_cache.host.cached)
                seen["stored"] += len(change.stored)
                seen["removed"] += len(change.removed)
                assert not events.has_changes
        while engine.has_unfinished:
            engine.step()
        assert min(seen.values()) > 20, seen


def test_what_was_cached_before_is_an_event_too():
    engine = engine_of(block_size=2)
    engine.add_request(ask("0", [1, 2, 3, 4, 5], max_tokens=1))
    while engine.has_unfinished:
        engine.step()
    change = CacheEvents(engine.kv_cache).take()
    assert change.removed == [] and set(change.stored) == set(engine.kv_cache.pool.cached) and len(change.stored) == 2
