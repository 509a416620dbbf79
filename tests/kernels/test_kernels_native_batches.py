"""The CPU's attention over pages in batches of many sequences: each gets the bits that it gets alone.

With many sequences a thread reads all KV heads of a decoding one together, and knows its next tile while it computes
one; alone, a sequence is read head by head."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from minillm.kernels import native
from minillm.kernels.native_structs import KV_FLAGS, Pages, Sequences

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")
CODES = [None, torch.int8, torch.float8_e4m3fn, torch.uint8]  # what pages hold; uint8 are pairs of int4


class Batch:
    """Random sequences in random pages. What no token was written to is no number."""

    def __init__(self, seed: int, dtype: torch.dtype, kv_dtype: torch.dtype | None):
        rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self.kv_heads, group = rng.choice([1, 2, 3, 5]), rng.choice([1, 2, 3, 4, 7])
        self.dim, self.size = rng.choice([16, 32, 48, 64, 96, 20]), rng.choice([16, 16, 32, 48, 1, 5, 8])
        self.window, self.sinks = rng.choice([(None, 0), (None, 0), (9, 0), (40, 3), (20, 17)])
        self.turned = self.sinks > 0 and rng.random() < 0.5
        self.dtype, self.kv_dtype, self.heads = dtype, kv_dtype, self.kv_heads * group
        kinds = [0, 1, 1, 1, 1, 1, 2, 3, rng.randint(4, 120)]
        self.news = [rng.choice(kinds) for _ in range(rng.choice([8, 9, 13, 30]))]
        self.lens = [new + rng.choice([0, 1, 15, 16, 33, rng.randint(1, 300)]) if new else 0 for new in self.news]
        counts = [-(-length // self.size) for length in self.lens]
        order, self.blocks = list(range(1, 1 + sum(counts))), [[] for _ in counts]
        rng.shuffle(order)
        for own, count in zip(self.blocks, counts):
            own += [order.pop() for _ in range(count)]
        bytes_of_dim = self.dim // 2 if kv_dtype is torch.uint8 else self.dim
        shape = 1 + sum(counts), self.kv_heads
        self.keys = torch.full((*shape, bytes_of_dim, self.size), float("nan"), dtype=dtype)
        self.values = torch.full((*shape, self.size, bytes_of_dim), float("nan"), dtype=dtype)
        self.scales = None
        if kv_dtype is not None:
            self.keys, self.values = (torch.zeros(x.shape, dtype=kv_dtype) for x in (self.keys, self.values))
            self.scales = torch.full((2, *shape, self.size), float("nan")).unbind()
        self.logits = torch.randn(self.heads, generator=noise) if rng.random() < 0.3 else None
        self.past = [self._made(noise, length) for length in self.lens]
        for own, blocks, length, new in zip(self.past, self.blocks, self.lens, self.news):
            if length - new:  # what came before is written by steps of its own
                self._attend([([part[: length - new] for part in own], blocks, length - new)])

    def _made(self, noise: torch.Generator, length: int) -> list[Tensor]:
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (torch.randn(length, n, self.dim, generator=noise) for n in heads)
        turn = torch.randn(2, length, self.dim, generator=noise)
        return [q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), turn.transpose(0, 1)]

    def _attend(self, parts: list[tuple[list[Tensor], list[int], int]]) -> list[Tensor]:
        """The tokens of some sequences, each with its blocks and its length after the step, in one batch."""
        q, k, v, turn = (torch.cat(tensors) for tensors in zip(*(own for own, _, _ in parts)))
        news, lens = [len(own[0]) for own, _, _ in parts], [length for _, _, length in parts]
        table = torch.zeros(len(parts), max(1, *(len(blocks) for _, blocks, _ in parts), 1), dtype=torch.int32)
        slots = []
        for row, (own, blocks, length) in zip(table, parts):
            row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            positions = range(length - len(own[0]), length)
            slots += [blocks[position // self.size] * self.size + position % self.size for position in positions]
        starts = torch.tensor([0, *news]).cumsum(0)
        sequences = Sequences.of(starts, torch.tensor(lens), table, torch.tensor(slots, dtype=torch.int64), max(lens))
        pages = Pages.of(self.keys, self.values, self.scales, self.window, self.sinks, self.logits)
        turn = turn.transpose(0, 1).contiguous() if self.turned else None
        out = native.paged_attention(q, k, v, pages, sequences, turn)
        return list(out.split(news))

    def parts(self) -> list[tuple[list[Tensor], list[int], int]]:
        return [
            ([part[length - new :] for part in own], blocks, length)
            for own, blocks, length, new in zip(self.past, self.blocks, self.lens, self.news)
        ]

    def together(self) -> list[Tensor]:
        return self._attend(self.parts())

    def alone(self) -> list[Tensor]:
        return [self._attend([part])[0] for part in self.parts() if len(part[0][0])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", CODES)
@pytest.mark.parametrize("seed", range(16))
def test_a_sequence_gets_the_bits_that_it_gets_alone(seed, kv_dtype, dtype):
    assert kv_dtype is None or kv_dtype in KV_FLAGS
    batch = Batch(seed, dtype, kv_dtype)
    together, alone = [out for out in batch.together() if len(out)], batch.alone()
    assert len(together) == len(alone) == sum(new > 0 for new in batch.news)
    for at, (one, other) in enumerate(zip(together, alone)):
        assert one.isfinite().all() and torch.equal(one, other), f"sequence {at} of {batch.__dict__}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("seed", [8, 39])  # of block and head sizes that are read in place
def test_a_value_that_is_not_finite_stays_with_its_token_and_head(seed, bad, dtype):
    """Heads and tokens that are computed together do not share what one of them reads."""
    batch = Batch(seed, dtype, None)
    group = batch.heads // batch.kv_heads
    at = next(at for at, new in enumerate(batch.news) if new > 1 and new * group <= 6)
    clean, head = batch.together(), batch.kv_heads - 1
    batch.past[at][2][-1, head, 3] = bad
    clean[at][-1, head * group :, 3] = bad
    for out, expected in zip(batch.together(), clean):
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())


GUARDED = """
import ctypes, mmap, sys
import torch
from minillm.kernels import native
from minillm.kernels.native_structs import Pages, Sequences

memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), mmap.PAGESIZE, 0) == 0  # before the table nothing can be read
size, length, news, window, dim = (int(given) for given in sys.argv[1:])
blocks = -(-length // size)
table = (ctypes.c_int32 * blocks).from_address(start + mmap.PAGESIZE)
table[:] = range(blocks)
table = torch.frombuffer(table, dtype=torch.int32)[None]
for dtype in (torch.float32, torch.bfloat16):
    q, k, v = (torch.randn(news, heads, dim).to(dtype) for heads in (4, 2, 2))
    keys, values = torch.zeros(blocks, 2, dim, size, dtype=dtype), torch.zeros(blocks, 2, size, dim, dtype=dtype)
    index = torch.tensor([0, news]), torch.tensor([length]), table, torch.arange(length - news, length)
    native.paged_attention(q, k, v, Pages.of(keys, values, None, window), Sequences.of(*index, length))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect as Linux has it")
@pytest.mark.parametrize("size, length, news, window, dim", [(1, 21, 5, 8, 96), (3, 20, 4, 6, 16), (16, 40, 1, 9, 64)])
def test_nothing_before_the_block_table_is_read(size, length, news, window, dim):
    """Pairs of keys may begin before the first one that is read."""
    given = map(str, (size, length, news, window, dim))
    done = subprocess.run([sys.executable, "-c", GUARDED, *given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
