"""The check of chapter 22's autoscaler: days, each with what it may cost. Built in chapter 22.

There is no single right answer, so a day is judged by its cost, and by who still waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from minillm.book.checks import Case, Draw
from minillm.book.checks.ch22_oracle import Day, floor_of, live
from minillm.book.checks.trial import TrialChecker

CAPACITY, DELAY, INTERVALS = 20, 4, 288  # requests of a replica in an interval of five minutes; intervals


def made_up_day(rng, peak: float, noise: float, shift: float = 0.0) -> list[int]:
    """Requests in each interval of a day: quiet at night, a morning, an afternoon, and noise."""
    day = []
    for interval in range(INTERVALS):
        hour = (interval / 12 + shift) % 24
        shape = 0.12 + 0.75 * math.exp(-(((hour - 10.5) / 2.2) ** 2)) + math.exp(-(((hour - 16) / 2.6) ** 2))
        day.append(max(0, round(peak * shape * (1 + noise * rng.gauss(0, 1)))))
    return day


class Planned(NamedTuple):
    """A day to size a fleet for.

    told: what is particular about it. allowed: how often the cost of a fleet that knows the day in advance.
    empty_from: from this interval on no request may wait at the end of an interval.
    """

    told: str
    yesterday: list[int]
    today: list[int]
    allowed: float = math.inf
    empty_from: int = INTERVALS
    hint: str = ""
    capacity: int = CAPACITY
    delay: int = DELAY


def _example(draw: Draw) -> Iterator[Planned]:
    yesterday = made_up_day(draw.rng, 400, 0.0)
    yield Planned("today is exactly like yesterday", yesterday, yesterday, 1.2)


def _edges(draw: Draw) -> Iterator[Planned]:
    quiet, steady, spike = [0] * INTERVALS, [200] * INTERVALS, [200] * INTERVALS
    spike[100:112] = [900] * 12
    one = "One replica stays; desired may return 1 or less."
    yield Planned("no request comes all day, and none came yesterday", quiet, quiet, 1.05, hint=one)
    yield Planned("the same load comes all day, as yesterday", steady, steady, 1.25)
    slow = "a replica serves 10 requests, and takes 3 intervals to start"
    yield Planned(slow, steady, steady, 1.25, capacity=10, delay=3)
    yesterday = made_up_day(draw.rng, 200, 0.0)
    twice, half = [2 * coming for coming in yesterday], [coming // 2 for coming in yesterday]
    yield Planned("today is twice as busy as yesterday: compare the intervals so far", yesterday, twice, 1.35)
    yield Planned("today is half as busy as yesterday", yesterday, half, 1.5)
    backlog = "Yesterday had no spike, so the backlog has to call for replicas."
    yield Planned(
        "an hour of 900 instead of 200 requests ended an hour ago", steady, spike, empty_from=125, hint=backlog
    )
    ratio = "Where yesterday had no request there is no ratio: forecast from today's last intervals."
    yield Planned("yesterday there was no request at all", quiet, steady, empty_from=60, hint=ratio)


def _random(draw: Draw) -> Iterator[Planned]:
    told = "today has another peak and other noise, and may be a quarter of an hour early or late"
    for _ in range(4):
        peak = draw.randint(150, 600)
        yesterday = made_up_day(draw.rng, peak, 0.06)
        today = made_up_day(draw.rng, peak * draw.rng.uniform(0.8, 1.3), 0.06, draw.rng.uniform(-0.25, 0.25))
        yield Planned(told, yesterday, today, 1.4)


class Forecaster:
    """Yesterday's curve, as high as today's last half-hour, `delay` intervals ahead. The keywords are mistakes."""

    def __init__(
        self, yesterday: list[int], capacity: int, delay: int, *, ahead: int | None = None, follows: bool = False,
        scales: bool = True, waits: bool = True, knows: bool = False, divides: bool = False, peak: bool = False,
        least: bool = True, rounds: Callable[[float], float] = math.ceil,
    ) -> None:  # fmt: skip
        self.capacity, self.delay = (CAPACITY, DELAY) if knows else (capacity, delay)
        padded = [yesterday[0], *yesterday, yesterday[-1]]
        self.curve = [sum(padded[i : i + 3]) / 3 for i in range(len(yesterday))]
        self.ahead = self.delay if ahead is None else ahead
        self.follows, self.scales, self.waits, self.divides = follows, scales, waits, divides
        self.peak, self.least, self.rounds = peak, least, rounds

    def desired(self, arrivals: list[int], backlog: int, ready: int, starting: int) -> int:
        now, last = len(arrivals), arrivals[-6:]
        before = sum(self.curve[max(0, now - 6) : now])
        load = max(self.curve if self.peak else self.curve[now : now + self.ahead + 1])
        if self.follows:
            load, backlog = arrivals[-1] if arrivals else 0, 0
        elif now and self.scales and (before or self.divides):
            load *= sum(last) / before
        elif now and self.scales and self.least:
            load = max(sum(last) / len(last), load)
        return self.rounds((load + self.waits * backlog / self.delay) / self.capacity)


def _lived(case: Case, *trial: Any) -> None:
    plan = Planned(*trial)
    scaler = case.run(case.student, list(plan.yesterday), plan.capacity, plan.delay)
    hint = f"Here {plan.told}.{plan.hint and ' '}{plan.hint}"

    def desired(*now: Any) -> int:
        wanted = case.run(scaler.desired, *now)
        case.true(type(wanted) is int, f"desired returned {wanted!r}, not an int", hint=hint)
        case.true(wanted <= 10_000, f"desired returned {wanted} replicas", hint=hint)
        return wanted

    day: Day = live(desired, list(plan.today), plan.capacity, plan.delay)
    least = floor_of(plan.today, plan.capacity)
    case.true(
        day.cost <= plan.allowed * least,
        f"the day cost {day.cost:.0f} ({day.replica_intervals} replica intervals, {day.waiting} waits), that is "
        f"{day.cost / least:.2f} times the {least:.0f} of a fleet that knows the day; {plan.allowed} is allowed",
        hint=hint,
    )
    late = max(day.backlog[plan.empty_from :], default=0)
    hours = plan.empty_from / 12
    case.true(not late, f"{late} requests wait after interval {plan.empty_from}, {hours:.1f} hours", hint=hint)


check_autoscaler = TrialChecker(
    "autoscaler",
    _lived,
    examples=_example,
    edges=_edges,
    random=_random,
    hint="A replica that is ordered now works `delay` intervals later: look ahead that far.",
    misconceptions={
        "Look ahead: a replica that is ordered now works `delay` intervals later.": partial(Forecaster, ahead=0),
        "What comes now needs its replicas now, and these had to be ordered before.": partial(Forecaster, follows=True),
        "A replica costs as long as it is there: order what the next intervals need, not the day's peak.": partial(
            Forecaster, peak=True
        ),
        "Where yesterday had no request, what came today says what will come.": partial(Forecaster, least=False),
        "Today may be busier than yesterday, or less busy: compare the intervals so far.": partial(
            Forecaster, scales=False
        ),
        "The requests that wait need replicas, too.": partial(Forecaster, waits=False),
        "`capacity` and `delay` are arguments, and other fleets have others.": partial(Forecaster, knows=True),
        "Yesterday may have had no request: do not divide by zero.": partial(Forecaster, divides=True),
        "Round up: the last requests need a replica, too.": partial(Forecaster, rounds=math.floor),
        "desired returns an int.": partial(Forecaster, rounds=lambda wanted: wanted),
    },
    forbid=("minillm.engine.scaling.QueueAutoscaler", "minillm.engine.scaling.DeadlineAutoscaler"),
)
