"""KVCacheManager: which blocks each request has, and when they are taken, shared, copied and given back.
Built in chapter 06.

    request A   table [4, 7, 2]      block 4: ref_cnt 2, block_size tokens that A and B begin with
    request B   table [4, 9]         blocks 7, 2, 9: ref_cnt 1; the last one of a table is usually not full
    window      table [0, 0, 5, 8]   what fell out of the sliding window was given back; 0 is the null block
    sinks       table [3, 0, 5, 8]   but the first tokens stay, where attention sinks are kept (chapter 17)

It moves no data. What has to be copied before the next forward pass is listed in `BlockMoves`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

from minillm.kv_cache.block_pool import NULL_BLOCK, BlockPool
from minillm.kv_cache.host import HostPool
from minillm.kv_cache.prefix import extend_chain, root_hash
from minillm.kv_cache.tiers import Disk, Tiers


class Request(Protocol):
    """What the manager reads of a request (`minillm.engine.request`); it changes nothing there."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    cache_salt: str | None

    @property
    def num_tokens(self) -> int: ...
    @property
    def prefix_cache_limit(self) -> int: ...  # of its first tokens, how many may come from a cache


@dataclass
class BlockMoves:
    """Copies to make before the forward pass, in this order; each pair is (from, to)."""

    to_disk: list[tuple[int, bytes]] = field(default_factory=list)  # host place -> file of that hash
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device block -> host place
    from_disk: list[tuple[Any, int]] = field(default_factory=list)  # what was read of a file -> host place
    copies: list[tuple[int, int]] = field(default_factory=list)  # device block -> device block, on write
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # host place -> device block

    def __bool__(self) -> bool:
        return bool(self.to_disk or self.swap_out or self.from_disk or self.copies or self.swap_in)


@dataclass(frozen=True)
class ComputedBlocks:
    """The part of a request that need not be computed: `num_tokens` tokens, in blocks that are not owned yet."""

    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    from_host: dict[int, int] = field(default_factory=dict)  # index in block_ids -> host place it is copied from
    found: dict[str, int] = field(default_factory=dict)  # of a prefix: how many of the tokens each tier had


