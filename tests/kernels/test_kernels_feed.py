"""What the products of a layer bring nearer for the attention of the next one: every line of its pages, once."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch

from minillm.kernels import native
from minillm.kernels.native_build import compile_shared, unit_flags
from minillm.kernels.native_structs import KV_FLAGS, Pages, Sequences

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
LINE = 64  # bytes
HARNESS = """
#include "native.c"

// The first `most` lines of a feed, taken `at_once`; returns how many there were before it ended.
long fed(const Pages *next, const Sequences *seqs, const char **lines, long most, long at_once) {
    long taken = 0;
    begin_feed(next, seqs);
    for (; is_fed() && taken + at_once <= most; taken += at_once) take_feed(lines + taken, at_once);
    return taken;
}

long few(void) { return 2 * ROWS; }
"""


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8", "int4"])
def build(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("feed")
    (folder / "harness.c").write_text(HARNESS)
    kv = {"int8": torch.int8, "int4": torch.uint8}.get(request.param)
    dtype = torch.bfloat16 if request.param == "bfloat16" else torch.float32
    include = f"-I{native.SOURCE.parent}"
    flags = (*native.FLAGS, *unit_flags(), include, *native.DTYPES[dtype], *KV_FLAGS.get(kv, ()))
    compile_shared(shutil.which("gcc") or shutil.which("clang"), flags, folder / "harness.c", folder / "harness.so")
    loaded = ctypes.CDLL(str(folder / "harness.so"))
    loaded.fed.restype = loaded.few.restype = ctypes.c_long
    return loaded, kv or dtype


def step(dtype: torch.dtype, num_seqs: int, size: int = 16, **pages):
    dim = 32 if dtype is torch.uint8 else 64  # bytes of int4 are pairs
    keys, values = torch.zeros(300, 3, dim, size, dtype=dtype), torch.zeros(300, 3, size, dim, dtype=dtype)
    lens = torch.arange(1, num_seqs + 1) * 7 % 60 + 1
    table = (
        torch.randperm(300, generator=torch.manual_seed(0), dtype=torch.int64)[: num_seqs * 4].view(num_seqs, 4).int()
    )
    starts, slots = torch.arange(num_seqs + 1), torch.zeros(num_seqs, dtype=torch.int64)
    sequences = Sequences.of(starts, lens, table, slots, int(lens.max()))
    return Pages.of(keys, values, **pages), sequences, (keys, values, lens, table, size)


def lines_of(keys, values, lens, table, size) -> list[int]:
    """Those of every block that a sequence has, of keys and of values in turn."""
    num_bytes, lines = keys[0].numel() * keys.element_size(), []
    for length, row in zip(lens.tolist(), table.tolist()):
        for block in row[: -(-length // size)]:
            for pages in (keys, values):
                start = pages.data_ptr() + block * num_bytes
                lines += range(start, start + num_bytes, LINE)
    return lines


@pytest.mark.parametrize("at_once", [1, 7, 288])
def test_every_line_of_the_pages_is_brought_once(build, at_once):
    loaded, dtype = build
    pages, sequences, memory = step(dtype, 20)
    expected = lines_of(*memory)
    most = len(expected) + at_once
    taken = (ctypes.c_void_p * most)()
    count = loaded.fed(ctypes.byref(pages), ctypes.byref(sequences), taken, ctypes.c_long(most), ctypes.c_long(at_once))
    assert -(-len(expected) // at_once) * at_once == count, "a feed ends with its last line"
    assert list(taken[: len(expected)]) == expected
    assert all(line in (expected[-1], expected[-1] + LINE) for line in taken[len(expected) : count])


@pytest.mark.parametrize("of", [{}, dict(num_seqs=20, window=8), dict(num_seqs=20, window=8, sinks=4)])
def test_few_sequences_and_windows_are_not_fed(build, of):
    loaded, dtype = build
    pages, sequences, _ = step(dtype, **{"num_seqs": loaded.few(), **of})
    taken = (ctypes.c_void_p * 64)()
    assert not loaded.fed(ctypes.byref(pages), ctypes.byref(sequences), taken, ctypes.c_long(64), ctypes.c_long(1))
    assert not loaded.fed(None, ctypes.byref(sequences), taken, ctypes.c_long(64), ctypes.c_long(1))
