"""BlockPool and KVCacheManager by hand: who owns what, what is evicted first, what a fork and a swap copy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from minillm.kv_cache.block_pool import NULL_BLOCK, BlockPool
from minillm.kv_cache.host import HostPool
from minillm.kv_cache.manager import BlockMoves, KVCacheManager
from minillm.kv_cache.prefix import extend_chain, hash_block, root_hash


@dataclass
class Text:
    """The little of a request that the manager reads."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    logprob_start_len: int = 10**9  # from here on everything has to be computed, and one token before
    num_tokens: int = field(init=False)
    prefix_cache_limit: int = field(init=False)

    def __post_init__(self):
        self.num_tokens = len(self.token_ids)
        self.prefix_cache_limit = min(self.num_tokens, self.logprob_start_len) - 1


def compute(manager: KVCacheManager, text: Text) -> int:
    """Give `text` its slots and pretend to compute it; how many tokens came from the cache."""
    computed = manager.get_computed_blocks(text)
    assert manager.allocate_slots(text, text.num_tokens - computed.num_tokens, computed)
    text.num_computed_tokens = text.num_tokens
    manager.cache_blocks(text)
    manager.check_integrity()
    return computed.num_tokens


def test_empty_blocks_are_handed_out_before_cached_ones_and_of_these_the_least_recently_freed():
    pool = BlockPool(5)
    assert pool.allocate(4) == [1, 2, 3, 4] and pool.num_free == 1 and pool.usage == 0.8
    pool.cache(2, b"a")
    pool.cache(1, b"b")
    pool.free([2, 4, 1, 3])
    assert pool.allocate(5) == [3, 4, 5, 2, 1]
    with pytest.raises(ValueError, match="1 blocks asked, 0 of 5 are free"):
        pool.allocate(1)


def test_an_empty_block_is_reused_before_one_that_was_never_used():
    pool = BlockPool(64)
    for _ in range(100):
        pool.free(reversed(pool.allocate(3)))
    assert pool.allocate(4) == [1, 2, 3, 4]


def test_a_block_is_free_when_its_last_owner_has_gone():
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.touch([block, NULL_BLOCK])
    pool.free([block])
    assert pool.num_free == 2
    pool.free([block, NULL_BLOCK])
    assert pool.num_free == 3
    with pytest.raises(ValueError, match=f"block {block} is free already"):
        pool.free([block])
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)


def test_a_hash_lives_until_its_block_is_handed_out():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, b"a")
    pool.cache(second, b"a")  # a second copy stays unknown
    pool.free([first, second])
    assert pool.lookup(b"a") == first
    pool.touch([first])  # a hit takes it out of the queue
    assert pool.allocate(1) == [second] and pool.lookup(b"a") == first
    pool.free([first])
    assert pool.allocate(1) == [first] and pool.lookup(b"a") is None


BREAKS = {
    "an owner more": (lambda pool: pool.ref_cnt.__setitem__(1, 2), "block 1: ref_cnt=2, but 1 tables hold it"),
    "a lost block": (lambda pool: pool.free_queue.popitem(), "stand in the free queue"),
    "an owned block in the queue": (
        lambda pool: (pool.free_queue.popitem(), pool.free_queue.__setitem__(1, None)),
        "free queue",
    ),
    "the null block in the queue": (
        lambda pool: (pool.free_queue.popitem(), pool.free_queue.__setitem__(0, None)),
        "free queue",
    ),
    "a hash without its index": (lambda pool: pool.cached.clear(), "disagree"),
    "an index without its hash": (lambda pool: pool.cached.__setitem__(b"x", 2), "disagree"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_integrity_sees(name):
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.cache(1, b"a")
    pool.check_integrity([table])
    break_it, said = BREAKS[name]
    break_it(pool)
    with pytest.raises(RuntimeError, match=said):
        pool.check_integrity([table])


def test_the_chain_names_all_that_came_before_and_all_else_that_matters():
    root = root_hash(model="m", salt=None)
    chains: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}
    extend_chain(chains["a"], root, [1, 2, 3, 4], 2, 2)
    extend_chain(chains["b"], root, [9, 2, 3, 4], 2, 2)
    extend_chain(chains["c"], root_hash(salt="s", model="m"), [1, 2, 3, 4], 2, 2)
    assert len({name for chain in chains.values() for name in chain}) == 6
    assert chains["a"][1] == hash_block(chains["a"][0], [3, 4]) and root == root_hash(salt=None, model="m")
    extend_chain(longer := chains["a"][:1], root, [1, 2, 3, 4], 2, 2)
    assert longer == chains["a"]


def test_hashes_are_the_same_in_every_process(root):
    """A cache on disk must mean the same tomorrow: Python's own hash() would not."""
    program = "from minillm.kv_cache.prefix import *; print(hash_block(root_hash(model='m'), [1, 2]).hex())"
    said = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True).stdout
        for _ in range(2)
    }
    assert len(said) == 1 and len(said.pop().strip()) == 64


