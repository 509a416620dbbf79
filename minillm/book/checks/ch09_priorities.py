"""Check of chapter 09: which running requests make way for an urgent one. Built in chapter 09."""

from __future__ import annotations

from collections import Counter

from minillm.book.checks import Draw, FunctionChecker


def way(
    priority, num_blocks, running, num_free, max_num_seqs, *, key=lambda request, place: (*request[1:3], place),
    equals=False, owned=True, slot=True, blocks=True, vain=False, at_least=0,
) -> list[str]:  # fmt: skip
    """The shortest beginning of the order after which the request fits; with switches for mistakes."""
    order = sorted(range(len(running)), key=lambda place: key(running[place], place), reverse=True)
    may = [running[i] for i in order if running[i][1] > priority or (equals and running[i][1] == priority)]
    for count in range(at_least, len(may) + 1):
        stay = Counter(block for one in running if one not in may[:count] for block in one[3])
        gone = {block for one in may[:count] for block in one[3]}
        freed = sum(not stay[block] for block in gone) if owned else sum(len(one[3]) for one in may[:count])
        has_slot = len(running) - count < max_num_seqs or not slot
        if has_slot and (num_free + freed >= num_blocks or not blocks):
            return [one[0] for one in may[:count]]
    return [one[0] for one in may] if vain else []


def _random_batch(draw: Draw) -> tuple:
    names = [f"r{i}" for i in range(draw.randint(0, 7))]
    draw.rng.shuffle(names)
    few, prefix = draw.randint(1, 3), list(range(100, 100 + draw.randint(0, 3)))
    running, number = [], 0
    for name in names:
        own = draw.randint(0, 3)
        shared = prefix if draw.rng.random() < 0.5 else []
        running.append((name, draw.randint(0, few), draw.randint(0, 12) / 4, [*shared, *range(number, number + own)]))
        number += own
    num_free = draw.randint(0, 4)
    max_num_seqs = max(1, len(running) + draw.rng.choice((0, 0, 1, 4)))
    return draw.randint(0, 2), draw.randint(1, 9), running, num_free, max_num_seqs


_FULL = [("a", 1, 0.0, [1, 2]), ("b", 2, 1.0, [3, 4]), ("c", 2, 2.0, [5])]

check_make_way = FunctionChecker(
    "make_way",
    way,
    hint="The largest priority first, and no more than necessary; if all that are allowed do not suffice, return [].",
    examples=[(0, 1, _FULL, 3, 3), (0, 4, _FULL, 1, 8)],
    edges={
        "blocks are there, and no batch slot": (0, 1, _FULL, 9, 3),
        "it fits already": (0, 3, _FULL, 3, 4),
        "nothing runs": (0, 3, [], 3, 4),
        "equal priorities do not preempt each other": (2, 1, _FULL, 3, 3),
        "all that are allowed do not suffice": (1, 5, _FULL, 1, 8),
        "all that are allowed are just enough": (1, 4, _FULL, 1, 8),
        "a batch slot is there, and no blocks": (0, 2, _FULL, 1, 8),
        "two own the same block": (0, 3, [("a", 3, 0.0, [1, 2]), ("b", 3, 1.0, [1, 3])], 0, 9),
        "the other owner of a block stays": (1, 3, [("a", 1, 0.0, [1, 2]), ("b", 3, 1.0, [1, 3, 4])], 0, 9),
        "arrival decides among equals": (0, 1, [("a", 5, 2.0, [1]), ("b", 5, 3.0, [2]), ("c", 5, 1.0, [3])], 9, 3),
        "the later one in the list decides": (0, 1, [("b", 5, 1.0, [1]), ("a", 5, 1.0, [2])], 9, 2),
    },
    random=_random_batch,
    trials=120,
    returns="the names",
    misconceptions={
        "Priorities that are equal do not preempt each other.": dict(equals=True),
        "A block is free when all its owners are preempted.": dict(owned=False),
        "A request needs a batch slot, too.": dict(slot=False),
        "A request needs blocks, too, not only a batch slot.": dict(blocks=False),
        "If the request would not fit after all preemptions that are allowed, return [].": dict(vain=True),
        "Check whether the request fits before the first preemption, too.": dict(at_least=1),
        "The largest priority goes first, then the latest arrival.": dict(
            key=lambda request, place: (-request[1], -request[2], place)
        ),
        "Among equals the request that arrived last is preempted first.": dict(
            key=lambda request, place: (request[1], -request[2], place)
        ),
        "Among equals of the same arrival, the one that stands later in `running` is preempted first.": dict(
            key=lambda request, place: (*request[1:3], -place)
        ),
    },
)
