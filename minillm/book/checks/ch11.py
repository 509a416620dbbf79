"""Checks of chapter 11: tile traffic, a snake through the tiles, split-K, a last tile, a fused epilogue.
Built in chapter 11.

The references are in `ch11_oracle`; `ch11_launches` runs kernels in the interpreter and looks at what each program
touched. `ch11_kernels` has the last three.
"""

from __future__ import annotations

import torch

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch06_oracle import bounded
from minillm.book.checks.ch11_kernels import check_fused_epilogue, check_last_tile, check_split_k
from minillm.book.checks.ch11_launches import (
    whole_numbers_only,
)
from minillm.book.checks.ch11_oracle import (
    Tile,
    chosen_tile,
    multiply_adds,
    row_by_row,
    snake,
    strips_loaded,
    tiled_product,
    walked_bytes,
)
from minillm.book.traffic import record_traffic
from minillm.kernels.language import MODE

__all__ = [
    "check_fused_epilogue",
    "check_last_tile",
    "check_snake_order",
    "check_split_k",
    "check_tile_traffic",
    "row_by_row",
    "strips_loaded",
]


check_tile_traffic = Checker(
    "tile_traffic",
    hint="A is read once for every column of tiles, B once for every row of tiles; a masked lane reads nothing.",
)
check_snake_order = Checker(
    "snake_order", hint="Group after group; even groups go down, odd ones up; rows go to and fro."
)


@check_tile_traffic.part("example")
def _traffic_example(case: Case) -> None:
    _chooses(case, 100, 60, 40, 2, [(32, 32, 16)], 2, 10_000)
    _chooses(case, 100, 60, 40, 2, [(16, 16, 16), (32, 32, 16), (64, 64, 16), (16, 64, 32)], 2, 6_000)


@check_tile_traffic.part("edges")
def _traffic_edges(case: Case) -> None:
    for m, n, k, tile in (
        (33, 50, 20, (16, 32, 16)),
        (16, 17, 64, (16, 16, 32)),
        (1, 40, 5, (32, 16, 16)),
        (64, 1, 31, (32, 16, 16)),
    ):
        _interpreted(case, m, n, k, tile)
    _chooses(case, 64, 64, 64, 2, [], 1, 10**6)
    _chooses(case, 64, 64, 64, 4, [(32, 32, 16)], 2, 8_191)  # a byte short
    _chooses(case, 64, 64, 64, 4, [(32, 32, 16)], 2, 8_192)
    _chooses(case, 64, 64, 64, 4, [(32, 32, 16)], 3, 8_192)
    _chooses(case, 64, 64, 64, 2, [(64, 16, 16), (16, 64, 16)], 1, 10**6)  # equal in both: the first
    _chooses(case, 64, 64, 64, 2, [(16, 64, 16), (64, 16, 16)], 1, 10**6)
    # The same bytes: fewer masked lanes.
    _chooses(case, 60, 60, 60, 2, [(128, 128, 16), (64, 64, 32), (64, 64, 16)], 1, 10**6)
    _chooses(case, 60, 60, 40, 2, [(64, 64, 32), (64, 64, 16)], 1, 10**6)  # K is padded too
    _chooses(case, 1, 4096, 4096, 2, [(64, 64, 16), (16, 64, 16), (16, 128, 16)], 2, 10**6)  # decode at batch 1


@check_tile_traffic.part("random")
def _traffic_random(case: Case) -> None:
    sizes = (16, 32, 64, 128)
    for _ in range(120):
        m, n, k = (case.randint(1, case.rng.choice((20, 300))) for _ in range(3))
        tiles = [tuple(case.rng.choice(sizes) for _ in range(3)) for _ in range(case.randint(1, 9))]
        _chooses(
            case,
            m,
            n,
            k,
            case.rng.choice((1, 2, 4)),
            tiles,
            case.randint(1, 5),
            case.rng.choice((2_000, 10_000, 49_152, 101_376)),
        )
    _interpreted(case, case.randint(1, 70), case.randint(1, 70), case.randint(1, 70), (32, 16, 32))


