"""Cold prefixes in host memory and on disk: found again, counted, never wrong, and nobody can tell from the answers."""

from __future__ import annotations

import pytest

from minillm import SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.engine.simulator import VirtualClock
from minillm.kv_cache.host import HostPool
from minillm.kv_cache.manager import BlockMoves, KVCacheManager
from tests.helpers.shelf import Shelf, TieredMemory
from tests.kv_cache.test_kv_cache_pool import Text, compute

A, B, C = [1] * 9, [2] * 9, [3] * 9  # two full blocks of 4 each, and a token to compute


def serve_one(manager: KVCacheManager, tokens: list[int], name: str = "x") -> tuple[dict[str, int], BlockMoves]:
    """A request comes, is computed and goes; where its prefix was found, and the copies that were made for it."""
    text = Text(name, tokens)
    manager.prefetch(text)
    found = manager.get_computed_blocks(text).found
    compute(manager, text)
    moves = manager.take_moves()
    manager.check_integrity()
    assert not {place for _, place in moves.swap_out} & {place for place, _ in moves.swap_in}, (
        "overwritten before it is read"
    )
    for _, block_hash in moves.to_disk:
        manager.tiers.disk.write(block_hash, "written")
    manager.free(text)
    manager.check_integrity()
    return found, moves


def test_a_prefix_that_was_thrown_out_is_found_on_the_host():
    manager = KVCacheManager(3, 4, num_host_blocks=4)
    assert serve_one(manager, A)[0] == {"device": 0, "host": 0, "disk": 0}
    found, moves = serve_one(manager, B)  # takes the block that was never full, and both of A's, the tail first
    assert found["host"] == 0 and [block for block, _ in moves.swap_out] == [2, 1] and not moves.swap_in
    found, moves = serve_one(manager, A)
    assert found == {"device": 0, "host": 8, "disk": 0}
    assert len(moves.swap_in) == 2 and len(moves.swap_out) == 2  # A's come in, B's go out
    found, moves = serve_one(manager, B)
    assert found["host"] == 8 and not moves.swap_out  # A's copies are there still: nothing is copied twice
    found, moves = serve_one(manager, B)
    assert found == {"device": 8, "host": 0, "disk": 0} and not moves
    counted = manager.tiers.found
    assert (counted.device, counted.host, counted.disk, counted.computed) == (8, 16, 0, 45 - 24)
    assert counted.hit_rate("host") == 16 / 45
    with pytest.raises(ValueError, match="tier='tape' is not allowed; allowed: device, host, disk"):
        counted.hit_rate("tape")


def test_what_falls_out_of_the_host_is_found_on_disk():
    manager = KVCacheManager(3, 4, num_host_blocks=2, disk=Shelf())
    serve_one(manager, A), serve_one(manager, B)
    _, moves = serve_one(manager, C)  # B's two go to the host, A's two to the disk
    assert len(moves.to_disk) == 2 == len(manager.tiers.disk.files) and len(moves.swap_out) == 2
    found, moves = serve_one(manager, A)
    assert found == {"device": 0, "host": 0, "disk": 8} and len(moves.from_disk) == 2 == len(moves.swap_in)
    manager.pool.evict_all()
    assert manager.get_computed_blocks(Text("y", A)).found["disk"] == 8  # memory is empty, the disk keeps what it has
    manager.take_moves()
    assert manager.get_computed_blocks(Text("y", A)).found == {"device": 0, "host": 0, "disk": 8}
    assert serve_one(manager, A)[0]["disk"] == 8 and serve_one(manager, A)[0]["device"] == 8


def test_a_block_from_disk_counts_for_it_once():
    manager = KVCacheManager(3, 4, num_host_blocks=6, disk=(shelf := Shelf()))
    for block_hash in manager._hashes(Text("a", A), 2):
        shelf.write(block_hash, "written")
    assert serve_one(manager, A)[0]["disk"] == 8
    serve_one(manager, B)
    assert serve_one(manager, A)[0] == {"device": 0, "host": 8, "disk": 0}


