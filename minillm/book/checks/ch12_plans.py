"""The check of chapter 12's plans of skipped, whole and masked tiles. Built in chapter 12."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from minillm.book.checks import Case, Draw, FunctionChecker, Timed

WHOLE, MASKED, SKIPPED = "whole", "masked", "skipped"
Run = tuple[str, int, int]  # (kind, first tile, the tile after the last)


@dataclass(frozen=True)
class Plan:
    """The last `num_queries` of `num_keys` positions ask, behind a prefix that all of them see."""

    num_queries: int
    num_keys: int
    tile_m: int
    tile_n: int
    prefix: int
    window: int | None

    def positions(self, tile: int) -> range:
        """The positions of one tile's queries."""
        past = self.num_keys - self.num_queries
        return range(past + tile * self.tile_m, past + min((tile + 1) * self.tile_m, self.num_queries))

    def keys(self, tile: int) -> range:
        """The keys of one tile, those that do not exist too."""
        return range(tile * self.tile_n, (tile + 1) * self.tile_n)

    def sees(self, position: int, key: int) -> bool:
        """The rule of the statement, word for word."""
        if key >= self.num_keys:
            return False
        return key < self.prefix or (key <= position and (self.window is None or key > position - self.window))

    def kind(self, query_tile: int, key_tile: int) -> tuple[str, str]:
        """(kind, why), by asking for each query and key."""
        shown: dict[bool, tuple[int, int]] = {}
        for position in self.positions(query_tile):
            for key in self.keys(key_tile):
                shown.setdefault(self.sees(position, key), (position, key))
        if True not in shown:
            return SKIPPED, "None of these queries sees any of these keys."
        if False not in shown:
            return WHOLE, "Each of these queries sees all of these keys."
        beyond = ", which does not exist" if shown[False][1] >= self.num_keys else ""
        return MASKED, (
            f"The query at position {shown[True][0]} sees key {shown[True][1]}; "
            f"the query at position {shown[False][0]} does not see key {shown[False][1]}{beyond}."
        )

    def runs(self, query_tile: int) -> list[Run]:
        """The kind of a tile changes only where one of these keys lies in it."""
        first, last = self.positions(query_tile)[0], self.positions(query_tile)[-1]
        window = self.num_keys if self.window is None else self.window
        edges = (0, self.prefix, first + 1, last + 1, first - window + 1, last - window + 1, self.num_keys)
        end = -(-self.num_keys // self.tile_n)
        cuts = {min(max(edge // self.tile_n + step, 0), end) for edge in edges for step in (0, 1)}
        found: list[Run] = []
        for begin, stop in pairwise(sorted(cuts | {end})):
            kind, _ = self.kind(query_tile, begin)
            if found and found[-1][0] == kind:
                begin = found.pop()[1]
            found.append((kind, begin, stop))
        return found


def planned(*numbers: Any) -> list[list[Run]]:
    """The runs of each query tile."""
    plan = Plan(*numbers)
    return [plan.runs(tile) for tile in range(-(-plan.num_queries // plan.tile_m))]


def _well_formed(case: Case, got: Any, *numbers: Any) -> None:
    """The runs' form, and the first tile that is of another kind."""
    plan, right = Plan(*numbers), planned(*numbers)
    case.is_a(got, list, "the result")
    last = "The last tile may not be full; it counts all the same."
    case.equal(len(got), len(right), "the number of query tiles", hint=last)
    key_tiles = right[0][-1][2]
    for query_tile, runs in enumerate(got):
        end, before = 0, None
        for run in runs:
            _is_run(case, run, query_tile)
            case.true(
                run[1] == end and run[2] > run[1],
                f"query tile {query_tile}: the run {run!r} comes after tile {end - 1}; "
                f"each run begins where the one before ended, and none is empty: {runs!r}",
            )
            told = f"query tile {query_tile}: two {run[0]!r} runs side by side, {runs!r}"
            case.true(run[0] != before, told, hint="They are one run.")
            end, before = run[2], run[0]
        told = f"query tile {query_tile}: the end of the last run"
        case.equal(end, key_tiles, told, hint=f"{plan.num_keys} keys are {key_tiles} tiles, skipped ones too.")
    for query_tile, runs in enumerate(got):
        for kind, begin, end in runs:
            for right_kind, start, stop in right[query_tile]:
                if kind != right_kind and max(begin, start) < min(end, stop):
                    _another_kind(case, plan, query_tile, max(begin, start), kind)


def _is_run(case: Case, run: Any, query_tile: int) -> None:
    case.true(
        isinstance(run, tuple) and len(run) == 3 and run[0] in (SKIPPED, WHOLE, MASKED),
        f"a run of query tile {query_tile} is {run!r}, not a tuple (kind, begin, end)",
        hint="Each run is a tuple, and its kind one of 'skipped', 'whole' and 'masked'.",
    )
    for number in run[1:]:
        told = f"a bound of the run {run!r}"
        case.is_a(number, int, told, hint="Divide with //, so that whole numbers stay whole.")


def _another_kind(case: Case, plan: Plan, query_tile: int, key_tile: int, kind: str) -> None:
    positions, keys = plan.positions(query_tile), plan.keys(key_tile)
    expected, why = plan.kind(query_tile, key_tile)
    case.fail(
        f"query tile {query_tile} (positions {positions[0]} to {positions[-1]}) and key tile {key_tile} "
        f"(keys {keys[0]} to {keys[-1]}): it is {kind!r}, expected {expected!r}",
        hint=why,
    )


def _random(draw: Draw) -> tuple:
    num_queries = draw.randint(1, 25)
    num_keys = num_queries + draw.rng.choice((0, draw.randint(0, 40)))
    prefix = draw.rng.choice((0, draw.randint(0, num_keys + 1)))
    window = draw.rng.choice((None, draw.randint(1, num_keys + 4)))
    return num_queries, num_keys, draw.randint(1, 9), draw.randint(1, 9), prefix, window


def _far(*numbers: Any) -> Timed:
    return Timed(
        "a plan of many tiles",
        lambda draw: numbers,
        "A program has no time to look at each tile: compute where the runs begin and end.",
        lines=20_000,
    )


check_plan_tiles = FunctionChecker(
    "plan_tiles",
    planned,
    returns="the runs",
    form=_well_formed,
    examples=[(8, 20, 4, 4, 3, 6), (12, 12, 4, 4, 0, None)],
    edges=[
        (1, 1, 16, 16, 0, None),
        (1, 17, 16, 16, 0, None),
        (1, 32, 16, 16, 0, 16),
        (1, 32, 16, 16, 0, 17),
        (16, 16, 16, 16, 16, 1),
        (10, 10, 4, 3, 7, None),
        (10, 10, 3, 4, 10, 2),
        (9, 30, 4, 8, 0, 1),
        (9, 30, 4, 8, 30, None),
        (20, 20, 8, 4, 6, 3),
        (20, 40, 4, 8, 21, 9),
        (20, 40, 16, 4, 8, 5),
        (33, 33, 32, 16, 0, 40),
        (5, 64, 8, 64, 0, None),
        (24, 24, 8, 1, 5, 4),
        (24, 24, 1, 8, 5, 4),
        (12, 30, 6, 6, 18, 6),
        (12, 30, 6, 6, 19, 1),
    ],
    timed=(_far(100, 10**15, 16, 64, 1000, 4096), _far(40, 10**15 + 7, 16, 128, 10**14 + 5, None)),
    random=_random,
    trials=60,
    hint="A tile is skipped if no query sees any of it, whole if all see all of it. Try the first and the last query.",
)