def _chooses(
    case: Case, m: int, n: int, k: int, itemsize: int, tiles: list[Tile], num_stages: int, shared_limit: int
) -> None:
    expected = chosen_tile(m, n, k, itemsize, tiles, num_stages, shared_limit)
    with case.hinting(
        f"{case.hint} No argument may change: tiles.sort() sorts the caller's list, sorted(tiles) makes a new one."
    ):
        got = case.call(m, n, k, itemsize, tiles, num_stages, shared_limit)
    told = f"for m={m}, n={n}, k={k}, itemsize={itemsize}, num_stages={num_stages}, shared_limit={shared_limit:,}"
    if expected is None:
        need = [num_stages * (bm + bn) * bk * itemsize for bm, bn, bk in tiles]
        case.true(
            got is None,
            f"the result is {got!r} {told}; expected None",
            hint=f"No tile fits: they need {need} bytes of shared memory." if need else "There is no tile to choose.",
        )
        return
    case.true(
        isinstance(got, tuple) and len(got) == 2 and got[0] in tiles,
        f"the result is {got!r} {told}; expected (tile, bytes_loaded), with a tile of the list as it stands there",
        hint=(
            f"One of the tiles fits into shared memory: {expected[0]} needs "
            f"{num_stages * (expected[0][0] + expected[0][1]) * expected[0][2] * itemsize:,} bytes."
        ),
    )
    mine, right = got[0], expected[0]
    case.is_a(got[1], int, f"bytes_loaded {told}", hint="Bytes are whole numbers: divide with //, not with /.")
    case.equal(
        got[1],
        walked_bytes(m, n, k, mine, itemsize),
        f"bytes_loaded with the tile {mine} {told}\n  bytes_loaded",
        hint=(
            f"The grid has {-(-m // mine[0])} rows and {-(-n // mine[1])} columns of tiles. "
            "At the edges masked lanes load nothing; each program loads all of K."
        ),
    )
    if mine != right:
        need = num_stages * (mine[0] + mine[1]) * mine[2] * itemsize
        case.true(
            need <= shared_limit,
            f"the tile is {mine} {told}, and it needs {need:,} bytes of shared memory",
            hint="num_stages times a tile of A and a tile of B, each element `itemsize` bytes.",
        )
        facts = "; ".join(
            (
                f"{t} loads {walked_bytes(m, n, k, t, itemsize):,} bytes and does {multiply_adds(m, n, k, t):,} "
                "multiply-adds"
            )
            for t in (right, mine)
        )
        case.fail(
            f"the tile is {mine} {told}; expected {right}",
            hint=f"Fewest bytes, then fewest multiply-adds, masked lanes included, then the first: {facts}.",
        )
    case.equal(tiles.index(mine), tiles.index(right))


