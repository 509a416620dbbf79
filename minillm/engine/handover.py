"""Handover: a running request leaves one engine and goes on in another, with its keys and values. Built in chapter 22.

    source        copy_blocks   blocks that are full, while the request goes on decoding      [0 1 2 3 4]
                  copy_blocks   those that were filled meanwhile                                        [5]
                  take_out      what is left; the request ends here                                       [6 part]
    destination   stage         full blocks become a part of the prefix cache
                  take_in       the request runs on with the next step

    layer by layer, while the source computes the prompt (`minillm.engine.layerwise`):
    destination   reserve       blocks for the whole prompt, which arriving layers are written into
                  take_reserved the request runs on with them; or `release`, and they are free

Full blocks travel by their hash (chapter 07), so blocks that the destination has are not sent, and blocks that it
loses meanwhile are computed again: a handover may fail, its tokens cannot be wrong. All functions are called between
two steps, by the thread that steps the engine. Llumnix (Sun et al. 2024) calls this live migration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from minillm.engine.engine import Engine
from minillm.engine.request import Request, RequestSpec, RequestStatus
from minillm.kv_cache.block_pool import NULL_BLOCK
from minillm.kv_cache.connector import pack_blocks, unpack_blocks
from minillm.kv_cache.records import RequestBlocks
from minillm.rounding import ceil_div

MOST_AT_ONCE = 32  # blocks that one copy takes, so that the steps go on in between


class CopiedBlocks(NamedTuple):
    """Full blocks of a request that goes on."""

    hashes: list[bytes]
    data: Tensor | None  # of these blocks; None for no block
    end: int  # the next copy begins with this block
    num_left: int  # blocks from there on
    num_generated: int  # output tokens so far


class TakenOut(NamedTuple):
    """A request that has left. `entries` is its block table: a hash, the number of a block in `data`, or None for a
    block that no layer reads any more."""

    num_computed_tokens: int
    entries: list[bytes | int | None]
    data: Tensor | None


def resumed(spec: RequestSpec, output_token_ids: Sequence[int]) -> Request:
    """A request that has generated some tokens elsewhere. Its noise is keyed by seed and output position (chapter 01),
    so it goes on with the tokens that it would have had there."""
    request = Request.of(spec)
    request.token_ids += output_token_ids
    request.output_token_ids += output_token_ids
    return request


def num_certain_tokens(request: Request) -> int:
    """How many of its tokens have keys and values that no step changes any more. The last token is always computed
    again: its logits are wanted."""
    return min(request.num_computed_tokens, len(request.token_ids) - 1)


def copy_blocks(engine: Engine, request_id: str, first: int) -> CopiedBlocks | None:
    """Full blocks from number `first` on, at most MOST_AT_ONCE of them; None if the request is not here."""
    request, record = _found(engine, request_id)
    if request is None:
        return None
    if record is None:  # it waits, or is swapped out
        return CopiedBlocks([], None, first, 0, len(request.output_token_ids))
    num_full = min(record.num_cached, num_certain_tokens(request) // engine.kv_cache.block_size)
    end = min(num_full, first + MOST_AT_ONCE)
    chosen = [index for index in range(first, end) if record.table[index] != NULL_BLOCK]
    data = pack_blocks(engine.runner.cache, [record.table[index] for index in chosen]) if chosen else None
    hashes = [record.hashes[index] for index in chosen]
    return CopiedBlocks(hashes, data, max(first, end), max(0, num_full - end), len(request.output_token_ids))


def take_out(engine: Engine, request_id: str, num_copied: int) -> TakenOut | None:
    """End the request here, and give what a destination with its first `num_copied` blocks needs to go on; None if it
    is not here. Tokens of a step in flight are dropped: the destination generates the same ones."""
    request, record = _found(engine, request_id)
    if request is None:
        return None
    taken = TakenOut(0, [], None)
    if record is not None and (num_tokens := num_certain_tokens(request)) > 0:
        table = record.table[: ceil_div(num_tokens, engine.kv_cache.block_size)]
        num_copied = min(num_copied, record.num_cached, num_tokens // engine.kv_cache.block_size)
        entries: list[bytes | int | None] = [
            None if block == NULL_BLOCK else record.hashes[index] for index, block in enumerate(table[:num_copied])
        ]
        sent = [block for block in table[num_copied:] if block != NULL_BLOCK]
        numbers = iter(range(len(sent)))
        entries += [None if block == NULL_BLOCK else next(numbers) for block in table[num_copied:]]
        taken = TakenOut(num_tokens, entries, pack_blocks(engine.runner.cache, sent) if sent else None)
    engine.finish("abort", request)
    return taken


def stage(engine: Engine, hashes: Sequence[bytes], data: Tensor) -> int:
    """Make copied blocks a part of the prefix cache, those that it has not and has room for; returns how many."""
    pool, kv_cache = engine.kv_cache.pool, engine.kv_cache
    new = [index for index, block_hash in enumerate(hashes) if pool.lookup(block_hash) is None][: pool.num_free]
    if not new or not kv_cache.enable_prefix_caching:
        return 0
    blocks = _allocate(engine, len(new))
    unpack_blocks(engine.runner.cache, blocks, data, new, len(hashes))
    for block, index in zip(blocks, new):
        pool.cache(block, hashes[index])
    pool.free(reversed(blocks))
    return len(new)


def take_in(engine: Engine, request: Request, taken: TakenOut) -> bool:
    """Let a request from elsewhere run on from the next step; False, and nothing changed, if its blocks are not all
    here, or the batch or the pool has no room: add it then like any other request, which computes them again.

    Raises ValueError for an id that is in use.
    """
    pool, is_full = engine.kv_cache.pool, _is_full(engine, request)
    found = {entry: pool.lookup(entry) for entry in taken.entries if isinstance(entry, bytes)}
    if is_full or not taken.entries or None in found.values():
        return False
    pool.touch(found.values())
    numbers = [entry for entry in taken.entries if isinstance(entry, int)]
    if len(numbers) > pool.num_free:
        pool.free(found.values())
        return False
    blocks = _allocate(engine, len(numbers))
    if blocks:
        unpack_blocks(engine.runner.cache, blocks, taken.data, numbers, len(numbers))
    table = [
        NULL_BLOCK if entry is None else found[entry] if isinstance(entry, bytes) else blocks[entry]
        for entry in taken.entries
    ]
    _join(engine, request, table, taken.num_computed_tokens)
    return True


def reserve(engine: Engine, key: str, hashes: Sequence[bytes], num_cached: int, num_tokens: int) -> list[int] | None:
    """Blocks for a request of `num_tokens` tokens that is on its way here; the first `num_cached` are in the prefix
    cache, by their hashes. None, and nothing changed, if one of them is not, or if less than half of the free blocks
    would be left to the requests that run."""
    kv_cache, pool = engine.kv_cache, engine.kv_cache.pool
    found = [pool.lookup(block_hash) for block_hash in hashes[:num_cached]]
    count = ceil_div(num_tokens, kv_cache.block_size) - num_cached
    if None in found or 2 * count > pool.num_free:
        return None
    pool.touch(found)
    if count > pool.num_free:
        pool.free(found)
        return None
    blocks = kv_cache.reserved[key] = found + _allocate(engine, count)
    return blocks


def release(engine: Engine, key: str) -> None:
    """The request will not come; nothing happens for a key that holds no blocks."""
    engine.kv_cache.pool.free(reversed(engine.kv_cache.reserved.pop(key, [])))


def take_reserved(engine: Engine, key: str, request: Request, hashes: Sequence[bytes], num_tokens: int) -> bool:
    """Let a request from elsewhere run on from the next step with the blocks that `key` holds, which have the keys and
    values of its first `num_tokens` tokens; False if the batch has no room for it: its full blocks are in the prefix
    cache then, where adding it like any other request finds them. `hashes` are those of full blocks of its prompt.

    Raises ValueError for an id that is in use.
    """
    kv_cache, blocks = engine.kv_cache, engine.kv_cache.reserved[key]
    for block, block_hash in zip(blocks[: num_tokens // kv_cache.block_size], hashes):
        if kv_cache.enable_prefix_caching:
            kv_cache.pool.cache(block, block_hash)
    if _is_full(engine, request):
        release(engine, key)
        return False
    _join(engine, request, kv_cache.reserved.pop(key), num_tokens)
    return True


def _is_full(engine: Engine, request: Request) -> bool:
    scheduler = engine.scheduler
    if request.request_id in scheduler.requests:
        raise ValueError(f"request_id={request.request_id!r} is in use")
    return len(scheduler.running) >= scheduler.max_num_seqs or scheduler.gate is not None


def _join(engine: Engine, request: Request, table: list[int], num_tokens: int) -> None:
    """It runs, and owns these blocks."""
    scheduler = engine.scheduler
    engine.kv_cache.records[request.request_id] = RequestBlocks(table)
    request.num_computed_tokens = request.max_computed_tokens = num_tokens
    request.num_cached_tokens = min(num_tokens, request.num_prompt_tokens)
    scheduler.requests[request.request_id] = request
    scheduler.waiting.join(request)
    request.move(RequestStatus.RUNNING)
    scheduler.running.append(request)


def _found(engine: Engine, request_id: str) -> tuple[Request | None, RequestBlocks | None]:
    """The request, if it has not ended, and its record, if it owns blocks."""
    request = engine.scheduler.requests.get(request_id)
    record = engine.kv_cache.records.get(request_id)
    return request, record if request is not None and record is not None and record.table is not None else None


def _allocate(engine: Engine, count: int) -> list[int]:
    """Blocks that may be written at once: what the tiers want to keep of them is copied first."""
    blocks = engine.kv_cache.pool.allocate(count)
    if (transfer := getattr(engine.runner, "transfer", None)) is not None:
        transfer.move(engine.kv_cache.take_moves())
    return blocks
