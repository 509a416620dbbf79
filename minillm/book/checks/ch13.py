"""Checks of chapter 13: a prefix merged in, the number of splits, a gather over pages, addresses. Built in chapter 13.

The references are in `ch13_oracle`; `ch13_launches` looks at what the programs of a gather touched.
`ch13_prefix` has the prefix, `ch13_places` a gather and addresses, `ch13_latent` decoding over latents.
"""

from __future__ import annotations

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.checks.ch13_latent import check_latent_decode
from minillm.book.checks.ch13_oracle import PAGED, Costs, best_splits, last_end, merge_time, programs_of
from minillm.book.checks.ch13_places import check_gather_window, check_slot_places
from minillm.book.checks.ch13_prefix import check_merge_prefix

__all__ = [
    "Costs",
    "check_best_splits",
    "check_gather_window",
    "check_latent_decode",
    "check_merge_prefix",
    "check_slot_places",
]


def _random_splits(draw: Draw) -> tuple:
    lengths = [draw.rng.choice((0, draw.randint(1, 200), draw.randint(1, 3000))) for _ in range(draw.randint(1, 6))]
    costs = Costs(draw.randint(0, 20), draw.randint(1, 20), draw.randint(0, 60), draw.randint(0, 6))
    tile_n, most = draw.rng.choice((16, 64, 128)), draw.randint(1, 14)
    return lengths, draw.randint(1, 5), draw.randint(1, 24), tile_n, most, costs


def _times(got: tuple, expected: tuple, *given: object) -> str:
    *before, most, costs = given
    tried = sorted({1, expected[0], most, *(n for n in got[:1] if type(n) is int and 1 <= n <= most)})
    alone = {n: last_end(programs_of(before[0], before[1], before[3], n, costs), before[2]) for n in tried}
    told = " ".join(f"{n}: {time + merge_time(n, costs)}" for n, time in alone.items())
    return f"Every number up to max_splits={most} must be tried. Splits and their times: {told}."


_ONE = Costs(2, 3, 5, 1)
check_best_splits = FunctionChecker(
    "best_splits",
    best_splits,
    returns=("num_splits", "time"),
    examples=[([640], 2, 8, 64, 6, _ONE), ([700, 64, 300], 1, 4, 64, 8, _ONE)],
    edges=[
        ([640], 2, 8, 64, 1, _ONE),  # splitting is not allowed
        ([0, 0], 2, 4, 64, 4, _ONE),  # padding only
        ([0, 650, 1], 2, 4, 64, 8, Costs(2, 3, 0, 0)),
        ([640], 1, 10, 64, 20, Costs(0, 1, 0, 0)),  # 10 splits are as good as 20
        ([1024], 1, 16, 64, 16, Costs(1, 4, 0, 0)),
        ([1024], 1, 16, 64, 16, Costs(1, 4, 40, 0)),  # merging costs more than it saves
        ([1024], 1, 16, 64, 16, Costs(0, 4, 0, 5)),
        ([640], 1, 16, 64, 12, Costs(9, 1, 0, 0)),
        ([704], 3, 7, 64, 12, Costs(3, 10, 4, 1)),  # 11 tiles: not every number of splits gives shorter ones
        ([6400, 64, 64, 64, 64, 64], 1, 3, 64, 9, Costs(1, 5, 6, 1)),
        ([64, 64, 64, 64, 6400], 1, 3, 64, 9, Costs(1, 5, 6, 1)),  # the longest starts last
        ([1], 8, 132, 128, 4, Costs(100, 50, 10, 1)),
    ],
    random=_random_splits,
    explain=_times,
    misconceptions={
        "They take the same time: then fewer splits are better.": dict(chosen=-1),
        "One split leaves nothing to merge: no second kernel.":
            dict(merge=lambda splits, costs: costs.launch + splits * costs.part),
        "With more than one split there is a second kernel: its launch, and a part of it for each split.":
            dict(merge=lambda splits, costs: 0),
        "The second kernel costs its launch once, whatever it merges.":
            dict(merge=lambda splits, costs: splits * costs.part if splits > 1 else 0),
        "Programs start in their order, not the longest first.":
            dict(end=lambda times, places: last_end(sorted(times, reverse=True), places)),
        "A place takes the next program as soon as it is free: there are no waves.":
            dict(end=lambda times, places: -(-len(times) // places) * max(times)),
        "Only as many programs run at a time as there are places.": dict(end=lambda times, places: max(times)),
        "A split takes ceil(tiles / num_splits) tiles while there are any; the last ones may get fewer, or none.":
            dict(even=True),
        "A program without tiles is started all the same, and costs its start.": dict(idle=False),
        "This is the work of all, shared out evenly. A program is not divided among places.":
            dict(end=lambda times, places: sum(times) // places),
    },
    forbid=PAGED,
)  # fmt: skip
