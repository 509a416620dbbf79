"""The prefix cache on disk: written, and taken over by the next process. Built in chapter 07.

A file holds the cached blocks, scales included, with their hashes. A hash says model, dtype and tokens, so a block of
another model could never be a hit; the header is checked all the same, because a file that would never help is a
mistake to name.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from minillm.kv_cache.manager import KVCacheManager
from minillm.kv_cache.paged import PagedKVCache

FORMAT = "minillm prefix cache 1"


def save(path: str | Path, manager: KVCacheManager, cache: PagedKVCache) -> int:
    """Write every block cached on the device, those in use too; returns how many.
    Raises ValueError when there is none."""
    _check_enabled(manager)
    if not manager.pool.cached:
        raise ValueError("the prefix cache is empty: nothing to save; serve a prompt of at least one block first")
    hashes, blocks = zip(*manager.pool.cached.items())
    parts = {name: rows.contiguous() for name, rows in cache.read_blocks(list(blocks)).items()}
    header = _header(manager, cache) | {"hashes": json.dumps([block_hash.hex() for block_hash in hashes])}
    save_file(parts, path, metadata=header)
    return len(blocks)


def restore(path: str | Path, manager: KVCacheManager, cache: PagedKVCache) -> int:
    """Take blocks over as far as free memory holds them, and those that are not known yet; returns how many.

    Raises ValueError naming what differs when the file was written by another model or layout, or is no such file.
    """
    _check_enabled(manager)
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check(path, header, _header(manager, cache))
            parts = {name: file.get_tensor(name) for name in cache.parts}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{path} is no {FORMAT} file, or is damaged: {error}") from error
    pool = manager.pool
    hashes = [bytes.fromhex(block_hash) for block_hash in json.loads(header["hashes"])]
    new = [index for index, block_hash in enumerate(hashes) if pool.lookup(block_hash) is None]
    uncached = sum(pool.block_hash[block] is None for block in pool.free_queue)  # nothing known is thrown out for it
    new = new[:uncached]
    if not new:
        return 0
    empty = list(islice(pool.free_queue, len(new)))  # empty blocks stand in front of cached ones
    pool.touch(empty)
    cache.write_blocks(empty, {name: rows[:, new] for name, rows in parts.items()})
    for block, index in zip(empty, new):
        pool.cache(block, hashes[index])
    pool.free(reversed(empty))
    return len(new)


def _check_enabled(manager: KVCacheManager) -> None:
    if not manager.enable_prefix_caching:
        raise ValueError(
            "this engine has no prefix cache: enable_prefix_caching is False, or kv_retention switched it off"
        )


def _header(manager: KVCacheManager, cache: PagedKVCache) -> dict[str, str]:
    return {
        "format": FORMAT,
        "dtype": str(cache.dtype),  # of the keys and values: before the model, whose name it is a part of
        "model": manager.identity,
        "block_size": str(manager.block_size),
        "layout": str((len(cache.keys), *cache.keys[0].shape[1:])),
    }


def _check(path: str | Path, found: dict[str, str], wanted: dict[str, str]) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ValueError(
                f"{path}: {name} is {found.get(name)!r}, this engine has {value!r}; the cache cannot be used"
            )
