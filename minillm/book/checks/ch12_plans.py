"""Judges plans of skipped, whole and masked tiles, by asking for each query and key. Built in chapter 12."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minillm.book.checks import Case
from minillm.book.checks.patience import bounded

WHOLE, MASKED, SKIPPED = "whole", "masked", "skipped"


@dataclass(frozen=True)
class Plan:
    """A call of exercise 2: the last `num_queries` of `num_keys` positions ask,
    behind a prefix that all of them see."""

    num_queries: int
    num_keys: int
    tile_m: int
    tile_n: int
    prefix: int
    window: int | None

    @property
    def args(self) -> tuple:
        return self.num_queries, self.num_keys, self.tile_m, self.tile_n, self.prefix, self.window

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
            return SKIPPED, "none of these queries sees any of these keys"
        if False not in shown:
            return WHOLE, "each of these queries sees all of these keys"
        seen, unseen = (
            f"the query at position {shown[is_seen][0]} {verb} key {shown[is_seen][1]}"
            for is_seen, verb in ((True, "sees"), (False, "does not see"))
        )
        return MASKED, f"{seen}; {unseen}{', which does not exist' if shown[False][1] >= self.num_keys else ''}"


def plans(case: Case, plan: Plan) -> None:
    """Every tile, by brute force."""
    runs = _runs_of(case, plan, case.call(*plan.args))
    for query_tile, found in enumerate(runs):
        for kind, begin, end in found:
            for key_tile in range(begin, end):
                _right_kind(case, plan, query_tile, key_tile, kind)


def plans_far(case: Case, plan: Plan) -> None:
    """The tiles on both sides of each bound, and some between, where there are too many to ask them all."""
    told = "A program has no time to look at each tile: compute where the runs begin and end."
    for query_tile, found in enumerate(_runs_of(case, plan, bounded(case, 20_000, told, case.student, *plan.args))):
        for kind, begin, end in found:
            for key_tile in {
                begin,
                min(begin + 1, end - 1),
                (begin + end) // 2,
                case.rng.randrange(begin, end),
                max(end - 2, begin),
                end - 1,
            }:
                _right_kind(case, plan, query_tile, key_tile, kind)


def _right_kind(case: Case, plan: Plan, query_tile: int, key_tile: int, kind: str) -> None:
    expected, why = plan.kind(query_tile, key_tile)
    case.true(
        kind == expected,
        f"{_named(plan, query_tile, key_tile)} is {kind!r}, expected {expected!r}",
        hint=f"{why[0].upper()}{why[1:]}.",
    )


def _named(plan: Plan, query_tile: int, key_tile: int) -> str:
    positions, keys = plan.positions(query_tile), plan.keys(key_tile)
    return (
        f"query tile {query_tile} (positions {positions[0]} to {positions[-1]}) and key tile {key_tile} "
        f"(keys {keys[0]} to {keys[-1]}): it"
    )


def _runs_of(case: Case, plan: Plan, got: Any) -> list:
    """The runs, once their form is right."""
    tiles = -(-plan.num_queries // plan.tile_m)
    case.is_a(got, list, "the result")
    case.equal(
        len(got), tiles, "the number of query tiles", hint="The last tile may not be full; it counts all the same."
    )
    for query_tile, runs in enumerate(got):
        end, before = 0, None
        for run in runs:
            case.true(
                isinstance(run, tuple) and len(run) == 3 and run[0] in (SKIPPED, WHOLE, MASKED),
                f"a run of query tile {query_tile} is {run!r}, not a tuple (kind, begin, end)",
                hint="Each run is a tuple, and its kind one of 'skipped', 'whole' and 'masked'.",
            )
            for number in run[1:]:
                case.is_a(
                    number, int, f"a bound of the run {run!r}", hint="Divide with //, so that whole numbers stay whole."
                )
            case.true(
                run[1] == end and run[2] > run[1],
                (
                    f"query tile {query_tile}: the run {run!r} comes after tile {end - 1}; "
                    f"each run begins where the one before ended, and none is empty: {runs!r}"
                ),
            )
            case.true(
                run[0] != before,
                f"query tile {query_tile}: two {run[0]!r} runs side by side, {runs!r}",
                hint="They are one run.",
            )
            end, before = run[2], run[0]
        key_tiles = -(-plan.num_keys // plan.tile_n)
        case.equal(
            end,
            key_tiles,
            f"query tile {query_tile}: the end of the last run",
            hint=f"{plan.num_keys} keys are {key_tiles} tiles, skipped ones too.",
        )
    return got
