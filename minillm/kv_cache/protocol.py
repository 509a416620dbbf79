"""The two sides of a cache manager: what the scheduler asks of it, and what it reads of a request.
Built in chapter 06."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from minillm.kv_cache.block_pool import BlockPool
from minillm.kv_cache.records import BlockMoves, ComputedBlocks


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


class KVCache(Protocol):
    """What the scheduler asks of a `KVCacheManager`."""

    pool: BlockPool
    tables: Mapping[str, list[int]]

    def get_computed_blocks(self, request: Any) -> ComputedBlocks: ...
    def allocate_slots(self, request: Any, num_new_tokens: int, computed: ComputedBlocks | None = None) -> bool: ...
    def cache_blocks(self, request: Any) -> None: ...
    def free(self, request: Any) -> None: ...
    def fork(self, parent: Any, child: Any) -> None: ...
    def swap_out(self, request: Any) -> bool: ...
    def take_moves(self) -> BlockMoves: ...
    def blocks_needed(self, num_tokens: int, max_new_tokens: int) -> int: ...
    def check_integrity(self) -> None: ...
