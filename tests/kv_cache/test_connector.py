"""Bytes that go from one connector to another, and what is left behind when they do not."""

from __future__ import annotations

import resource
import threading

import pytest
import torch

from minillm.kv_cache.connector import (
    KVHandle,
    SharedMemoryConnector,
    TCPConnector,
    layout_of,
    pack_blocks,
    remove_leftovers,
    unpack_blocks,
)
from minillm.kv_cache.paged import PagedKVCache

SECRET = b"known to the fleet"


@pytest.fixture(params=["shm", "tcp"])
def pair(request, tmp_path):
    """A source and a destination."""
    if request.param == "shm":
        ends = [SharedMemoryConnector("minillm-test-a", tmp_path), SharedMemoryConnector("minillm-test-b", tmp_path)]
    else:
        ends = [TCPConnector(SECRET), TCPConnector(SECRET)]
    yield ends
    for end in ends:
        end.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_put_is_got_once(pair):
    source, destination = pair
    sent = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 7, 5_000_000)]
    handles = [source.put(data) for data in sent]
    for data, handle in reversed(list(zip(sent, handles))):
        assert torch.equal(destination.get(handle), data) and handle.num_bytes == data.numel()
        with pytest.raises(ConnectionError, match=r"gone|fetched"):
            destination.get(handle)


def test_what_is_dropped_or_left_at_the_end_is_gone(pair):
    source, destination = pair
    dropped, left = source.put(torch.zeros(4, dtype=torch.uint8)), source.put(torch.ones(4, dtype=torch.uint8))
    source.drop(dropped)
    source.drop(dropped)
    with pytest.raises(ConnectionError):
        destination.get(dropped)
    source.close()
    with pytest.raises(ConnectionError):
        destination.get(left)


def test_what_found_no_room_leaves_nothing(tmp_path):
    source = SharedMemoryConnector("minillm-test", tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # as a full /dev/shm, half of it is written
    try:
        with pytest.raises(OSError, match=r"requested|too large"):
            source.put(torch.zeros(1_000_000, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_handle_of_a_process_before_this_one_drops_nothing_here(pair):
    """Keys are counted from zero in each process: a replica that was started again has had the same ones."""
    source, destination = pair
    handle = source.put(torch.ones(4, dtype=torch.uint8))
    source.drop(handle._replace(place=handle.place + "1"))
    assert destination.get(handle).tolist() == [1] * 4


def test_many_readers_at_once_get_their_own(pair):
    source, destination = pair
    handles = [source.put(torch.full((1000,), number, dtype=torch.uint8)) for number in range(16)]
    found: dict[int, set[int]] = {}
    threads = [
        threading.Thread(target=lambda at=at: found.update({at: set(destination.get(handles[at]).tolist())}))
        for at in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {number: {number} for number in range(16)}


def test_a_stranger_gets_nothing():
    source, stranger = TCPConnector(SECRET), TCPConnector(b"a guess")
    handle = source.put(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(Exception, match=r"digest|rejected|fetched"):
        stranger.get(handle)
    friend = TCPConnector(SECRET)
    assert friend.get(handle).numel() == 8
    for one in (source, stranger, friend):
        one.close()
    with pytest.raises(ConnectionError):
        friend.get(KVHandle("tcp", source.place, "0", 8))


def test_leftovers_of_a_process_that_was_killed_are_removed_by_their_prefix(tmp_path):
    SharedMemoryConnector("minillm-x", tmp_path).put(torch.zeros(4, dtype=torch.uint8))
    SharedMemoryConnector("minillm-y", tmp_path).put(torch.zeros(4, dtype=torch.uint8))
    assert remove_leftovers("minillm-x", tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["minillm-y-0"]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "int4"])
def test_blocks_are_packed_and_unpacked_as_they_are(kv_dtype):
    def cache() -> PagedKVCache:
        made = PagedKVCache(3, 2, 6, 9, 3, torch.float32, kv_dtype=kv_dtype)
        for layers in made.parts.values():
            for layer in layers:
                layer.view(torch.uint8).copy_(torch.randint(120, layer.view(torch.uint8).shape, dtype=torch.uint8))
        return made

    source, destination = cache(), cache()
    assert layout_of(source) == layout_of(destination) != layout_of(PagedKVCache(3, 2, 6, 9, 4, torch.float32))
    before = destination.read_blocks(list(range(10)))
    data = pack_blocks(source, [7, 2, 4])
    unpack_blocks(destination, [1, 9], data, [2, 0], 3)  # block 4 into 1, block 7 into 9
    after, wanted = destination.read_blocks(list(range(10))), source.read_blocks([4, 7])
    for name in after:
        assert torch.equal(after[name][:, [1, 9]], wanted[name])
        assert torch.equal(after[name][:, [0, 2, 3, 4, 5, 6, 7, 8]], before[name][:, [0, 2, 3, 4, 5, 6, 7, 8]])
    with pytest.raises(ValueError, match="bytes are not 2 blocks"):
        unpack_blocks(destination, [1, 2], data, [0, 1], 2)
