"""The debugging exercise of chapter 05: a scheduler of jobs, its reference, and its trace. Built in chapter 05."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from minillm.book.checks import Draw
from minillm.book.checks.beside import ClassChecker, Story
from minillm.book.chips import Html, table

FORBIDDEN = (
    "minillm.engine.scheduler.Scheduler",
    *(
        f"minillm.engine.policies.{name}"
        for name in ("FCFS", "ByKey", "sjf", "priority", "Fair", "LongestPrefixMatch", "make_policy")
    ),
)


@dataclass(slots=True)
class Job:
    """A request as the scheduler of the debugging exercise knows it: its tokens, and how many of them are computed."""

    name: str
    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    num_tokens: int = -1

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens


def watch(scheduler: Any, jobs: Sequence[Job], patience: int = 5) -> Html:
    """What a scheduler of jobs does, step by step, until all are done, or until nothing has moved for a while."""
    rows, idle = [], 0
    for step, plan in enumerate(_steps_of(scheduler, jobs), 1):
        idle = 0 if plan else idle + 1
        planned = ", ".join(f"{name} {count}" for name, count in plan.items()) or "nothing"
        running = ", ".join(f"{job.name} {job.num_tokens}" for job in scheduler.running)
        waiting = ", ".join(f"{job.name} {job.num_tokens}" for job in scheduler.waiting)
        rows.append(
            [str(step), planned, running or "-", str(sum(job.num_tokens for job in scheduler.running)), waiting or "-"]
        )
        if idle == patience:
            rows.append(["...", "nothing, and so on without end", "", "", ""])
            break
    return table(rows, ["step", "plan: tokens", "running, with its tokens", "in memory", "waiting, with its tokens"])


def _steps_of(scheduler: Any, jobs: Sequence[Job]) -> Iterator[dict[str, int]]:
    """Drive a scheduler of jobs: its plan of each step, as long as a job waits or runs."""
    for job in jobs:
        scheduler.add(job)
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        yield plan
        scheduler.update(plan)


class Repaired:
    """The repaired scheduler of jobs. The keywords are mistakes."""

    def __init__(
        self, memory: int, seqs: int, budget: int, *, whole: Callable[[Job, int], bool] | None = None,
        over: bool = False, one_each: bool = False, every_piece: bool = False, keeps: bool = False,
        overtakes: bool = False, drops: bool = False, idle: bool = False, brim: int = 0, checks: bool = True,
        holds: str = "num_tokens",
    ) -> None:  # fmt: skip
        self.memory, self.seqs, self.budget = memory, seqs, budget
        self.waiting, self.running = [], []
        self.fits = whole or (lambda job, left: job.num_tokens <= left or job.num_tokens > job.num_prompt_tokens)
        self.over, self.one_each, self.every_piece, self.keeps = over, one_each, every_piece, keeps
        self.overtakes, self.drops, self.idle, self.brim, self.checks = overtakes, drops, idle, brim, checks
        self.holds = holds

    def add(self, job: Job) -> None:
        if self.checks and (
            job.num_prompt_tokens > self.budget or job.num_prompt_tokens + job.max_tokens > self.memory
        ):
            raise ValueError("this job can never be served")
        self.waiting.append(job)

    def schedule(self) -> dict[str, int]:
        gone = []
        while sum(job.num_tokens for job in self.running) > self.memory:
            gone.append(self.running.pop())
            gone[-1].num_computed_tokens *= self.keeps
            self.waiting.insert(0, gone[-1])
        plan, left = {}, self.budget
        for job in self.running:
            plan[job.name] = 1 if self.one_each else min(job.num_tokens - job.num_computed_tokens, left)
            left -= plan[job.name]
        place = 0
        while place < len(self.waiting) and not gone and len(self.running) < self.seqs and (left > 0 or self.idle):
            job = self.waiting[place]
            held = sum(getattr(one, self.holds) for one in self.running) + job.num_tokens
            if not self.fits(job, left) or held + self.brim > self.memory:
                if not (self.overtakes or self.drops):
                    break
                if self.drops:
                    self.waiting.pop(place)
                else:
                    place += 1
                continue
            self.running.append(self.waiting.pop(place))
            plan[job.name] = job.num_tokens if self.over else min(job.num_tokens, left)
            left -= plan[job.name]
        return plan

    def update(self, plan: dict[str, int]) -> None:
        for job in list(self.running):
            job.num_computed_tokens += plan[job.name]
            if job.num_computed_tokens == job.num_tokens or self.every_piece:
                job.num_tokens += 1
                if job.num_tokens >= job.num_prompt_tokens + job.max_tokens:
                    self.running.remove(job)


class Machine:
    """A scheduler and its jobs, which are known by their names."""

    def __init__(self, scheduler_type: Callable, memory: int, seqs: int, budget: int) -> None:
        self.scheduler, self.budget = scheduler_type(memory, seqs, budget), budget
        self.jobs: dict[str, Job] = {}
        self.plan: dict[str, int] = {}

    def add(self, name: str, num_prompt_tokens: int, max_tokens: int) -> None:
        job = Job(name, num_prompt_tokens, max_tokens)
        self.scheduler.add(job)
        self.jobs[name] = job

    def schedule(self) -> dict[str, int]:
        self.plan = self.scheduler.schedule()
        return dict(self.plan)

    def update(self) -> None:
        """With the plan of the step."""
        self.scheduler.update(self.plan)


def _why(got: Any, expected: Any, machine: Machine, call: tuple) -> str:
    if call[0] == "add":
        return "`add` stays as it is: a job whose prompt exceeds the budget, or that exceeds the memory, is refused."
    scheduler = machine.scheduler
    jobs = ", ".join(
        f"{job.name} {job.num_computed_tokens} of {job.num_tokens}" for job in [*scheduler.running, *scheduler.waiting]
    )
    told = f"Computed before it: {jobs or 'nothing'}."
    if call[0] == "update":
        return (
            "A job has one more token where all those that it had are computed, and only there; it leaves when "
            f"num_tokens is num_prompt_tokens + max_tokens. {told}"
        )
    if isinstance(got, dict) and sum(got.values()) > machine.budget:
        return f"The budget of {machine.budget} holds in every step; what does not fit is computed later. {told}"
    if isinstance(got, dict) and not all(got.values()):
        return f"No job joins without a token. {told}"
    return (
        "Running jobs first, each with the tokens that are not computed yet; new jobs whole or not at all, without "
        f"overtaking; a preempted job may be cut, and has lost its computed tokens. {told}"
    )


def _served(jobs: Sequence[tuple[str, int, int]], memory: int, seqs: int, budget: int) -> Story:
    """Steps until all jobs are done."""

    def calls(right: Machine) -> Iterator[tuple]:
        for job in jobs:
            yield "add", *job
        while right.scheduler.waiting or right.scheduler.running:
            yield ("schedule",)
            yield ("update",)

    return Story((memory, seqs, budget), calls)


def _random_jobs(draw: Draw) -> Story:
    budget = draw.randint(3, 14)
    rows = [(f"r{i}", draw.randint(1, budget + 1), draw.randint(1, 16)) for i in range(draw.randint(1, 7))]
    longest = max(prompt + outputs for _, prompt, outputs in rows)
    return _served(rows, longest + draw.randint(0, 25), draw.randint(1, 7), budget)


check_repair_scheduler = ClassChecker(
    "repair_scheduler",
    Repaired,
    adapt=lambda scheduler_type: partial(Machine, scheduler_type),
    what="scheduler",
    shows={
        "the list of running jobs": lambda machine, calls: [job.name for job in machine.scheduler.running],
        "the list of waiting jobs": lambda machine, calls: [job.name for job in machine.scheduler.waiting],
        "the dict of num_tokens": lambda machine, calls: {name: job.num_tokens for name, job in machine.jobs.items()},
        "the dict of num_computed_tokens": lambda machine, calls: {
            name: job.num_computed_tokens for name, job in machine.jobs.items()
        },
    },
    examples=[_served([("A", 8, 9), ("B", 7, 9)], memory=24, seqs=4, budget=8)],
    edges={
        "one job has all of the memory": _served([("A", 3, 2)], memory=5, seqs=1, budget=3),
        "no job is preempted": _served([("A", 8, 3), ("B", 6, 1), ("C", 8, 4)], memory=60, seqs=2, budget=8),
        "B does not fit beside A, and C may not overtake it": _served(
            [("A", 5, 4), ("B", 8, 4), ("C", 2, 2)], memory=60, seqs=3, budget=10
        ),
        "B comes back with three times its budget": _served([("A", 6, 20), ("B", 6, 20)], memory=26, seqs=4, budget=6),
        "three jobs of the same size are preempted in turn": _served(
            [("A", 4, 12), ("B", 4, 12), ("C", 4, 12)], memory=20, seqs=3, budget=12
        ),
        "the budget is small, and four jobs share it": _served(
            [("A", 4, 12), ("B", 4, 12), ("C", 4, 12), ("D", 3, 5)], memory=21, seqs=4, budget=5
        ),
        "A holds memory also for tokens that are not computed yet": _served(
            [("A", 3, 1), ("B", 2, 1)], memory=4, seqs=3, budget=6
        ),
        "three jobs have different sizes": _served(
            [("A", 7, 6), ("B", 3, 16), ("C", 8, 4)], memory=22, seqs=3, budget=8
        ),
        "both jobs fit exactly": _served([("A", 4, 4), ("B", 4, 4)], memory=8, seqs=2, budget=8),
        "a job can never be served": _served([("A", 9, 1), ("B", 8, 17)], memory=24, seqs=4, budget=8),
    },
    random=_random_jobs,
    trials=40,
    raises=(ValueError,),
    returns={"schedule": "the plan of the step"},
    explain=_why,
    hint="A preempted request has more tokens than its prompt had, and all of them to compute again.",
    misconceptions={
        "A preempted job may be cut: all that it has to compute may be more than any budget.": dict(
            whole=lambda job, left: job.num_tokens <= left
        ),
        "A job that has never run joins with its whole prompt or not at all.": dict(whole=lambda job, left: True),
        "A preempted job joins with what is left of the budget, and gets the rest in later steps.": dict(over=True),
        "A running job gets all tokens that are not computed yet: after a preemption these are several.": dict(
            one_each=True
        ),
        "A new token comes only when all tokens of a job are computed, not after every piece.": dict(every_piece=True),
        "A preempted job loses its computed tokens.": dict(keeps=True),
        "A job that does not fit is not overtaken.": dict(overtakes=True),
        "No job is lost: one that does not fit stays in the queue.": dict(drops=True),
        "No job joins where nothing is left of the budget.": dict(idle=True),
        "Jobs that fill the memory exactly fit.": dict(brim=1),
        "A running job holds num_tokens of the memory, also those that are not computed yet.": dict(
            holds="num_computed_tokens"
        ),
        "`add` stays as it is: it refuses a job that can never be served.": dict(checks=False),
    },
    forbid=FORBIDDEN,
)