class KVCacheManager:
    """Tables of blocks for requests, over one `BlockPool`.

    `window` is the sliding window when every layer has one (the largest), else None; the first `sinks` tokens are kept
    although they leave it (`minillm.kv_cache.retention`). `identity` names all that the
    keys and values depend on beside the tokens: it goes into every prefix hash. Host blocks and `disk` take what the
    pool has no room for (`minillm.kv_cache.tiers`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        window: int | None = None,
        num_host_blocks: int = 0,
        identity: str = "",
        disk: Disk | None = None,
        sinks: int = 0,
    ):
        self.pool = BlockPool(num_blocks)
        self.host = HostPool(num_host_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.window, self.num_sink_blocks = window, -(-sinks // block_size)
        self.identity = identity
        self.tables: dict[str, list[int]] = {}
        self.chains: dict[str, list[bytes]] = {}  # prefix hashes of a request's full blocks, as far as they were needed
        self.num_cached_blocks: dict[str, int] = {}  # how many leading blocks of a table the pool can find by hash
        self.swapped: dict[str, list[int | bytes]] = {}  # of a swapped request: a host place, or the hash to look for
        self.tiers = Tiers(self.pool, self.host, disk, BlockMoves())

    @property
    def moves(self) -> BlockMoves:
        """Of the step that is being scheduled; the tiers own them, and `take_moves` hands them out."""
        return self.tiers.moves

    def get_computed_blocks(self, request: Request, wait: bool = True) -> ComputedBlocks:
        """What the caches hold of a request that has no blocks: its own swapped blocks, or the longest known prefix.

        Never all of it: the last token is always computed, since its logits are wanted (`prefix_cache_limit`).
        `wait` for blocks on their way from disk, or leave them out.
        """
        if request.request_id in self.swapped and (computed := self._swapped_blocks(request)) is not None:
            return computed
        if not self.enable_prefix_caching:
            return ComputedBlocks()
        chain = self._chain(request, request.prefix_cache_limit // self.block_size)
        if wait:
            self.tiers.wait_for(chain)
        hits: list[int] = []
        from_host: dict[int, int] = {}
        for index, block_hash in enumerate(chain):
            block = self.pool.lookup(block_hash)
            if block is None and (place := self.host.lookup(block_hash)) is not None:
                from_host[index] = place
            elif block is None and self.window is None:
                break
            hits.append(NULL_BLOCK if block is None else block)
        return self._within_window(hits, from_host) if self.window else self._found(hits, from_host)

    def allocate_slots(self, request: Request, num_new_tokens: int, computed: ComputedBlocks | None = None) -> bool:
        """Give `request` slots for `num_new_tokens` after those it has computed; False, and nothing changed, if the
        free blocks do not suffice. `computed`, for a request without blocks, becomes the head of its table.
        """
        table = self.tables.get(request.request_id, [])
        num_computed = request.num_computed_tokens
        if computed is not None:
            table, num_computed = computed.block_ids, computed.num_tokens
        first_written = num_computed // self.block_size
        shared = [i for i in range(first_written, len(table)) if self.pool.ref_cnt[table[i]] > 1]
        num_blocks = -(-(num_computed + num_new_tokens) // self.block_size)
        num_added = max(0, num_blocks - len(table))
        unused = self._outside_window(table, num_computed) if computed is None else []
        if not self._fits(num_added + len(shared), table, unused, computed):
            return False
        if computed is not None:
            table = self._take(request, computed)
        self.pool.free(table[i] for i in unused)
        for i in unused:
            table[i] = NULL_BLOCK
        for i in shared:  # copy on write: another owner still reads what is there
            [copy] = self.pool.allocate(1)
            self.moves.copies.append((table[i], copy))
            self.pool.free([table[i]])
            table[i] = copy
        if num_added:
            table += self.pool.allocate(num_added)
        return True

    def cache_blocks(self, request: Request) -> None:
        """Make the blocks that are full of computed tokens findable; called after a step."""
        # The last token of a step in flight has keys and values, but nobody knows yet which one it is:
        # no name for its block.
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        done = self.num_cached_blocks[request.request_id]
        if not self.enable_prefix_caching or num_full <= done:
            return
        table, chain = self.tables[request.request_id], self._chain(request, num_full)
        for index in range(done, num_full):
            if table[index] != NULL_BLOCK:
                self.pool.cache(table[index], chain[index])
        self.num_cached_blocks[request.request_id] = num_full

    def free(self, request: Request) -> None:
        """Give back all that the request owns, its last block first: heads of texts are what others share."""
        self.pool.free(reversed(self.tables.pop(request.request_id, [])))
        self.num_cached_blocks.pop(request.request_id, None)
        self.chains.pop(request.request_id, None)
        self._drop_swapped(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` own every block of `parent` too; whoever writes into a shared block first gets a copy."""
        table = self.tables[parent.request_id]
        self.pool.touch(table)
        self.tables[child.request_id] = list(table)
        self.chains[child.request_id] = self.chains.get(parent.request_id, [])[: parent.num_tokens // self.block_size]
        self.num_cached_blocks[child.request_id] = self.num_cached_blocks[parent.request_id]

    def swap_out(self, request: Request) -> bool:
        """Move what only this request owns to host memory and free the rest; False, and nothing changed, if host
        memory is full. Blocks that others share stay with them, and are looked for by hash on the way back.
        """
        used = -(-request.num_computed_tokens // self.block_size)
        table = self.tables[request.request_id][:used]
        for i in self._outside_window(table, request.num_computed_tokens):
            table[i] = NULL_BLOCK  # nobody will look at it again
        stays = [self.pool.ref_cnt[block] > 1 and self.pool.block_hash[block] is not None for block in table]
        moved = [block for block, kept in zip(table, stays) if block != NULL_BLOCK and not kept]
        if not moved or (places := self.tiers.to_host(moved)) is None:
            return False
        entries = [self.pool.block_hash[block] if kept else places.get(block, -1) for block, kept in zip(table, stays)]
        chain = self.chains.get(request.request_id)
        self.free(request)
        if chain is not None:
            self.chains[request.request_id] = chain
        self.swapped[request.request_id] = entries
        return True

    def prefetch(self, request: Request) -> None:
        """A request is going to wait: have read, meanwhile, what only the disk has of its prefix."""
        if self.tiers.disk is not None and self.enable_prefix_caching:
            self.tiers.prefetch(self._chain(request, request.prefix_cache_limit // self.block_size))

    def take_moves(self) -> BlockMoves:
        """The copies to make before the next forward pass; asked once a step."""
        self.tiers.take_in_arrived()
        moves, self.tiers.moves = self.moves, BlockMoves()
        self.host.settle()
        return moves

    def blocks_needed(self, num_tokens: int, max_new_tokens: int) -> int:
        """The most blocks a request of `num_tokens` owns at once, when at most `max_new_tokens` come in one step."""
        num_blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return num_blocks
        return min(
            num_blocks, self.num_sink_blocks - (-(self.window + max_new_tokens + self.block_size) // self.block_size)
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block, and every host place, is free or owned as often as counted."""
        self.pool.check_integrity(self.tables.values())
        held = [
            entry for entries in self.swapped.values() for entry in entries if isinstance(entry, int) and entry >= 0
        ]
        self.host.check_integrity(held)

    def _fits(self, wanted: int, table: list[int], unused: list[int], computed: ComputedBlocks | None) -> bool:
        available = self.pool.num_free + sum(self.pool.ref_cnt[table[i]] == 1 for i in unused)
        if computed is not None:  # hits that nobody owns stand in the free queue, and leave it
            available -= sum(block != NULL_BLOCK and self.pool.ref_cnt[block] == 0 for block in table)
            wanted += len(computed.from_host)
        return wanted <= available

    def _take(self, request: Request, computed: ComputedBlocks) -> list[int]:
        """Own the computed blocks; those that are in host memory get new device blocks and a copy order."""
        table = list(computed.block_ids)
        self.pool.touch(table)
        for index, block in zip(computed.from_host, self.tiers.to_device(computed)):
            table[index] = block
        if computed.found or request.request_id not in self.swapped:
            self.tiers.found.add(computed, request.num_tokens)
        self._drop_swapped(request)
        self.tables[request.request_id] = table
        # Blocks from host memory have lost their hash; cache_blocks finds the others known already.
        self.num_cached_blocks[request.request_id] = min(
            computed.from_host, default=computed.num_tokens // self.block_size
        )
        return table

    def _swapped_blocks(self, request: Request) -> ComputedBlocks | None:
        """All that a swapped request had computed; None if a block that it shared was evicted meanwhile."""
        blocks: list[int] = []
        from_host: dict[int, int] = {}
        for index, entry in enumerate(self.swapped[request.request_id]):
            block = None if isinstance(entry, int) else self.pool.lookup(entry)
            place = entry if isinstance(entry, int) else self.host.lookup(entry)
            if block is None and place is None:
                return None
            if block is None and place >= 0:
                from_host[index] = place
            blocks.append(NULL_BLOCK if block is None else block)
        return ComputedBlocks(blocks, request.num_computed_tokens, from_host)

    def _drop_swapped(self, request: Request) -> None:
        entries = self.swapped.pop(request.request_id, [])
        self.host.free([entry for entry in entries if isinstance(entry, int) and entry >= 0])

    def _found(self, hits: list[int], from_host: dict[int, int]) -> ComputedBlocks:
        """The blocks of a prefix, and how many of its tokens each tier had."""
        num_tokens = len(hits) * self.block_size
        found = {"device": num_tokens, "host": 0, "disk": 0}
        for place in from_host.values():
            found[self.tiers.found_in(place)] += self.block_size
            found["device"] -= self.block_size
        return ComputedBlocks(hits, num_tokens, from_host, found)

    def _within_window(self, hits: list[int], from_host: dict[int, int]) -> ComputedBlocks:
        """The longest prefix whose last window is all there; what came before it is never read."""
        for num_blocks in range(len(hits), 0, -1):
            num_tokens = num_blocks * self.block_size
            first = max(0, num_tokens - self.window + 1) // self.block_size
            if all(hits[i] != NULL_BLOCK or i in from_host for i in range(first, num_blocks)):
                wanted = {i: place for i, place in from_host.items() if first <= i < num_blocks}
                return self._found([NULL_BLOCK] * first + hits[first:num_blocks], wanted)
        return ComputedBlocks()

    def _outside_window(self, table: list[int], num_computed: int) -> list[int]:
        """Places of the table that no token from `num_computed` on will look at, and that hold a block yet."""
        if self.window is None:
            return []
        first = min(max(0, num_computed - self.window + 1) // self.block_size, len(table))
        held = takewhile(lambda i: table[i] != NULL_BLOCK, range(first - 1, self.num_sink_blocks - 1, -1))
        return list(held)[::-1]  # what lies before them was given back in earlier steps

    def _chain(self, request: Request, num_blocks: int) -> list[bytes]:
        chain = self.chains.setdefault(request.request_id, [])
        if len(chain) < num_blocks:
            root = root_hash(identity=self.identity, block_size=self.block_size, salt=request.cache_salt)
            extend_chain(chain, root, request.token_ids, self.block_size, num_blocks)
        return chain[:num_blocks]
