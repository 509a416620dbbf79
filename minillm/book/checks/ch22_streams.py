"""The check of chapter 22's autoscaler: days, each with what it may cost. Built in chapter 22.

There is no single right answer, so a day is judged by its cost, and by who still waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch22_oracle import Day, floor_of, live

CAPACITY, DELAY, INTERVALS = 20, 4, 288  # requests of a replica in an interval of five minutes; intervals


def made_up_day(rng, peak: float, noise: float, shift: float = 0.0) -> list[int]:
    """Requests in each interval of a day: quiet at night, a morning, an afternoon, and noise."""
    day = []
    for interval in range(INTERVALS):
        hour = (interval / 12 + shift) % 24
        shape = 0.12 + 0.75 * math.exp(-(((hour - 10.5) / 2.2) ** 2)) + math.exp(-(((hour - 16) / 2.6) ** 2))
        day.append(max(0, round(peak * shape * (1 + noise * rng.gauss(0, 1)))))
    return day


@dataclass(frozen=True)
class Planned:
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


def _example(case: Case) -> Iterator[Planned]:
    yesterday = made_up_day(case.rng, 400, 0.0)
    yield Planned("today is exactly like yesterday", yesterday, yesterday, 1.2)


def _edges(case: Case) -> Iterator[Planned]:
    quiet, steady, spike = [0] * INTERVALS, [200] * INTERVALS, [200] * INTERVALS
    spike[100:112] = [900] * 12
    one = "One replica stays; desired may return 1 or less."
    yield Planned("no request comes all day, and none came yesterday", quiet, quiet, 1.05, hint=one)
    yield Planned("the same load comes all day, as yesterday", steady, steady, 1.25)
    slow = "a replica serves 10 requests, and takes 3 intervals to start"
    yield Planned(slow, steady, steady, 1.25, capacity=10, delay=3)
    yesterday = made_up_day(case.rng, 200, 0.0)
    twice, half = [2 * coming for coming in yesterday], [coming // 2 for coming in yesterday]
    yield Planned("today is twice as busy as yesterday: compare the intervals so far", yesterday, twice, 1.35)
    yield Planned("today is half as busy as yesterday", yesterday, half, 1.5)
    backlog = "Yesterday had no spike, so the backlog has to call for replicas."
    yield Planned(
        "an hour of 900 instead of 200 requests ended an hour ago", steady, spike, empty_from=125, hint=backlog
    )
    ratio = "Where yesterday had no request there is no ratio: forecast from today's last intervals."
    yield Planned("yesterday there was no request at all", quiet, steady, empty_from=60, hint=ratio)


def _random(case: Case) -> Iterator[Planned]:
    told = "today has another peak and other noise, and may be a quarter of an hour early or late"
    for _ in range(4):
        peak = case.randint(150, 600)
        yesterday = made_up_day(case.rng, peak, 0.06)
        today = made_up_day(case.rng, peak * case.rng.uniform(0.8, 1.3), 0.06, case.rng.uniform(-0.25, 0.25))
        yield Planned(told, yesterday, today, 1.4)


def _lived(case: Case, plan: Planned) -> None:
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


class _DayChecker(Checker):
    """As a Checker; `days` are those of each part."""

    def __init__(self, name: str, *, days: Mapping[str, Callable[[Case], Iterator[Planned]]], **how: Any) -> None:
        super().__init__(name, **how)
        self.days = days
        self.parts = {part: partial(self._judge_days, part) for part in days}
        self._seal()

    def _judge_days(self, part: str, case: Case) -> None:
        for plan in self.days[part](case):
            _lived(case, plan)


check_autoscaler = _DayChecker(
    "autoscaler",
    days={"example": _example, "edges": _edges, "random": _random},
    hint="A replica that is ordered now works `delay` intervals later: look ahead that far.",
    forbid=("minillm.engine.scaling.QueueAutoscaler", "minillm.engine.scaling.DeadlineAutoscaler"),
)