def test_only_full_computed_blocks_are_hits_and_never_the_whole_text():
    manager = KVCacheManager(20, 4)
    assert compute(manager, Text("a", list(range(11)))) == 0
    assert compute(manager, Text("b", list(range(11)))) == 8
    assert compute(manager, Text("c", list(range(8)))) == 4  # both blocks are known, but the last token is computed
    assert compute(manager, Text("d", list(range(8)), cache_salt="other")) == 0
    assert compute(manager, Text("e", list(range(11)), logprob_start_len=1)) == 0
    assert compute(manager, Text("f", list(range(11)), logprob_start_len=8)) == 4  # the logits of token 7 are wanted
    assert compute(manager, Text("g", list(range(11)), logprob_start_len=9)) == 8
    assert manager.tables["a"][:2] == manager.tables["b"][:2] != manager.tables["e"][:2]


def test_texts_are_forgotten_tail_first():
    manager = KVCacheManager(6, 2)
    text = Text("a", list(range(8)))
    compute(manager, text)
    manager.free(text)
    compute(manager, Text("b", [50, 51, 52, 53, 54, 55]))  # takes the two empty blocks and one of the tail
    assert manager.get_computed_blocks(Text("c", list(range(9)))).num_tokens == 6


def test_short_requests_do_not_evict_a_prefix():
    manager = KVCacheManager(64, 8)
    head = list(range(496))
    compute(manager, text := Text("head", [*head, 1]))
    manager.free(text)
    for index in range(80):
        compute(manager, text := Text(f"short {index}", [500 + index] * 3))  # no block of these is ever full
        manager.free(text)
    assert compute(manager, Text("again", [*head, 2])) == 496


def test_a_request_that_does_not_fit_changes_nothing():
    manager = KVCacheManager(3, 4)
    compute(manager, Text("a", list(range(8))))
    before = list(manager.pool.free_queue), dict(manager.tables)
    late = Text("b", [*range(8), 9, 9])
    assert not manager.allocate_slots(late, 6, manager.get_computed_blocks(Text("b", list(range(4)) + [9] * 6)))
    assert (list(manager.pool.free_queue), dict(manager.tables)) == before
    manager.check_integrity()


def test_a_fork_copies_what_is_written_while_it_is_shared_and_the_last_owner_writes_in_place():
    manager = KVCacheManager(10, 4)
    parent, child = Text("p", list(range(6))), Text("c", list(range(6)), num_computed_tokens=6)
    compute(manager, parent)
    manager.fork(parent, child)
    table = list(manager.tables["p"])
    assert manager.tables["c"] == table and manager.tables["c"] is not manager.tables["p"]
    assert manager.allocate_slots(child, 1)
    copy = manager.tables["c"][1]
    assert manager.take_moves().copies == [(table[1], copy)] and copy != table[1] and manager.tables["c"][0] == table[0]
    assert manager.allocate_slots(parent, 1) and not manager.take_moves() and manager.tables["p"] == table
    manager.check_integrity()


def test_swapping_moves_private_blocks_and_finds_shared_ones_again():
    manager = KVCacheManager(10, 4, num_host_blocks=4)
    one, other = Text("a", list(range(10))), Text("b", [*range(8), 70, 71])
    compute(manager, one), compute(manager, other)
    shared, private = manager.tables["b"][:2], manager.tables["b"][2]
    assert manager.swap_out(other) and manager.take_moves() == BlockMoves(swap_out=[(private, 0)])
    manager.check_integrity()
    computed = manager.get_computed_blocks(other)
    assert computed.num_tokens == 10 and computed.block_ids[:2] == shared and computed.from_host == {2: 0}
    assert manager.allocate_slots(other, 1, computed)
    [(place, block)] = manager.take_moves().swap_in
    assert place == 0 and manager.tables["b"] == [*shared, block] and manager.host.num_free == 4
    manager.check_integrity()


