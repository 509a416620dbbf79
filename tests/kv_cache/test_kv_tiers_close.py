"""The end of an LLM: what memory holds goes to disk, threads end, nothing is computed any more;
and how much memory the tiers take."""

from __future__ import annotations

import threading

import pytest

from minillm import LLM
from minillm.kv_cache.disk import MOST_WAITING
from minillm.kv_cache.manager import KVCacheManager
from tests.helpers.shelf import Shelf
from tests.kv_cache.test_kv_cache_pool import Text
from tests.kv_cache.test_kv_tiers import serve_one
from tests.kv_cache.test_kv_tiers_engine import PARAMS, PROMPTS, ask, expected, folder, tiered  # noqa: F401


def threads_of(llm: LLM) -> list[threading.Thread]:
    disk = llm.engine.kv_cache.tiers.disk
    return [*disk.reader._threads, *disk.writer._threads]


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_the_next_process_finds_what_memory_held(folder, expected, tmp_path, ahead):  # noqa: F811
    """All prompts lie in the device's memory: nothing has fallen out of anything."""
    with tiered(folder, tmp_path / "kv", num_kv_blocks=100, async_scheduling=ahead) as llm:
        assert ask(llm)[0] == expected
        cached = set(llm.engine.kv_cache.pool.cached)
        assert len(cached) > 40 and len(llm.engine.kv_cache.tiers.disk) == 0 and not list((tmp_path / "kv").iterdir())
    assert {path.stem for path in (tmp_path / "kv").iterdir()} == {block_hash.hex() for block_hash in cached}
    assert llm.engine.runner.transfer.bytes_moved["to_disk"] == len(cached) * llm.engine.runner.cache.bytes_per_block
    second = tiered(folder, tmp_path / "kv", num_kv_blocks=100, host_blocks=100)
    said, found = ask(second)
    # All but the last token of a prompt may be found: five blocks of 20 tokens are four.
    assert said == expected and [one["disk"] for one in found] == [
        (len(one["prompt_token_ids"]) - 1) // 4 * 4 for one in PROMPTS
    ]
    second.close()


def test_what_is_in_host_memory_goes_too_and_nothing_twice(folder, expected, tmp_path):  # noqa: F811
    llm = tiered(folder, tmp_path / "kv", host_blocks=30)
    ask(llm, together=False)
    tiers = llm.engine.kv_cache.tiers
    host, device = set(llm.engine.kv_cache.host.cached), set(llm.engine.kv_cache.pool.cached)
    on_disk, moved = set(tiers.disk.files), llm.engine.runner.transfer.bytes_moved["to_disk"]
    assert len(host - device - on_disk) > 5 and device - on_disk and on_disk
    llm.close()
    assert set(tiers.disk.files) == host | device | on_disk
    new = (llm.engine.runner.transfer.bytes_moved["to_disk"] - moved) // llm.engine.runner.cache.bytes_per_block
    assert new == len(host | device) - len(on_disk & (host | device))
    with tiered(folder, tmp_path / "kv", num_kv_blocks=100, host_blocks=100) as second:
        assert ask(second)[0] == expected


def test_where_there_is_less_room_the_most_recent_stay(folder, tmp_path):  # noqa: F811
    llm = tiered(folder, tmp_path / "kv", num_kv_blocks=100)
    disk = llm.engine.kv_cache.tiers.disk
    disk.num_bytes = 5 * disk.file_bytes
    ask(llm, PROMPTS[:2], together=False)
    recent = [llm.engine.kv_cache.pool.block_hash[block] for block in llm.engine.kv_cache.pool.free_queue]
    recent = [block_hash for block_hash in recent if block_hash is not None]
    llm.close()
    assert list(disk.files) == recent[-5:] and len(list((tmp_path / "kv").iterdir())) == 5
    # No more was written.
    assert llm.engine.runner.transfer.bytes_moved["to_disk"] == 5 * llm.engine.runner.cache.bytes_per_block


def test_more_blocks_than_may_wait_are_all_written(folder, tmp_path):  # noqa: F811
    with tiered(folder, tmp_path / "kv", num_kv_blocks=200, block_size=1) as llm:
        ask(llm)
    assert len(llm.engine.kv_cache.tiers.disk) > 2 * MOST_WAITING and llm.engine.kv_cache.tiers.disk.num_dropped == 0


