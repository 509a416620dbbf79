"""Memory in large pages: whose numbers it holds, what it takes, and that it is given back."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from minillm.kernels import huge_pages, native
from minillm.kv_cache.paged import PagedKVCache

MIB = 2**20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system says there what memory is made of")


def mapping_of(tensor: torch.Tensor) -> dict[str, int] | None:
    """Bytes of the mapping in which a tensor lies, by what the system calls them; None if there is none."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            if found is not None:
                return found
            start, end = (int(place, 16) for place in first.split("-"))
            found = {} if start <= tensor.data_ptr() < end else None
        elif found is not None and rest[-1:] == ["kB"]:
            found[first.rstrip(":")] = int(rest[0]) * 1024
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_copies_lie_side_by_side_and_hold_the_same_numbers(dtype):
    torch.manual_seed(0)
    numbers = [torch.randn(shape).to(dtype) for shape in ((3, 5), (7,), (0, 4), (), (64, 33))]
    copies = [huge_pages.copy(tensor.T) if tensor.dim() == 2 else huge_pages.copy(tensor) for tensor in numbers]
    for tensor, copy in zip(numbers, copies):
        expected = tensor.T if tensor.dim() == 2 else tensor
        assert copy.shape == expected.shape and copy.dtype is dtype and copy.is_contiguous()
        assert torch.equal(copy.float(), expected.float())
        assert copy.data_ptr() % huge_pages.ALIGNMENT == 0
    copies[0].zero_()
    assert torch.equal(copies[1].float(), numbers[1].float())  # its neighbour


def test_a_piece_may_be_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr(huge_pages, "CHUNK", 4096)
    arena = huge_pages.Arena()
    pieces = [arena.take(size) for size in (100, 5000, 64, 4000)]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [len(piece) for piece in pieces] == [100, 5000, 64, 4000]
    assert [piece.unique().tolist() for piece in pieces] == [[0], [1], [2], [3]]


@linux
def test_zeros_take_memory_when_they_are_written_and_in_large_pages():
    zeros = huge_pages.zeros((16, MIB), torch.float32)
    before = mapping_of(zeros)
    assert before["Size"] >= 64 * MIB
    zeros[4:12] = 1.0
    after = mapping_of(zeros)
    assert 32 * MIB <= after["Rss"] - before["Rss"] <= 36 * MIB  # what was not written has taken nothing
    if SETTING.exists() and "[never]" not in SETTING.read_text():
        assert after["AnonHugePages"] - before["AnonHugePages"] >= 16 * MIB
    assert zeros.sum() == 8 * MIB


@linux
def test_a_chunk_is_given_back_with_its_last_piece():
    arena = huge_pages.Arena()
    first, second = arena.take(1000), arena.take(5000)
    place = first.data_ptr()
    assert second.data_ptr() == place + 1024
    view = torch.empty(0, dtype=torch.uint8).set_(second.untyped_storage(), second.storage_offset(), second.shape)
    del arena, first, second
    gc.collect()
    view.fill_(7)
    assert mapping_of(view) is not None
    del view
    gc.collect()
    assert not any(start <= place < end for start, end in mappings())


def mappings() -> list[tuple[int, int]]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [tuple(int(place, 16) for place in line.split()[0].split("-")) for line in lines]


@linux
def test_weights_and_pages_of_the_cache_lie_there():
    if native.library() is None:
        pytest.skip("no C compiler")
    packed = native.pack(torch.randn(64, 32))
    assert mapping_of(packed)["Size"] >= huge_pages.CHUNK
    cache = PagedKVCache(1, 2, 16, num_blocks=4096, block_size=16, dtype=torch.float32)
    cache.keys[0].fill_(1.0)
    if SETTING.exists() and "[never]" not in SETTING.read_text():
        assert mapping_of(cache.keys[0])["AnonHugePages"] > 0
