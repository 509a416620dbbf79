"""Jobs, and the scheduler of jobs that chapter 05 has repaired: its reference, and its trace. Built in chapter 05."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.book.chips import Html, table


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


def repaired(
    jobs: Sequence[Job], memory: int, seqs: int, budget: int
) -> Iterator[tuple[dict[str, int], list[Job], list[Job]]]:
    """Of every step the plan, and the running and waiting jobs after its update."""
    waiting, running = list(jobs), []
    while waiting or running:
        gone = []
        while sum(job.num_tokens for job in running) > memory:
            gone.append(running.pop())
            gone[-1].num_computed_tokens = 0
            waiting.insert(0, gone[-1])
        plan, left = {}, budget
        for job in running:
            plan[job.name] = min(job.num_tokens - job.num_computed_tokens, left)
            left -= plan[job.name]
        while waiting and not gone and len(running) < seqs and left:
            job = waiting[0]
            whole = job.num_tokens <= left or job.num_tokens > job.num_prompt_tokens
            if not whole or sum(one.num_tokens for one in [*running, job]) > memory:
                break
            running.append(waiting.pop(0))
            plan[job.name] = min(job.num_tokens, left)
            left -= plan[job.name]
        for job in list(running):
            job.num_computed_tokens += plan[job.name]
            if job.num_computed_tokens == job.num_tokens:
                job.num_tokens += 1
                if job.num_tokens == job.num_prompt_tokens + job.max_tokens:
                    running.remove(job)
        yield plan, running, waiting


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