def _interpreted(case: Case, m: int, n: int, k: int, tile: Tile) -> None:
    """The count of a kernel that runs, where the interpreter is there to run it."""
    _chooses(case, m, n, k, 4, [tile], 1, 10**9)
    if MODE != "interpreted":
        return
    a, b, out = torch.ones(m, k), torch.ones(k, n), torch.zeros(m, n)
    grid = (-(-m // tile[0]), -(-n // tile[1]))
    with record_traffic() as traffic:
        tiled_product[grid](a, b, out, m, n, k, TILE_M=tile[0], TILE_N=tile[1], TILE_K=tile[2])
    case.equal(
        case.call(m, n, k, 4, [tile], 1, 10**9)[1],
        traffic.bytes_loaded,
        (
            f"bytes_loaded, where the interpreter counted a kernel with m={m}, n={n}, "
            f"k={k} and the tile {tile}\n  bytes_loaded"
        ),
    )


@check_snake_order.part("example")
def _snake_example(case: Case) -> None:
    whole_numbers_only(case)
    _snakes(case, 3, 5, 2)
    _snakes(case, 4, 5, 2)


@check_snake_order.part("edges")
def _snake_edges(case: Case) -> None:
    for grid in (
        (1, 1, 1),
        (1, 7, 3),
        (7, 1, 3),
        (4, 6, 3),
        (3, 4, 1),
        (4, 3, 8),
        (4, 9, 2),
        (5, 7, 3),
        (2, 8, 4),
        (3, 3, 3),
    ):
        _snakes(case, *grid)
    # The last program of a grid of a million times a million tiles. Its groups are 3 columns wide, and the last has 1.
    size, told = (
        10**6,
        "A program has its number and nothing else: compute its tile from that, without going through those before it.",
    )
    row = 0 if (size // 3) % 2 else size - 1
    for pid, tile in (
        (size * size - 1, (row, size - 1)),
        (size * size - size, (size - 1 - row, size - 1)),
        (0, (0, 0)),
    ):
        got = bounded(case, 300, told, case.student, pid, size, size, 3)
        case.equal(
            tuple(got), tile, f"the tile of program {pid:,} of {size:,} x {size:,} tiles in groups of 3\n  the tile"
        )


@check_snake_order.part("random")
def _snake_random(case: Case) -> None:
    for _ in range(40):
        _snakes(case, case.randint(1, 12), case.randint(1, 12), case.randint(1, 6))


def _snakes(case: Case, tiles_m: int, tiles_n: int, group: int) -> None:
    order, expected, told = (
        [],
        snake(tiles_m, tiles_n, group),
        f"in a grid of {tiles_m} x {tiles_n} tiles in groups of {group}",
    )
    owner: dict[tuple[int, int], int] = {}
    for pid, right in enumerate(expected):
        got = case.call(pid, tiles_m, tiles_n, group)
        case.true(isinstance(got, tuple) and len(got) == 2, f"the result is {got!r}, not (row, column)")
        for value in got:
            case.is_a(
                value,
                int,
                f"a number of the tile of program {pid} {told}",
                hint="Divide with //, so that whole numbers stay whole.",
            )
        ragged = (
            "The last group may be narrower than `group`: its rows have fewer tiles."
            if pid >= tiles_n // group * group * tiles_m
            else None
        )
        case.true(
            0 <= got[0] < tiles_m and 0 <= got[1] < tiles_n,
            f"program {pid} gets tile {got} {told}, and there is no such tile; expected {right}",
            hint=ragged,
        )
        case.true(
            got not in owner,
            f"programs {owner.get(got)} and {pid} both get tile {got} {told}; expected {right} for program {pid}",
            hint=ragged or "Every tile belongs to one program.",
        )
        owner[got] = pid
        order.append(got)
    wrong = next((pid for pid, (got, right) in enumerate(zip(order, expected)) if got != right), None)
    if wrong is not None:
        rooms = [
            room for room in range(2, tiles_m + tiles_n) if strips_loaded(order, room) > strips_loaded(expected, room)
        ]
        costs = [
            (
                f" A cache of {room} strips loads {strips_loaded(order, room)} in your order, "
                f"{strips_loaded(expected, room)} in this one."
            )
            for room in rooms[:1]
        ]
        case.call(wrong, tiles_m, tiles_n, group)  # the last of the calls that the message shows
        turn = (
            "The row is right, so it is the direction: count the rows of a group in the order taken. "
            if order[wrong][0] == expected[wrong][0]
            else ""
        )
        case.fail(
            (
                f"program {wrong} gets tile {order[wrong]} {told}; expected {expected[wrong]}, "
                f"after {expected[max(wrong - 3, 0) : wrong]}"
            ),
            hint=(
                f"{turn}It is in group {expected[wrong][1] // group}, counted from 0. "
                f"All tiles are there, each once.{''.join(costs)}"
            ),
        )
    case.equal(strips_loaded(order, 3), strips_loaded(expected, 3))