def test_the_copies_of_a_step_disturb_each_other_nowhere():
    """All in one step: a swapped request comes back, others leave the device,
    a host place is wanted while it is read."""
    manager = KVCacheManager(4, 4, num_host_blocks=3)
    one = Text("one", A)
    compute(manager, one)
    assert manager.swap_out(one) and len(manager.take_moves().swap_out) == 3
    other = Text("other", [2] * 16)
    compute(manager, other), manager.free(other), manager.take_moves()
    assert manager.host.num_available == 0  # the swapped request holds all: what is cold is dropped
    assert manager.allocate_slots(one, 4, manager.get_computed_blocks(one))
    moves = manager.take_moves()
    # Its own places were given back, but they are read in this very step: the other's blocks could not go there.
    assert len(moves.swap_in) == 3 and not moves.swap_out and manager.host.num_available == 3
    manager.check_integrity()


def test_a_host_that_is_full_of_what_is_wanted_makes_no_room():
    manager = KVCacheManager(3, 4, num_host_blocks=2)
    serve_one(manager, A), serve_one(manager, B)
    assert set(manager.host.cached) == set(manager._hashes(Text("a", A), 2))
    found, moves = serve_one(manager, A)
    assert found["host"] == 8 and not moves.swap_out  # B's blocks find no place while A's are read
    # Of what was just used, the tail would go first.
    chain = manager._hashes(Text("a", A), 2)
    assert [manager.host.block_hash[place] for place in manager.host.free_queue] == chain[::-1]


def test_two_requests_of_one_step_share_what_the_first_brings_in():
    manager = KVCacheManager(8, 4, num_host_blocks=4)
    serve_one(manager, A), manager.pool.allocate(8), manager.pool.free(range(1, 9)), manager.take_moves()
    one, two = Text("one", A), Text("two", A)
    assert manager.allocate_slots(one, 1, manager.get_computed_blocks(one))  # nothing is computed yet
    assert manager.get_computed_blocks(two).found == {"device": 8, "host": 0, "disk": 0}
    compute(manager, two)
    assert manager.tables["one"][:2] == manager.tables["two"][:2] and len(manager.take_moves().swap_in) == 2


def test_the_head_of_a_prefix_makes_no_room_for_its_tail():
    manager = KVCacheManager(3, 4, num_host_blocks=3, disk=Shelf())
    for tokens in (A, B, C):
        serve_one(manager, tokens)
    head, tail = manager._hashes(Text("a", A), 2)
    assert next(iter(manager.host.free_queue)) == manager.host.lookup(head) and tail in manager.tiers.disk
    assert serve_one(manager, A)[0] == {"device": 0, "host": 4, "disk": 4}


def test_a_swap_without_room_keeps_nothing():
    manager = KVCacheManager(3, 4, num_host_blocks=2)
    serve_one(manager, A), serve_one(manager, B)
    one = Text("one", A)
    compute(manager, one), manager.take_moves()  # two of its blocks are on the host already, for the third is no room
    assert not manager.swap_out(one) and manager.host.num_free == 2 and not manager.take_moves()
    manager.check_integrity()


def test_swapped_requests_come_before_cold_blocks():
    manager = KVCacheManager(6, 4, num_host_blocks=2)
    serve_one(manager, A), manager.pool.allocate(6)
    assert set(manager.host.cached) and manager.host.num_free == 2
    manager.pool.free(range(1, 7)), manager.take_moves()
    other = Text("other", B[:8])
    compute(manager, other)
    assert manager.swap_out(other) and manager.host.num_free == 0 and len(manager.take_moves().swap_out) == 2
    assert serve_one(manager, A)[0]["host"] == 0  # thrown out for it
    assert manager.get_computed_blocks(other).num_tokens == 8


def test_a_swapped_block_is_known_by_its_hash_and_copied_once():
    manager = KVCacheManager(6, 4, num_host_blocks=6)
    one = Text("one", A)
    compute(manager, one)
    assert manager.swap_out(one) and len(manager.take_moves().swap_out) == 3
    blocks = manager.pool.allocate(6)  # what it left on the device is overwritten
    assert not manager.take_moves().swap_out
    manager.pool.free(blocks)
    assert (
        manager.get_computed_blocks(Text("two", A)).found["host"] == 8
    )  # another one finds what the first one swapped
    manager.free(one)
    assert manager.host.num_free == 6 and len(manager.host.cached) == 2
    two = Text("two", A)
    compute(manager, two), manager.take_moves()
    assert manager.swap_out(two)
    assert len(manager.take_moves().swap_out) == 1  # the third block was never full: it has no hash, it goes out again


