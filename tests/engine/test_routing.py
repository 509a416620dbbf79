"""Router policies choose as they say, on any fleet; the indices of the view agree with a plain recount."""

from __future__ import annotations

import random

import pytest

from minillm.engine.routing import (
    POLICIES,
    FleetView,
    LeastTokens,
    PowerOfTwo,
    PrefixAware,
    RequestView,
    RoundRobin,
    make_router_policy,
)


def request(num_blocks: int = 4, name: str = "a", size: int = 16) -> RequestView:
    return RequestView("0", num_blocks * size + 1, [f"{name}{index}" for index in range(num_blocks)], size)


def test_round_robin_takes_each_replica_in_turn_also_when_one_leaves():
    fleet, policy = FleetView(["a", "b", "c"]), RoundRobin()
    assert [policy.pick(request(), fleet) for _ in range(4)] == ["a", "b", "c", "a"]
    fleet.remove("b")
    assert [policy.pick(request(), fleet) for _ in range(3)] == ["c", "a", "c"]


def test_least_tokens_counts_tokens_and_not_requests():
    fleet = FleetView(["a", "b"])
    fleet.started("a", 1000)
    for _ in range(5):
        fleet.started("b", 100)
    assert LeastTokens().pick(request(), fleet) == "b"
    fleet.generated("b", 600)
    assert LeastTokens().pick(request(), fleet) == "a"
    fleet.finished("a", 1000)
    assert (fleet.get("a").num_tokens, fleet.get("a").num_requests) == (0, 0)


def test_power_of_two_never_takes_the_most_loaded_of_three():
    fleet, policy = FleetView(["a", "b", "c"]), PowerOfTwo(seed=1)
    fleet.started("b", 10)
    fleet.started("c", 1000)
    picked = {policy.pick(request(), fleet) for _ in range(200)}
    assert picked == {"a", "b"}
    assert PowerOfTwo().pick(request(), FleetView(["only"])) == "only"


def test_prefix_aware_follows_the_cache_until_its_replica_has_too_much_to_do():
    fleet, policy, asked = FleetView(["a", "b", "c"]), PrefixAware(load_weight=0.5), request(8)
    fleet.stored("b", asked.block_hashes[:6])
    fleet.stored("c", asked.block_hashes[:2])
    assert policy.pick(asked, fleet) == "b"
    fleet.started("b", 150)
    assert policy.pick(asked, fleet) == "b"  # 33 + 75 is less than 129
    fleet.started("b", 150)
    assert policy.pick(asked, fleet) == "a"  # 33 + 150 is more
    assert PrefixAware(load_weight=0).pick(asked, fleet) == "b"


def test_prefix_aware_counts_the_head_of_a_prompt_alone():
    fleet, asked = FleetView(["a", "b"]), request(4)
    fleet.stored("a", asked.block_hashes[1:])  # of no use without the first block
    fleet.started("a", 1)
    assert fleet.get("a").num_new_tokens(asked) == asked.num_prompt_tokens
    assert PrefixAware().pick(asked, fleet) == "b"
    fleet.stored("a", asked.block_hashes[:1])
    assert fleet.get("a").num_new_tokens(asked) == 1


def test_a_replica_that_leaves_takes_its_blocks_and_its_load_with_it():
    fleet, asked = FleetView(["a", "b"]), request(2)
    fleet.stored("a", asked.block_hashes)
    fleet.remove("a")
    assert fleet.longest_prefix(asked.block_hashes) == (0, [])
    fleet.stored("a", asked.block_hashes)  # reports that were under way
    fleet.finished("a", 100)
    assert fleet.longest_prefix(asked.block_hashes) == (0, []) and list(map(id, fleet)) == [id(fleet.get("b"))]
    fleet.add("a")
    assert fleet.get("a").blocks == set()


def test_the_indices_of_the_view_agree_with_a_recount_under_random_changes():
    rng, fleet, blocks = random.Random(0), FleetView(), [f"b{index}" for index in range(12)]
    started: dict[str, list[int]] = {}
    for step in range(3000):
        action = rng.randrange(7)
        if action == 0 and len(fleet) < 6:
            started[fleet.add(f"r{step}").replica_id] = []
        elif not len(fleet):
            continue
        name = rng.choice(list(started))
        if action == 1 and rng.random() < 0.1:
            fleet.remove(name)
            del started[name]
        elif action == 2:
            started[name].append(rng.randrange(1, 50))
            fleet.started(name, started[name][-1])
        elif action == 3 and started[name]:
            fleet.finished(name, started[name].pop())
        elif action == 4:
            fleet.stored(name, rng.sample(blocks, 3))
        elif action == 5:
            fleet.removed(name, rng.sample(blocks, 3))
        elif action == 6 and rng.random() < 0.05:
            fleet.cleared(name)
        for view in fleet:
            assert (view.num_tokens, view.num_requests) == (
                sum(started[view.replica_id]),
                len(started[view.replica_id]),
            )
        if len(fleet):
            least = min(fleet, key=lambda view: (view.num_tokens, view.num_requests))  # the first that joined of equals
            assert fleet.least_loaded() is least
            block = rng.choice(blocks)
            assert set(fleet.holders(block)) == {view.replica_id for view in fleet if block in view.blocks}
    assert len(fleet._heap) <= 65 + 4 * len(fleet)


def test_policies_come_by_name_or_as_they_are():
    for name, kind in POLICIES.items():
        assert isinstance(make_router_policy(name), kind)
    own = RoundRobin()
    assert make_router_policy(own) is own
    with pytest.raises(ValueError, match="router_policy='best' is not known; choose from least_tokens, power_of_two"):
        make_router_policy("best")
    with pytest.raises(ValueError, match="load_weight=-1 is not allowed"):
        PrefixAware(-1)
    with pytest.raises(ValueError, match="'a' is in the fleet already"):
        FleetView(["a", "a"])
    with pytest.raises(LookupError, match="no replica"):
        FleetView().least_loaded()
