"""References of chapter 11: bytes of a tile, the snake's order, slices of K, what a program may touch.
Built in chapter 11."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from minillm.kernels.language import tl, triton

Tile = tuple[int, int, int]


def walked_bytes(m: int, n: int, k: int, tile: Tile, itemsize: int) -> int:
    """Bytes that the programs load from device memory, one program after the other; the closed form is the reader's."""
    tile_m, tile_n, _ = tile
    return (
        itemsize
        * k
        * sum(min(tile_m, m - i) + min(tile_n, n - j) for i in range(0, m, tile_m) for j in range(0, n, tile_n))
    )


def multiply_adds(m: int, n: int, k: int, tile: Tile) -> int:
    """Multiply-adds of all programs, those of masked lanes too."""
    size = 1
    for length, side in zip((m, n, k), tile):
        size *= -(-length // side) * side
    return size


def shared_bytes(tile: Tile, itemsize: int, num_stages: int) -> int:
    return num_stages * (tile[0] + tile[1]) * tile[2] * itemsize


def best_tile(
    m: int, n: int, k: int, itemsize: int, tiles: Sequence[Tile], num_stages: int, shared_limit: int,
    *, loads: Callable[..., int] = walked_bytes, work: Callable[..., int] = multiply_adds,
    needs: Callable[..., int] = shared_bytes, spare: int = 0, order: int = 1,
) -> tuple[Tile, int] | None:  # fmt: skip
    """The first tile that nothing beats, by trying all of them. The keywords are mistakes."""
    fitting = [tile for tile in tiles if needs(tile, itemsize, num_stages) + spare <= shared_limit]
    ranked = [(loads(m, n, k, tile, itemsize), work(m, n, k, tile)) for tile in fitting][::order]
    if not fitting:
        return None
    place = ranked.index(min(ranked))
    return fitting[::order][place], ranked[place][0]


@triton.jit
def tiled_product(a, b, out, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """The product of the warm-up, run so that the interpreter can count what it loads."""
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    cols = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        inner = start + tl.arange(0, TILE_K)
        left = tl.load(a + rows[:, None] * k + inner[None, :], (rows[:, None] < m) & (inner[None, :] < k), 0.0)
        right = tl.load(b + inner[:, None] * n + cols[None, :], (inner[:, None] < k) & (cols[None, :] < n), 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(out + rows[:, None] * n + cols[None, :], total, (rows[:, None] < m) & (cols[None, :] < n))


def snake(tiles_m: int, tiles_n: int, group: int) -> list[tuple[int, int]]:
    """Every tile in the order of the exercise, walked: groups of columns, up and down, to and fro."""
    order = []
    for number, left in enumerate(range(0, tiles_n, group)):
        columns = list(range(left, min(left + group, tiles_n)))
        rows = list(range(tiles_m))
        for before, row in enumerate(rows[::-1] if number % 2 else rows):
            order += [(row, column) for column in (columns[::-1] if before % 2 else columns)]
    return order


def strips_loaded(order: Sequence[tuple[int, int]], room: int) -> int:
    """Strips that come from device memory when a cache has room for `room` of them and drops the least recently used.

    The program of tile (i, j) uses A's i-th strip of rows, then B's j-th strip of columns.
    """
    cache: OrderedDict[tuple[str, int], None] = OrderedDict()
    loaded = 0
    for i, j in order:
        for strip in (("A", i), ("B", j)):
            loaded += strip not in cache
            cache[strip] = None
            cache.move_to_end(strip)
            if len(cache) > room:
                cache.popitem(last=False)
    return loaded


def row_by_row(tiles_m: int, tiles_n: int) -> list[tuple[int, int]]:
    """The order of a grid whose second number is the column: each row from left to right, from the top."""
    return [(i, j) for i in range(tiles_m) for j in range(tiles_n)]


def slices(k: int, num_splits: int, tile: int) -> list[range]:
    """K in slices of whole tiles, as equal as can be, the longer ones first."""
    tiles = -(-k // tile)
    count, cuts = min(num_splits, tiles), [0]
    for s in range(count):
        cuts.append(cuts[-1] + tiles // count + (s < tiles % count))
    return [range(first * tile, min(last * tile, k)) for first, last in pairwise(cuts)]


@dataclass(frozen=True)
class Part:
    """What one program has to do: a tile of the output, over a slice of K."""

    rows: range
    cols: range
    inner: range


def parts(m: int, n: int, inner: Sequence[range], tile: int) -> list[tuple[int, Part]]:
    """(slice, its work), tile after tile."""
    return [
        (s, Part(range(i, min(i + tile, m)), range(j, min(j + tile, n)), part))
        for s, part in enumerate(inner)
        for i in range(0, m, tile)
        for j in range(0, n, tile)
    ]


def product(a: Tensor, b: Tensor, num_splits: int = 1) -> Tensor:
    """In float64, rounded once."""
    return (a.double() @ b.double()).to(a.dtype)


def silu_of_gate_times_up(x: Tensor, gate_up: Tensor, *, gate_last: bool = False, silu: bool = True) -> Tensor:
    """silu(x gateᵀ) · (x upᵀ) in float64, rounded once. The keywords are mistakes."""
    gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=1)
    if gate_last:
        gate, up = up, gate
    return (gate * (torch.sigmoid(gate) if silu else 1.0) * up).to(x.dtype)
