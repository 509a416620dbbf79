"""Window: which blocks of a table a sliding window still reads. Built in chapter 06.

table      [3, 0, 0, 5, 8]     block 3 holds attention sinks (chapter 17), the null block stands where nothing is read
window              |-----|    of the next token to compute
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from minillm.kv_cache.block_pool import NULL_BLOCK
from minillm.rounding import ceil_div


@dataclass(frozen=True)
class Window:
    """A token reads itself and the `num_tokens` - 1 tokens before it, and the first `num_sink_blocks` blocks."""

    num_tokens: int
    block_size: int
    num_sink_blocks: int = 0

    def first(self, num_computed: int) -> int:
        """The first block that the token at position `num_computed` reads."""
        return max(0, num_computed - self.num_tokens + 1) // self.block_size

    def outside(self, table: list[int], num_computed: int) -> list[int]:
        """Places of the table that no token from `num_computed` on reads, and that still hold a block."""
        first = min(self.first(num_computed), len(table))
        held = takewhile(lambda i: table[i] != NULL_BLOCK, range(first - 1, self.num_sink_blocks - 1, -1))
        return list(held)[::-1]  # what lies before them was given back in earlier steps

    def longest_prefix(self, hits: list[int], from_host: dict[int, int]) -> tuple[list[int], dict[int, int]]:
        """Of cached blocks (the null block for one that is not on the device) and those in host memory, the longest
        prefix whose last window is complete. What came before it is never read."""
        for num_blocks in range(len(hits), 0, -1):
            first = self.first(num_blocks * self.block_size)
            if all(hits[i] != NULL_BLOCK or i in from_host for i in range(first, num_blocks)):
                wanted = {i: place for i, place in from_host.items() if first <= i < num_blocks}
                return [NULL_BLOCK] * first + hits[first:num_blocks], wanted
        return [], {}

    def most_blocks(self, max_new_tokens: int) -> int:
        """The most blocks that a request owns at once, when at most `max_new_tokens` come in one step."""
        return self.num_sink_blocks + ceil_div(self.num_tokens + max_new_tokens + self.block_size, self.block_size)
