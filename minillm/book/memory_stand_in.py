"""What a scheduler asks a cache manager, answered without a cache. Built in chapter 05."""

from __future__ import annotations

from types import SimpleNamespace


class StandInMemory:
    """The answers that are the same for every stand-in; `allocate_slots` and `free` are left to it."""

    def __init__(self, num_blocks=0):
        self.tables = {}  # request id -> its blocks
        self.pool = SimpleNamespace(num_blocks=num_blocks)

    def get_computed_blocks(self, request):
        return SimpleNamespace(num_tokens=0, block_ids=[])  # no part of a prompt is there already

    def blocks_needed(self, num_tokens, max_new_tokens):
        return 0

    def cache_blocks(self, request): ...

    def check_integrity(self): ...

    def take_moves(self): ...
