"""References for the exercises of chapter 24: slow, and written another way than a good answer. Built in chapter 24."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

Histogram = tuple[Sequence[float], Sequence[int]]  # upper ends of the buckets; counts, one more than ends
Machine = tuple[int, Sequence[tuple[int, bool]]]  # cents an hour; probes: rate, whether the promise held


def waits(
    due: Sequence[float], work: Sequence[float], connections: int, timeout: float, warmup: float
) -> list[tuple[float, float, float]]:
    """(due, sent, latency from due) of each request that is reported; an infinite latency where it was cut off."""
    busy_until, told = [0.0] * connections, []
    for moment, seconds in zip(due, work):
        first = min(range(connections), key=lambda place: busy_until[place])
        sent = max(moment, busy_until[first])
        busy_until[first] = sent + min(seconds, timeout)
        if moment >= warmup:
            told.append((moment, sent, math.inf if seconds > timeout else sent + seconds - moment))
    return told


def bounds(histograms: Sequence[Histogram], q: int) -> tuple[float, float] | None:
    """Every value at the lower end of its bucket, then every value at the upper end: the value of the rank."""
    lower, upper = [], []
    for ends, counts in histograms:
        limits = [0.0, *ends, math.inf]
        for place, count in enumerate(counts):
            lower += [limits[place]] * count
            upper += [limits[place + 1]] * count
    if not upper:
        return None
    rank = next(rank for rank in range(1, len(upper) + 1) if 100 * rank >= q * len(upper))
    return sorted(lower)[rank - 1], sorted(upper)[rank - 1]


def capacity_of(probes: Sequence[tuple[int, bool]]) -> int:
    """The largest rate at which the promise held, and held at every smaller rate that was probed; 0 if none."""
    return max((rate for rate, _ in probes if all(held for other, held in probes if other <= rate)), default=0)


def fleets(machines: dict[str, Machine], peak: int) -> list[tuple[tuple[int, int, tuple[int, ...]], dict[str, int]]]:
    """Every fleet that could be the best, the best one first: its (price, size, -counts), and the fleet."""
    sizes = {name: capacity_of(probes) for name, (_, probes) in machines.items()}
    choices = [range(-(-peak // size) + 2) if size else range(1) for size in sizes.values()]
    found = []
    for counts in itertools.product(*choices):
        present = [size for size, count in zip(sizes.values(), counts) if count]
        if present and sum(size * count for size, count in zip(sizes.values(), counts)) - max(present) >= peak:
            price = sum(cents * count for (cents, _), count in zip(machines.values(), counts))
            fleet = {name: count for name, count in zip(machines, counts) if count}
            found.append(((price, sum(counts), tuple(-count for count in counts)), fleet))
    return sorted(found, key=lambda pair: pair[0])


def ledger(demand: Sequence[int], api: int, price: int, per_month: int, running: int) -> list[tuple[int, int, int]]:
    """(machines, spent on own machines so far, spent at the API so far) at the end of each month."""
    owned = own = rented = 0
    rows = []
    for tokens in demand:
        while owned * per_month < tokens:
            owned, own = owned + 1, own + price
        own, rented = own + owned * running, rented + tokens * api
        rows.append((owned, own, rented))
    return rows


def stays_cheaper(rows: Sequence[tuple[int, int, int]]) -> tuple[int | None, int]:
    """The first month from which on own machines never cost more in total, and what they save at the end."""
    good = [own <= rented for _, own, rented in rows]
    month = next((month for month in range(1, len(good) + 1) if all(good[month - 1 :])), None)
    return month, rows[-1][2] - rows[-1][1]


@functools.cache
def least_costs(most: int, passing: int, failing: int) -> tuple[int, ...]:
    """For 1 to `most` possible answers, the least that the worst case of telling them apart can cost."""
    costs = [0, 0]  # of none and of one
    for candidates in range(2, most + 1):
        costs.append(
            min(
                max(
                    failing + costs[below], passing + costs[candidates - below]
                )  # the answer is below the probe, or not
                for below in range(1, candidates)
            )
        )
    return tuple(costs[1:])
