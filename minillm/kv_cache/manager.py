"""KVCacheManager: which blocks each request has, and when they are taken, shared, copied and given back.
Built in chapter 06.

    request A   table [4, 7, 2]      block 4: ref_cnt 2, block_size tokens that A and B begin with
    request B   table [4, 9]         blocks 7, 2, 9: ref_cnt 1; the last one of a table is usually not full
    window      table [0, 0, 5, 8]   what fell out of the sliding window was given back; 0 is the null block
    sinks       table [3, 0, 5, 8]   but the first tokens stay, where attention sinks are kept (chapter 17)

It moves no data. What has to be copied before the next forward pass is listed in `BlockMoves`.
"""

from __future__ import annotations

from collections.abc import Sequence

from minillm.kv_cache.block_pool import NULL_BLOCK, BlockPool
from minillm.kv_cache.host import HostPool
from minillm.kv_cache.prefix import extend_chain, root_hash
from minillm.kv_cache.protocol import Request
from minillm.kv_cache.records import BlockMoves, ComputedBlocks, RequestBlocks, Tables
from minillm.kv_cache.tiers import Disk, Tiers
from minillm.kv_cache.window import Window
from minillm.rounding import ceil_div


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
        self.window = None if window is None else Window(window, block_size, ceil_div(sinks, block_size))
        self.identity = identity
        self.records: dict[str, RequestBlocks] = {}
        self.tables = Tables(self.records)
        self.reserved: dict[str, list[int]] = {}  # for requests on their way here: chapter 22
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
        record = self.records.get(request.request_id)
        if record is not None and record.swapped is not None:
            if (blocks := self.tiers.swapped_blocks(record.swapped)) is not None:
                return ComputedBlocks(blocks[0], request.num_computed_tokens, blocks[1])
        if not self.enable_prefix_caching:
            return ComputedBlocks()
        hashes = self._hashes(request, request.prefix_cache_limit // self.block_size)
        if wait:
            self.tiers.wait_for(hashes)
        hits: list[int] = []
        from_host: dict[int, int] = {}
        for index, block_hash in enumerate(hashes):
            block = self.pool.lookup(block_hash)
            if block is None and (place := self.host.lookup(block_hash)) is not None:
                from_host[index] = place
            elif block is None and self.window is None:
                break
            hits.append(NULL_BLOCK if block is None else block)
        if self.window is None:
            return self._found(hits, from_host)
        hits, from_host = self.window.longest_prefix(hits, from_host)
        return self._found(hits, from_host) if hits else ComputedBlocks()

    def allocate_slots(self, request: Request, num_new_tokens: int, computed: ComputedBlocks | None = None) -> bool:
        """Give `request` slots for `num_new_tokens` after those it has computed; False, and nothing changed, if the
        free blocks do not suffice. `computed`, for a request without blocks, becomes the head of its table.
        """
        record, num_computed = self.records.get(request.request_id), request.num_computed_tokens
        if computed is not None:
            record = self.records.setdefault(request.request_id, RequestBlocks())
            table, num_computed = computed.block_ids, computed.num_tokens
        elif record is None or record.table is None:
            raise ValueError(
                f"request {request.request_id} owns no blocks that could be continued; pass computed, which "
                f"get_computed_blocks(request) says"
            )
        elif num_computed + num_new_tokens <= record.num_writable:
            return True  # as in most steps: its last block has room
        else:
            table = record.table
        first_written = num_computed // self.block_size
        shared = [i for i in range(first_written, len(table)) if self.pool.ref_cnt[table[i]] > 1]
        num_blocks = ceil_div(num_computed + num_new_tokens, self.block_size)
        num_added = max(0, num_blocks - len(table))
        unused = self.window.outside(table, num_computed) if computed is None and self.window is not None else []
        if not self._fits(num_added + len(shared), table, unused, computed):
            return False
        if computed is not None:
            table = self._take(request, computed)
        self.pool.free(table[i] for i in unused)
        for i in unused:
            table[i] = NULL_BLOCK  # the runner is not told: nothing reads that entry again
        for i in shared:  # copy on write: another owner still reads what is there
            [copy] = self.pool.allocate(1)
            self.moves.copies.append((table[i], copy))
            self.pool.free([table[i]])
            table[i] = copy
            record.num_sent = min(record.num_sent, i)
        if num_added:
            table += self.pool.allocate(num_added)
        record.num_writable = len(table) * self.block_size if self.window is None else 0
        return True

    def take_changes(self, request: Request) -> tuple[int, Sequence[int]]:
        """The part of its block table that no step has told the runner yet: from which entry on, and the blocks."""
        record = self.records[request.request_id]
        first, end = record.num_sent, len(record.table)
        if first == end:
            return first, ()
        record.num_sent = end
        return first, record.table[first:]

    def cache_blocks(self, request: Request, num_computed: int | None = None) -> None:
        """Make the blocks that are full of computed tokens findable; called after a step. `num_computed`: a step in
        flight may have taken more for computed than is certain."""
        record = self.records[request.request_id]
        num_computed = request.num_computed_tokens if num_computed is None else num_computed
        num_full = min(num_computed, len(request.token_ids)) // self.block_size
        if num_full <= record.num_cached or not self.enable_prefix_caching:
            return
        table, hashes = record.table, self._hashes(request, num_full)
        for index in range(record.num_cached, num_full):
            if table[index] != NULL_BLOCK:
                self.pool.cache(table[index], hashes[index])
        record.num_cached = num_full

    def free(self, request: Request) -> None:
        """Give back all that the request owns, its last block first: heads of texts are what others share."""
        if (record := self.records.pop(request.request_id, None)) is not None:
            self.pool.free(reversed(record.table or []))
            self._drop_swapped(record)

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` own every block of `parent` too; the first of them to write into a shared block gets a copy."""
        table = self.tables[parent.request_id]
        self.pool.touch(table)
        record = self.records[parent.request_id]
        hashes = record.hashes[: parent.num_tokens // self.block_size]
        self.records[child.request_id] = RequestBlocks(list(table), hashes, record.num_cached)
        record.num_writable = 0  # the last block is shared now: the first to write into it needs a copy

    def swap_out(self, request: Request) -> bool:
        """Move what only this request owns to host memory and free the rest; False, and nothing changed, if host
        memory is full. Blocks that others share stay with them, and are looked for by hash on the way back.
        """
        used = ceil_div(request.num_computed_tokens, self.block_size)
        table = self.tables[request.request_id][:used]
        for i in self.window.outside(table, request.num_computed_tokens) if self.window is not None else ():
            table[i] = NULL_BLOCK  # nothing reads it again
        stays = [self.pool.ref_cnt[block] > 1 and self.pool.block_hash[block] is not None for block in table]
        moved = [block for block, kept in zip(table, stays) if block != NULL_BLOCK and not kept]
        if not moved or (places := self.tiers.to_host(moved)) is None:
            return False
        entries = [self.pool.block_hash[block] if kept else places.get(block) for block, kept in zip(table, stays)]
        hashes = self.records[request.request_id].hashes
        self.free(request)
        self.records[request.request_id] = RequestBlocks(hashes=hashes, swapped=entries)
        return True

    def prefetch(self, request: Request) -> None:
        """A request is going to wait: have read, meanwhile, what only the disk has of its prefix."""
        if self.tiers.disk is not None and self.enable_prefix_caching:
            self.tiers.prefetch(self._hashes(request, request.prefix_cache_limit // self.block_size))

    def take_moves(self) -> BlockMoves:
        """The copies to make before the next forward pass; asked once a step."""
        self.tiers.take_in_arrived()
        moves, self.tiers.moves = self.moves, BlockMoves()
        self.host.settle()
        return moves

    def distrust(self, moves: BlockMoves) -> None:
        """A step failed before it was known that these copies were made: what they should have written is no prefix any
        more. Every other block that has a hash was full before the step, and no step writes into one."""
        for _, block in moves.swap_in:
            self.pool.forget(block)
        for _, place in (*moves.swap_out, *moves.from_disk):
            self.host.forget(place)

    def blocks_needed(self, num_tokens: int, max_new_tokens: int) -> int:
        """The most blocks a request of `num_tokens` owns at once, when at most `max_new_tokens` come in one step."""
        num_blocks = ceil_div(num_tokens, self.block_size)
        return num_blocks if self.window is None else min(num_blocks, self.window.most_blocks(max_new_tokens))

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block, and every host place, is free or owned as often as counted."""
        self.pool.check_integrity([*self.tables.values(), *self.reserved.values()])
        held = [entry for record in self.records.values() for entry in record.swapped or () if isinstance(entry, int)]
        self.host.check_integrity(held)

    def _fits(self, wanted: int, table: list[int], unused: list[int], computed: ComputedBlocks | None) -> bool:
        available = self.pool.num_free + sum(self.pool.ref_cnt[table[i]] == 1 for i in unused)
        if computed is not None:  # hits without an owner are in the free queue, and leave it
            available -= sum(block != NULL_BLOCK and self.pool.ref_cnt[block] == 0 for block in table)
            wanted += len(computed.from_host)
        return wanted <= available

    def _take(self, request: Request, computed: ComputedBlocks) -> list[int]:
        """Own the computed blocks; those that are in host memory get new device blocks and a copy order."""
        table = list(computed.block_ids)
        self.pool.touch(table)
        for index, block in zip(computed.from_host, self.tiers.to_device(computed)):
            table[index] = block
        record = self.records[request.request_id]
        if computed.found or record.swapped is None:
            self.tiers.found.add(computed, request.num_tokens)
        self._drop_swapped(record)
        record.table, record.num_sent = table, 0
        # Blocks from host memory have lost their hash; cache_blocks finds the others known already.
        record.num_cached = min(computed.from_host, default=computed.num_tokens // self.block_size)
        return table

    def _drop_swapped(self, record: RequestBlocks) -> None:
        self.host.free([entry for entry in record.swapped or () if isinstance(entry, int)])
        record.swapped = None

    def _found(self, hits: list[int], from_host: dict[int, int]) -> ComputedBlocks:
        """The blocks of a prefix, and how many of its tokens each tier had."""
        num_tokens = len(hits) * self.block_size
        found = {"device": num_tokens, "host": 0, "disk": 0}
        for place in from_host.values():
            found[self.tiers.found_in(place)] += self.block_size
            found["device"] -= self.block_size
        return ComputedBlocks(hits, num_tokens, from_host, found)

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The prefix hashes of its first blocks, which have to be full."""
        hashes = self.records.setdefault(request.request_id, RequestBlocks()).hashes
        if len(hashes) < num_blocks:
            what = {"identity": self.identity, "block_size": self.block_size, "salt": request.cache_salt}
            if (adapter := getattr(request, "adapter_key", None)) is not None:  # a request of your own need not have it
                what["adapter"] = adapter
            root = root_hash(**what)
            extend_chain(hashes, root, request.token_ids, self.block_size, num_blocks)
        return hashes[:num_blocks]
