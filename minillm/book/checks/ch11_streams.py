"""Judges turns of tiles that are dealt out to programs, as Stream-K does (arXiv 2301.03598). Built in chapter 11."""

from __future__ import annotations

from minillm.book.checks import Draw, FunctionChecker

Piece = tuple[int, int, int]  # (tile, first turn, the turn after the last)


def streamed(
    num_tiles: int,
    turns: int,
    num_programs: int,
    *,
    waves: int = 1,
    even: bool = True,
    cut: bool = True,
    in_blocks: bool = False,
    whole_first: bool = False,
    idle: bool = True,
) -> list[list[Piece]]:
    """The pieces of each program; the switches are mistakes."""
    left = num_tiles % num_programs
    shared = min(num_tiles, left + waves * num_programs) if left else 0
    total, pieces = shared * turns, []
    each = -(-total // num_programs)
    for program in range(num_programs):
        first, end = program * total // num_programs, (program + 1) * total // num_programs
        if not even:
            first, end = min(program * each, total), min((program + 1) * each, total)
        mine = _in_tiles(first, end, turns) if cut else [(first // turns, first % turns, first % turns + end - first)]
        mine = [piece for piece in mine if piece[1] < piece[2]]
        rest = list(range(shared, num_tiles))
        a_program = -(-len(rest) // num_programs)
        own = rest[program * a_program : (program + 1) * a_program] if in_blocks else rest[program::num_programs]
        whole = [(tile, 0, turns) for tile in own]
        pieces.append(whole + mine if whole_first else mine + whole)
    return pieces if idle else [mine for mine in pieces if mine]


def _in_tiles(first: int, end: int, turns: int) -> list[Piece]:
    """The turns first:end of all, cut where a tile ends."""
    found = []
    while first < end:
        tile, begin = divmod(first, turns)
        stop = min(turns, begin + end - first)
        found.append((tile, begin, stop))
        first += stop - begin
    return found


def _only_waves(num_tiles: int, turns: int, num_programs: int) -> list[list[Piece]]:
    return [[(tile, 0, turns) for tile in range(p, num_tiles, num_programs)] for p in range(num_programs)]


def _all_streamed(num_tiles: int, turns: int, num_programs: int) -> list[list[Piece]]:
    total = num_tiles * turns
    return [_in_tiles(p * total // num_programs, (p + 1) * total // num_programs, turns) for p in range(num_programs)]


def _random_product(draw: Draw) -> tuple:
    num_programs = draw.randint(1, draw.rng.choice((4, 12, 30)))
    tiles = draw.rng.choice((draw.randint(1, 4 * num_programs + 2), num_programs * draw.randint(1, 4)))
    return tiles, draw.randint(1, draw.rng.choice((3, 20))), num_programs


check_stream_k = FunctionChecker(
    "stream_k",
    streamed,
    returns="the pieces",
    examples=[(5, 4, 2), (9, 4, 4)],
    edges={
        "every wave is full": (8, 5, 4),
        "there are fewer tiles than programs": (3, 8, 4),
        "there are fewer turns than programs": (1, 3, 5),
        "there is one program": (7, 3, 1),
        "there is one tile": (1, 10, 4),
        "one tile is left over": (13, 6, 4),
        "one tile is missing for full waves": (15, 6, 4),
        "a tile has one turn": (10, 1, 4),
        "the last of the shared turns divide evenly": (6, 4, 4),
        "there are many tiles": (300, 7, 132),
    },
    random=_random_product,
    trials=120,
    hint="Number the shared turns consecutively, tile after tile; program p begins at number p * total // programs.",
    misconceptions={
        "These are whole tiles only: the tiles that fill no wave, and one wave more, are split between all programs.": (
            _only_waves
        ),
        "Whole tiles are assigned in turn: the first to program 0, the next to program 1.": dict(in_blocks=True),
        "All tiles are cut here. Only the incomplete wave and the full one before it are.": _all_streamed,
        "Only the incomplete wave is cut here. The full wave before it is, too.": dict(waves=0),
        "The shared turns are divided as evenly as possible: program p begins at p * total // programs.": dict(
            even=False
        ),
        "A piece ends where its tile ends: the next turn belongs to the next tile.": dict(cut=False),
        "A program does its shared pieces first, then its whole tiles.": dict(whole_first=True),
        "A program without work has an empty list.": dict(idle=False),
    },
)
