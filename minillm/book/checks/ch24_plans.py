"""Checks of chapter 24: a fleet that survives a loss, buying or renting. Built in chapter 24."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from minillm.book.checks import Draw, FunctionChecker

Machine = tuple[int, Sequence[tuple[int, bool]]]  # cents an hour; probes: rate, whether the promise held


# 3 · the cheapest fleet


def capacity_of(probes: Sequence[tuple[int, bool]]) -> int:
    """The largest rate at which the promise held, and held at every smaller rate that was probed; 0 if none."""
    return max((rate for rate, _ in probes if all(held for other, held in probes if other <= rate)), default=0)


def largest_that_held(probes: Sequence[tuple[int, bool]]) -> int:
    return max((rate for rate, held in probes if held), default=0)


def held_in_order(probes: Sequence[tuple[int, bool]]) -> int:
    return max((rate for rate, held in itertools.takewhile(lambda probe: probe[1], probes)), default=0)


def cheapest(
    machines: dict[str, Machine],
    peak: int,
    *,
    capacity: Callable[[Sequence[tuple[int, bool]]], int] = capacity_of,
    lost: Callable[[list[int]], int] = max,
    mixed: bool = True,
    spare: int = 2,
    fewest: int = 1,
    first: int = -1,
    absent: bool = False,
    none: dict | None = None,
) -> dict[str, int] | None:
    """The best of all fleets: cheapest, then the fewest machines, then more of those that are listed first.

    lost: the size that is lost of those in the fleet. spare: how many more than the peak needs are tried.
    fewest, first: -1 turns a tie-break round. absent: machines of which there is none are listed.
    """
    if peak < 1:
        raise ValueError(f"peak={peak}")
    sizes = {name: capacity(probes) for name, (_, probes) in machines.items()}
    choices = [range(-(-peak // size) + spare) if size else range(1) for size in sizes.values()]
    found = []
    for counts in itertools.product(*choices):
        present = [size for size, count in zip(sizes.values(), counts) if count]
        if not present or (not mixed and len(present) > 1):
            continue
        if sum(size * count for size, count in zip(sizes.values(), counts)) - lost(present) >= peak:
            price = sum(cents * count for (cents, _), count in zip(machines.values(), counts))
            found.append(((price, fewest * sum(counts), [first * count for count in counts]), counts))
    if not found:
        if none is None:
            raise ValueError("no fleet")
        return none
    return {name: count for name, count in zip(machines, min(found)[1]) if count or absent}


def _explain_fleet(got: Any, expected: Any, machines: dict[str, Machine], peak: int) -> str:
    sizes = {name: capacity_of(probes) for name, (_, probes) in machines.items()}
    told = f"Capacities: {sizes}; peak {peak}."
    if not isinstance(got, dict) or not set(got) <= set(machines):
        return told
    left = sum(sizes[name] * count for name, count in got.items()) - max((sizes[name] for name in got), default=0)
    paid, price = (sum(machines[name][0] * count for name, count in fleet.items()) for fleet in (got, expected))
    if left < peak:
        return f"{told} After the loss of its largest machine {got} holds {left}."
    if paid != price:
        return f"{told} {got} costs {paid} cents an hour; {expected} holds the peak for {price}."
    return f"{told} Among equal prices take the fewest machines, then the most of the kind that is listed first."


GOOD, SMALL = (300, [(5, True), (10, True), (20, True)]), (100, [(2, True), (6, True), (8, False)])
_LUCKY, _BROKEN = (90, [(30, True), (10, True), (20, False)]), (1, [(1, False), (50, True)])
_MIXED = {"large": (200, [(20, True)]), "small": (90, [(6, True)])}
_TWINS = {"first": (100, [(10, True)]), "second": (100, [(10, True)])}


def _random_fleet(draw: Draw) -> tuple:
    machines = {}
    for name in "ABC"[: draw.randint(1, 4)]:
        rates = sorted(draw.rng.sample(range(3, 30), draw.randint(1, 5)))
        probes = [(rate, draw.rng.random() < 0.85) for rate in rates]
        draw.rng.shuffle(probes)
        machines[name] = (draw.randint(1, 12) * 20, probes)
    return machines, draw.randint(1, 60)


check_cheapest_fleet = FunctionChecker(
    "cheapest_fleet",
    cheapest,
    hint="After the loss of the largest machine, the rest must still hold the peak.",
    examples={
        "one kind of machine: one for the peak, one to lose": ({"large": GOOD}, 20),
        "two kinds may be mixed": ({"large": GOOD, "small": SMALL}, 30),
    },
    edges={
        "a tiny peak still needs two machines": ({"large": GOOD}, 1),
        "a little more than one machine holds": ({"large": GOOD}, 21),
        "exactly two machines, and one to lose": ({"large": GOOD}, 40),
        "losing the large machine costs more than losing a small one": ({"small": SMALL, "large": GOOD}, 18),
        "a probe at 30 held after one at 20 had failed: it counts for nothing": ({"lucky": _LUCKY}, 9),
        "probes stand in no order": ({"mixed": (90, [(20, False), (10, True)])}, 5),
        "a machine's least probe fails": ({"broken": _BROKEN, "large": GOOD}, 20),
        "a machine that was never probed holds nothing": ({"unprobed": (1, []), "large": GOOD}, 20),
        "two large machines and a small one cost less than any fleet of one kind": (_MIXED, 26),
        "two fleets have the same price: the one with fewer machines": (
            {"one": (100, [(5, True)]), "two": (150, [(10, True)])},
            10,
        ),
        "price and size are equal: more of the machine that is listed first": (_TWINS, 20),
        "no fleet holds the peak": ({"broken": (1, [(1, False)])}, 5),
        "there is no machine at all": ({}, 5),
        "a peak of 0 is a mistake of the caller": ({"large": GOOD}, 0),
    },
    random=_random_fleet,
    raises=(ValueError,),
    returns="the fleet",
    misconceptions={
        "A probe that held above one that failed counts for nothing.": dict(capacity=largest_that_held),
        "Probes are in any order: sort them by their rate.": dict(capacity=held_in_order),
        "One machine is lost: the rest must hold the peak.": dict(lost=lambda present: 0),
        "The largest machine is lost, not the smallest.": dict(lost=min),
        "A fleet may mix machines.": dict(mixed=False),
        "Add one machine to those that the peak needs: one of them may be lost.": dict(spare=1),
        "Among equal prices take the fewest machines.": dict(fewest=-1),
        "Among equal prices and sizes take the most of the kind that is listed first.": dict(first=1),
        "Leave out kinds with a count of 0.": dict(absent=True),
        "If no fleet holds the peak, raise ValueError.": dict(none={}),
    },
    explain=_explain_fleet,
)


# 4 · buying or renting


def ledger(
    demand: Sequence[int], api: int, price: int, per_month: int, running: int, *, wrong: str = ""
) -> list[tuple[int, int, int]]:
    """(machines, spent on own machines so far, spent at the API so far) at the end of each month."""
    owned = own = rented = 0
    rows = []
    for tokens in demand:
        needed = tokens // per_month if wrong == "down" else -(-tokens // per_month)
        bought = needed - owned if wrong == "sold" else max(0, needed - owned)
        owned += bought
        runs = {"idle": needed, "next month": owned - bought}.get(wrong, owned)
        if wrong == "alone":
            own = rented = 0
        own, rented = own + bought * price + runs * running, rented + tokens * api
        rows.append((owned, own, rented))
    return rows


def stays_cheaper(
    demand: Sequence[int], api: int, price: int, per_month: int, running: int, *, wrong: str = ""
) -> tuple[int | None, int]:
    """The first month from which on own machines never cost more in total, and what they save at the end."""
    if not demand or per_month < 1:
        raise ValueError("no month, or nothing served")
    rows = ledger(demand, api, price, per_month, running, wrong=wrong)
    good = [own < rented if wrong == "equal" else own <= rented for _, own, rented in rows]
    lasting = good if wrong == "first" else [all(good[month:]) for month in range(len(good))]
    month = next((month for month, holds in enumerate(lasting, start=wrong != "from 0") if holds), None)
    saving = rows[-1][2] - rows[-1][1]
    return month, -saving if wrong == "sign" else saving


def _explain_stays(got: Any, expected: Any, *given: Any) -> str:
    rows = ledger(*given)
    shown = "; ".join(f"month {i + 1}: {n} owned, own {own}, API {api}" for i, (n, own, api) in enumerate(rows[:8]))
    return f"{shown}{'; ...' if len(rows) > 8 else ''}."


def _random_demand(draw: Draw) -> tuple:
    grows = draw.rng.random() < 0.6
    demand = [draw.randint(0, 12) + (2 * month if grows else 0) for month in range(draw.randint(1, 25))]
    return demand, draw.randint(1, 12), draw.randint(1, 400), draw.randint(3, 15), draw.randint(0, 40)


check_stays_cheaper = FunctionChecker(
    "stays_cheaper",
    stays_cheaper,
    hint="A later purchase can raise the machines' total above the API's again.",
    examples={
        "one machine, bought in the first month, saves 80 a month": ([10] * 6, 10, 250, 10, 20),
        "it is the same, and three months are not enough": ([10] * 3, 10, 250, 10, 20),
    },
    edges={
        "the first crossing does not last": ([10, 10, 10, 10, 30, 30, 30, 30], 10, 200, 10, 20),
        "after month 5 two more machines put it back": ([10, 10, 10, 10, 30, 30], 10, 200, 10, 20),
        "a machine that idles still costs its running, and is not sold": ([10, 10, 2, 10], 10, 100, 5, 10),
        "equal sums count as not above": ([10], 10, 80, 10, 20),
        "it is one cent above": ([10], 10, 81, 10, 20),
        "there is no demand, so no machine, and 0 is not above 0": ([0, 0, 10], 10, 50, 10, 20),
        "a little more than one machine serves: two are bought": ([11], 100, 50, 10, 20),
        "a machine more is bought in each month": ([5, 10, 15, 20], 10, 10, 5, 1),
        "without a month there is no answer": ([], 10, 80, 10, 20),
        "a machine that serves nothing is an error": ([10], 10, 80, 0, 20),
    },
    random=_random_demand,
    trials=80,
    raises=(ValueError,),
    returns=("month", "saving"),
    misconceptions={
        hint: partial(stays_cheaper, wrong=wrong)
        for hint, wrong in {
            "From that month on it must never cost more: the first crossing may not last.": "first",
            "A machine that idles is not sold.": "sold",
            "A part of a machine cannot be bought: round up.": "down",
            "A machine that idles still costs its running.": "idle",
            "A machine runs in the month in which it is bought, too.": "next month",
            "Equal sums: own machines are not above the API.": "equal",
            "Months count from 1.": "from 0",
            "Compare the totals so far, not the single months.": "alone",
            "The saving is what the API costs more.": "sign",
        }.items()
    },
    explain=_explain_stays,
)
