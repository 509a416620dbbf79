"""A pytest plugin: `-p minillm.bench.shard --shard 2/8` runs every eighth test, the second of eight.
Built in chapter 14.

Tests of kernels take the time of their compilations. Eight processes with a shard each compile on eight cores, and
Triton's cache on disk keeps what they built for all later processes. A test's shard depends on its name alone.
"""

from __future__ import annotations

from zlib import crc32


def pytest_addoption(parser) -> None:
    parser.addoption("--shard", default="1/1", help="K/N: run the tests of shard K, 1 to N.")


def parse(shard: str) -> tuple[int, int]:
    """(K - 1, N) of "K/N". Raises ValueError for anything else."""
    index, _, count = shard.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--shard {shard!r} is not K/N with 1 <= K <= N, such as 2/8")
    return int(index) - 1, int(count)


def pytest_collection_modifyitems(config, items) -> None:
    index, count = parse(config.getoption("--shard"))
    mine = [crc32(item.nodeid.encode()) % count == index for item in items]
    config.hook.pytest_deselected(items=[item for item, kept in zip(items, mine) if not kept])
    items[:] = [item for item, kept in zip(items, mine) if kept]