@pytest.mark.parametrize("tier", ["nothing", "host", "disk"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_a_closed_llm_says_so(folder, tmp_path, tier, ahead):  # noqa: F811
    if tier == "nothing":
        llm = LLM(folder, device="cpu", dtype="float32", block_size=4, num_kv_blocks=14, async_scheduling=ahead)
    else:
        llm = tiered(folder, tmp_path / "kv" if tier == "disk" else None, async_scheduling=ahead)
    ask(llm)
    stream, unread = llm.stream(PROMPTS[2], PARAMS), llm.stream(PROMPTS[0], PARAMS)
    assert len(next(stream).token_ids) == 1
    threads = threads_of(llm) if tier == "disk" else []
    assert all(thread.is_alive() for thread in threads) and len(threads) >= (tier == "disk")
    llm.close()
    assert not any(thread.is_alive() for thread in threads)
    assert [delta.finish_reason for delta in stream] == ["abort"]
    llm.engine.scheduler.check_integrity()
    assert llm.engine.kv_cache.pool.usage == 0 and not llm.engine.has_unfinished
    files = sorted(tmp_path.rglob("*.kv"))
    llm.close()  # once more: nothing happens
    assert sorted(tmp_path.rglob("*.kv")) == files and bool(files) == (tier == "disk")
    for use in (
        lambda: llm.generate(PROMPTS[0], PARAMS, use_tqdm=False), lambda: llm.stream(PROMPTS[0], PARAMS),
        lambda: next(unread), lambda: llm.beam_search(PROMPTS[0]), lambda: llm.save_prefix_cache(tmp_path / "x"),
        lambda: llm.load_prefix_cache(tmp_path / "x"), llm.engine.step,
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="this LLM is closed: it computes nothing any more; make a new one"):
            use()


def test_an_error_closes_too_and_is_the_one_that_is_seen(folder, tmp_path):  # noqa: F811
    with pytest.raises(ZeroDivisionError), tiered(folder, tmp_path / "kv") as llm:
        ask(llm, PROMPTS[:1])
        raise ZeroDivisionError
    assert llm.engine.is_closed and len(list((tmp_path / "kv").iterdir())) >= 5
    broken = tiered(folder, tmp_path / "other")
    ask(broken, PROMPTS[:1])
    broken.engine.runner.transfer.spill = lambda host, device: 1 / 0
    threads = threads_of(broken)
    with pytest.raises(ZeroDivisionError):
        broken.close()
    assert not any(thread.is_alive() for thread in threads)


# How much memory


def test_no_more_is_read_at_once_than_half_of_host_memory():
    """Whatever is asked for, fetched blocks that no place has yet are bounded; with the next step, reading goes on."""
    shelf = Shelf(at_once=False)
    manager = KVCacheManager(60, 4, num_host_blocks=40, disk=shelf)
    long = Text("long", list(range(4 * 50 + 1)))
    for block_hash in list(manager._hashes(long, 50)):
        shelf.write(block_hash, "written")
    manager.prefetch(long)
    assert len(manager.tiers.fetching) == 20 == manager.tiers.num_reading
    assert manager.get_computed_blocks(long).found["disk"] == 20 * 4 and manager.tiers.num_reading == 20
    manager.prefetch(long)
    assert not manager.tiers.fetching  # the twenty are in memory still, until the step copies them
    assert len(manager.take_moves().from_disk) == 20
    manager.prefetch(long)
    assert len(manager.tiers.fetching) == 20
    small = KVCacheManager(60, 4, num_host_blocks=2, disk=shelf)
    small.prefetch(long)
    assert len(small.tiers.fetching) == 8  # enough to keep a disk busy


def test_what_was_read_is_let_go_of_when_it_is_copied(folder, tmp_path):  # noqa: F811
    with tiered(folder, tmp_path / "kv", num_kv_blocks=100) as llm:
        ask(llm)
    second, moved = tiered(folder, tmp_path / "kv", num_kv_blocks=100, host_blocks=100), []
    move = second.engine.runner.transfer.move
    second.engine.runner.transfer.move = lambda moves: (move(moves), moved.extend(moves.from_disk))
    ask(second)
    assert len(moved) > 20 and not second.engine.kv_cache.tiers.disk.kept
    second.close()


def test_what_a_small_host_lets_fall_is_counted():
    manager = KVCacheManager(8, 4, num_host_blocks=2, disk=Shelf())
    serve_one(manager, [1] * 25)  # six full blocks
    serve_one(manager, [2] * 31)  # wants all the device's blocks in one step, and two places may move
    assert manager.tiers.num_lost == 4 and len(manager.host.cached) == 2
    plenty = KVCacheManager(8, 4, num_host_blocks=6, disk=Shelf())
    serve_one(plenty, [1] * 25), serve_one(plenty, [2] * 31)
    assert plenty.tiers.num_lost == 0
