"""Checks of chapter 11: tile traffic, a snake, split-K, a last tile, a fused epilogue, turns dealt out.
Built in chapter 11.

The references are in `ch11_oracle`. `ch11_kernels` has the next three, `ch11_streams` the last.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable

import torch

from minillm.book.checks import Case, Checker, Draw, FunctionChecker
from minillm.book.checks.ch11_kernels import check_fused_epilogue, check_last_tile, check_split_k
from minillm.book.checks.ch11_oracle import (
    Tile,
    best_tile,
    multiply_adds,
    row_by_row,
    shared_bytes,
    snake,
    strips_loaded,
    tiled_product,
    walked_bytes,
)
from minillm.book.checks.ch11_streams import check_stream_k
from minillm.book.checks.patience import bounded
from minillm.book.traffic import record_traffic
from minillm.kernels.language import MODE

__all__ = [
    "check_fused_epilogue",
    "check_last_tile",
    "check_snake_order",
    "check_split_k",
    "check_stream_k",
    "check_tile_traffic",
    "row_by_row",
    "strips_loaded",
]


check_snake_order = Checker(
    "snake_order", hint="Group after group; even groups go down, odd ones up; rows alternate in direction."
)


# --- 1: the best tile


def _random_tiles(draw: Draw) -> tuple:
    m, n, k = (draw.randint(1, draw.rng.choice((20, 300))) for _ in range(3))
    tiles = [tuple(draw.rng.choice((16, 32, 64, 128)) for _ in range(3)) for _ in range(draw.randint(1, 9))]
    limit = draw.rng.choice((2_000, 10_000, 49_152, 101_376))
    return m, n, k, draw.rng.choice((1, 2, 4)), tiles, draw.randint(1, 5), limit


def _costs(got: object, expected: object, m: int, n: int, k: int, itemsize: int, tiles: list[Tile], *rest: int) -> str:
    """What the tiles in question need, load and do."""
    stages, limit = rest
    asked = [tile for tile in (got and got[0], expected and expected[0]) if tile in tiles] or tiles
    told = (
        f"{tile} needs {shared_bytes(tile, itemsize, stages):,} bytes of shared memory, loads "
        f"{walked_bytes(m, n, k, tile, itemsize):,} and does {multiply_adds(m, n, k, tile):,} multiply-adds"
        for tile in dict.fromkeys(asked)
    )
    return f"Of {limit:,} bytes of shared memory: {'; '.join(told)}." if asked else "The list of tiles is empty."


def _interpreted(case: Case, got: object, m: int, n: int, k: int, itemsize: int, tiles: list[Tile], *rest: int) -> None:
    """The count of a kernel that runs, where the interpreter is there to run it."""
    if MODE != "interpreted" or rest != (1, 10**9):
        return
    [tile] = tiles
    a, b, out = torch.ones(m, k), torch.ones(k, n), torch.zeros(m, n)
    with record_traffic() as traffic:
        tiled_product[-(-m // tile[0]), -(-n // tile[1])](
            a, b, out, m, n, k, TILE_M=tile[0], TILE_N=tile[1], TILE_K=tile[2]
        )
    case.equal(got[1], traffic.bytes_loaded, "bytes_loaded, where the interpreter counted a kernel with this tile,")


def _loaded(rows: Callable[[int, int], int], a: str = "columns", factor: int = 1) -> Callable[..., int]:
    """Mistaken counts of bytes: how many times A and B are loaded."""

    def count(m: int, n: int, k: int, tile: Tile, itemsize: int) -> int:
        times = {"rows": rows(m, tile[0]), "columns": rows(n, tile[1]), "once": 1}
        b = {"rows": "columns", "columns": "rows", "once": "once"}[a]
        return (itemsize if factor else 1) * (m * k * times[a] + k * n * times[b])

    return count


_up = lambda size, side: -(-size // side)


def _padded(m: int, n: int, k: int, tile: Tile, itemsize: int) -> int:
    return itemsize * _up(m, tile[0]) * _up(n, tile[1]) * _up(k, tile[2]) * tile[2] * (tile[0] + tile[1])


check_tile_traffic = FunctionChecker(
    "tile_traffic",
    best_tile,
    returns=lambda *given: "the result" if best_tile(*given) is None else ("the tile", "bytes_loaded"),
    examples=[
        (100, 60, 40, 2, [(32, 32, 16)], 2, 10_000),
        (100, 60, 40, 2, [(16, 16, 16), (32, 32, 16), (64, 64, 16), (16, 64, 32)], 2, 6_000),
    ],
    edges=[
        (33, 50, 20, 4, [(16, 32, 16)], 1, 10**9),
        (16, 17, 64, 4, [(16, 16, 32)], 1, 10**9),
        (1, 40, 5, 4, [(32, 16, 16)], 1, 10**9),
        (64, 1, 31, 4, [(32, 16, 16)], 1, 10**9),
        (61, 37, 50, 4, [(32, 16, 32)], 1, 10**9),
        (64, 64, 64, 2, [], 1, 10**6),
        (64, 64, 64, 4, [(32, 32, 16)], 2, 3_000),
        (64, 64, 64, 4, [(32, 32, 16)], 2, 8_191),  # a byte short
        (64, 64, 64, 4, [(32, 32, 16)], 2, 8_192),
        (64, 64, 64, 4, [(32, 32, 16)], 3, 8_192),
        (64, 64, 64, 2, [(64, 16, 16), (16, 64, 16)], 1, 10**6),  # equal in both: the first
        (64, 64, 64, 2, [(16, 64, 16), (64, 16, 16)], 1, 10**6),
        (60, 60, 40, 2, [(64, 64, 32), (64, 64, 16)], 1, 10**6),  # K is padded too
        (60, 60, 60, 2, [(128, 128, 16), (64, 64, 32), (64, 64, 16)], 1, 10**6),  # fewer masked lanes
        (1, 4096, 4096, 2, [(64, 64, 16), (16, 64, 16), (16, 128, 16)], 2, 10**6),  # decode at batch 1
    ],
    random=_random_tiles,
    trials=120,
    explain=_costs,
    also=_interpreted,
    hint="A is read once for every column of tiles, B once for every row of tiles; sorted(tiles) makes a new list.",
    misconceptions={
        "At the edges masked lanes load nothing; each program loads all of K.": dict(loads=_padded),
        "A is read once for every column of tiles, B once for every row.": dict(loads=_loaded(_up, "rows")),
        "Programs share nothing: each loads its own tiles, so a matrix is loaded several times.": dict(
            loads=_loaded(_up, "once")
        ),
        "The grid covers all of C: round up.": dict(loads=_loaded(lambda size, side: size // side)),
        "Return bytes, not elements.": dict(loads=_loaded(_up, factor=0)),
        "A tile fits if it takes at most shared_limit bytes: exactly full is full.": dict(spare=1),
        "num_stages times a tile of A and a tile of B lie in shared memory.": dict(
            needs=lambda tile, itemsize, stages: shared_bytes(tile, itemsize, 1)
        ),
        "The tile of C does not lie in shared memory.": dict(
            needs=lambda tile, itemsize, stages: shared_bytes(tile, itemsize, stages) + tile[0] * tile[1] * itemsize
        ),
        "An element in shared memory takes `itemsize` bytes.": dict(
            needs=lambda tile, itemsize, stages: shared_bytes(tile, 1, stages)
        ),
        "Multiply-adds count K rounded up to whole tiles, too.": dict(
            work=lambda m, n, k, tile: multiply_adds(m, n, tile[2], tile)
        ),
        "Of those that load the fewest bytes, the one with the fewest multiply-adds.": dict(
            work=lambda m, n, k, tile: 0
        ),
        "Of those that are equal in both, the first of the list.": dict(order=-1),
    },
)


# --- 2: a snake through the tiles


def whole_numbers_only(case: Case) -> None:
    """No `/` and no `divmod` in the function: a kernel calls it later."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(case.student)))
    except (OSError, TypeError, SyntaxError):
        return  # no text to look at: its results are judged all the same
    hint = (
        "Divide with //, so that whole numbers stay whole. The function becomes part of a kernel, "
        "and Triton has to compile it."
    )
    for node in ast.walk(tree):
        case.true(
            not isinstance(getattr(node, "op", None), ast.Div), f"{case.student.__name__} divides with /", hint=hint
        )
        case.true(
            not (isinstance(node, ast.Name) and node.id == "divmod"),
            f"{case.student.__name__} calls divmod",
            hint=f"// and % instead. {hint}",
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
        "A program knows only its number: compute its tile from that, without a loop over the programs before it.",
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
            "The row is right, so it is the direction: count a group's rows in the order in which they are walked. "
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