def test_the_least_recently_used_goes_first_and_of_a_prefix_the_tail():
    pool, evicted = HostPool(3), []
    pool.on_evict = lambda place, block_hash: evicted.append(block_hash)
    for name in (b"a", b"b", b"c"):
        [place] = pool.allocate(1)
        pool.cache(place, name), pool.free([place])
    pool.settle()
    with pytest.raises(ValueError, match="host place 0 is free already"):
        pool.free([0])
    pool.in_motion.add(0)
    assert pool.num_available == 2 and pool.num_free == 3
    pool.touch([0]), pool.free([0])
    pool.free_queue.move_to_end(0, last=False)
    assert pool.allocate(2) == [1, 2] and evicted == [b"b", b"c"]
    pool.free([1, 2])  # nothing is in them: they go before what is cold
    with pytest.raises(ValueError, match="1 host blocks asked, 0 of 3 are free"):
        pool.allocate(1)
    pool.settle()
    assert pool.allocate(3) == [2, 1, 0] and evicted == [b"b", b"c", b"a"]
    manager = KVCacheManager(3, 4, num_host_blocks=3)
    for tokens in (A, B, C):  # four blocks want three places
        serve_one(manager, tokens)
    chain = manager._hashes(Text("a", A), 2)
    assert manager.host.lookup(chain[1]) is None and manager.host.lookup(chain[0]) is not None


def test_reading_ahead_waits_for_nobody_and_scheduling_waits_for_its_own():
    shelf = Shelf(at_once=False)
    manager = KVCacheManager(3, 4, num_host_blocks=3, disk=shelf)
    for tokens in (A, B, C, [4] * 9):
        serve_one(manager, tokens)
    late = Text("late", A)
    manager.prefetch(late)
    assert [name for _, name in shelf.pending] == manager._hashes(late, 2)
    assert manager.get_computed_blocks(late, wait=False).num_tokens == 0
    shelf.land()
    moves = manager.take_moves()  # a step of other requests: what has come is put into host memory with it
    assert len(moves.from_disk) == 2 and manager.get_computed_blocks(late, wait=False).found["disk"] == 8
    manager.free(late)
    for _, block_hash in moves.to_disk:
        shelf.write(block_hash, "written")
    manager.prefetch(Text("b", B))
    assert manager.get_computed_blocks(Text("b", B), wait=False).num_tokens == 0
    assert manager.get_computed_blocks(Text("b", B)).found["disk"] == 8  # scheduled at once: it was waited for


def test_reading_begins_when_a_request_is_added():
    shelf = Shelf(at_once=False)
    manager = KVCacheManager(3, 4, num_host_blocks=4, disk=shelf)
    chain = list(manager._hashes(Text("a", A), 2))
    manager.free(Text("a", A))
    for block_hash in chain:
        shelf.write(block_hash, "written")
    engine = Engine(scheduler=Scheduler(manager), runner=TieredMemory(4, shelf), clock=VirtualClock())
    engine.add_request(Request("a", A, SamplingParams(max_tokens=1), 1))
    assert [block_hash for _, block_hash in shelf.pending] == chain
    engine.abort(*engine.scheduler.requests)
    shelf.land()
    assert (
        len(manager.take_moves().from_disk) == 2 and not manager.records
    )  # it has gone, what was read for it may serve others


def test_a_lost_file_shortens_the_prefix():
    manager = KVCacheManager(3, 4, num_host_blocks=2, disk=(shelf := Shelf()))
    for tokens in (A, B, C):
        serve_one(manager, tokens)
    shelf.files[manager._hashes(Text("a", A), 2)[1]] = None
    assert serve_one(manager, A)[0] == {"device": 0, "host": 0, "disk": 4}
