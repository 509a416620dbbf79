"""The state of every KV block as a short text. Built in chapter 23.

    f  free     no owner, nothing in it            c  cached   no owner, a prefix hit takes it back
    o  owned    by one request                     s  shared   by several requests

"o12c30f" are twelve owned blocks, thirty cached ones and one free one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from minillm.kv_cache.block_pool import NULL_BLOCK, BlockPool

MOST = 4096  # states that are sent; of more blocks, several share one
LETTERS = np.array(["f", "o", "s", "c"])  # of the states 0 to 3
RANK = np.array([0, 2, 3, 1])  # how important a state is
BY_RANK = np.argsort(RANK)


def block_map(pool: BlockPool) -> dict[str, Any]:
    """How many blocks are in each state, and the states in the order of the blocks.

    The map ends behind the last block that was ever used: an allocator that takes the lowest free block leaves the
    others untouched. With `blocks_each` over 1, a letter stands for that many neighbours and names the most important
    state among them: shared before owned before cached before free. In any thread: the lists are copied at once.
    """
    owners = np.frombuffer(array("q", pool.ref_cnt), dtype=np.int64)
    hashed = np.zeros(len(owners), dtype=bool)
    hashed[list(pool.cached.values())] = True
    states = np.minimum(owners, 2)
    states[(owners == 0) & hashed] = 3
    states = states[1:]  # without the null block
    free, owned, shared, cached = np.bincount(states, minlength=4).tolist()
    used = np.flatnonzero(states)
    extent = int(used[-1]) + 1 if len(used) else 0
    blocks_each = -(-extent // MOST) or 1
    shown = states[:extent]
    if blocks_each > 1:
        groups = np.pad(shown, (0, -extent % blocks_each)).reshape(-1, blocks_each)
        shown = BY_RANK[RANK[groups].max(axis=1)]
    return {
        "total": pool.num_blocks,
        "free": free,
        "cached": cached,
        "owned": owned,
        "shared": shared,
        "blocks_each": blocks_each,
        "map": _run_lengths(shown),
    }


def ranges(table: Sequence[int]) -> str:
    """The blocks of a table, without the null block: "3-5,9"."""
    parts: list[list[int]] = []
    for block in sorted(set(table) - {NULL_BLOCK}):
        if parts and parts[-1][-1] == block - 1:
            parts[-1][1:] = [block]
        else:
            parts.append([block])
    return ",".join("-".join(map(str, part)) for part in parts)


def _run_lengths(states: np.ndarray) -> str:
    """ "ooof" is "o3f"."""
    if not len(states):
        return ""
    starts = np.concatenate(([0], np.flatnonzero(np.diff(states)) + 1, [len(states)]))
    lengths, letters = np.diff(starts).tolist(), LETTERS[states[starts[:-1]]].tolist()
    return "".join(letter if length == 1 else f"{letter}{length}" for letter, length in zip(letters, lengths))