def test_a_swapped_request_recomputes_from_the_first_shared_block_that_is_gone():
    manager = KVCacheManager(8, 4, num_host_blocks=4)
    one, other = Text("a", list(range(10))), Text("b", [*range(8), 70, 71])
    compute(manager, one), compute(manager, other)
    assert manager.swap_out(other)
    manager.free(one)
    manager.pool.evict_all()
    assert manager.get_computed_blocks(other).num_tokens == 0
    assert manager.allocate_slots(other, 10, manager.get_computed_blocks(other)) and manager.host.num_free == 4
    manager.check_integrity()


@pytest.mark.parametrize("num_lost, num_tokens", [(1, 12), (3, 4), (4, 0)])
def test_a_swapped_request_whose_window_lost_a_block_resumes_where_the_whole_window_is_there(num_lost, num_tokens):
    manager = KVCacheManager(9, 4, window=6, num_host_blocks=1)
    one, other = Text("a", list(range(17))), Text("b", [*range(16), 70, 71])
    compute(manager, one), compute(manager, other)
    heads = list(manager.tables["a"])
    # Of its window, token 13 on, block 3 stays on the device and block 4 goes to the host.
    assert manager.swap_out(other)
    manager.free(one)
    others = manager.pool.allocate(manager.pool.num_free - 4 + num_lost)  # evicts from block 3 down
    computed = manager.get_computed_blocks(other)
    table = {12: [NULL_BLOCK, *heads[1:3]], 4: heads[:1], 0: []}[num_tokens]
    assert computed.num_tokens == num_tokens and computed.block_ids == table
    manager.pool.free(others)
    assert manager.allocate_slots(other, 18 - num_tokens, computed) and manager.host.num_free == 1
    manager.check_integrity()


def test_a_swapped_request_finds_a_shared_block_that_went_to_the_host():
    manager = KVCacheManager(8, 4, window=6, num_host_blocks=8)
    one, other = Text("a", list(range(17))), Text("b", [*range(16), 70, 71])
    compute(manager, one), compute(manager, other)
    assert manager.swap_out(other)
    manager.free(one)
    manager.pool.free(manager.pool.allocate(8))
    computed = manager.get_computed_blocks(other)
    assert computed.num_tokens == 18 and sorted(computed.from_host) == [3, 4]
    assert manager.allocate_slots(other, 1, computed)
    manager.check_integrity()


def test_blocks_that_came_back_from_the_host_can_be_hit_again():
    manager = KVCacheManager(8, 4, num_host_blocks=4)
    text = Text("a", list(range(10)))
    compute(manager, text)
    assert manager.swap_out(text)
    manager.pool.evict_all()
    assert manager.allocate_slots(text, 0, manager.get_computed_blocks(text))
    manager.cache_blocks(text)
    assert manager.get_computed_blocks(Text("b", list(range(10)))).num_tokens == 8


def test_swapping_without_room_on_the_host_changes_nothing():
    manager = KVCacheManager(8, 4, num_host_blocks=1)
    text = Text("a", list(range(10)))
    compute(manager, text)
    table = list(manager.tables["a"])
    assert not manager.swap_out(text) and manager.tables["a"] == table and not manager.take_moves()
    pool = HostPool(1)
    with pytest.raises(ValueError, match="2 host blocks asked, 1 of 1 are free; raise host_kv_bytes"):
        pool.allocate(2)


def test_a_window_gives_blocks_back_and_needs_only_its_last_blocks_hit():
    manager = KVCacheManager(20, 4, window=6)
    text = Text("a", list(range(24)))
    compute(manager, text)
    assert manager.allocate_slots(text, 1)
    # Token 24 sees 19 to 24: the blocks of 0 to 15 are given back.
    assert manager.tables["a"][:4] == [NULL_BLOCK] * 4 and NULL_BLOCK not in manager.tables["a"][4:]
    assert len(manager.tables["a"]) == 7 and manager.pool.num_free == 17
    manager.pool.allocate(13)  # others take the empty blocks, and what is left are the four freed ones
    hit = manager.get_computed_blocks(Text("b", list(range(25))))
    assert hit.num_tokens == 24 and hit.block_ids[:4] == [NULL_BLOCK] * 4 and NULL_BLOCK not in hit.block_ids[4:]
    assert manager.blocks_needed(1000, 8) == -(-(6 + 8 + 4) // 4)
