"""Checks of chapter 25: an encoder budget, and the three projects. Built in chapter 25.

The projects are judged by their own harness (`minillm.book.projects`). A part that compares with the baseline takes its
seeds from the case, so that a lecturer's hidden tests bring other traces.
"""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch25_plan import check_encoder_plan
from minillm.book.projects import router, scheduler
from minillm.book.projects.scheduler import Asked
from minillm.book.projects.scoring import Project, Refused, Score, baseline_score

__all__ = ["check_encoder_plan", "check_kernel", "check_router", "check_scheduler"]

check_scheduler = Checker(
    "scheduler", hint="Which requests can still meet their targets, and which others does each of them delay?",
    forbid=("minillm.book.projects.scheduler.Baseline",),
    allow=("minillm.book.projects.scheduler.Plan",))  # fmt: skip
check_router = Checker(
    "router", hint="Weigh two numbers for each replica: the work ahead of it, and the work that its cache saves.",
    forbid=("minillm.book.projects.router.Baseline",))  # fmt: skip
check_kernel = Checker(
    "kernel", hint="What is loaded more than once, and what is stored only to be loaded again?",
    forbid=("minillm.book.projects.kernel.baseline",))  # fmt: skip


@check_scheduler.part("example")
def _scheduler_example(case: Case) -> None:
    _scored(case, scheduler.PROJECT, 1)


@check_scheduler.part("edges")
def _scheduler_edges(case: Case) -> None:
    chat, document = scheduler.CHAT, scheduler.DOCUMENT
    for told, trace in {
        "a single request": [Asked(1.0, chat, 40, 16)],
        "a document of three budgets": [Asked(0.0, document, 6000, 96)],
        "more requests at once than may run": [Asked(0.0, chat, 100, 40)] * 60,
        "more documents at once than memory holds": [Asked(0.0, document, 6000, 96)] * 6,
        "a pause of an hour between two requests": [Asked(0.0, chat, 50, 20), Asked(3600.0, document, 2000, 20)],
    }.items():
        with _refusals(case, told):
            scheduler.score(case.student, 0, trace)
        case.comparisons += 1


@check_scheduler.part("random")
def _scheduler_random(case: Case) -> None:
    _beats(case, scheduler.PROJECT)


@check_router.part("example")
def _router_example(case: Case) -> None:
    _scored(case, router.PROJECT, 1)


@check_router.part("edges")
def _router_edges(case: Case) -> None:
    with _refusals(case, "fleets by hand"):
        made = case.student()
        loads = router.Load(0, 0, 0), router.Load(3, 900, 512), router.Load(1, 200, 0)
        for number, seen in enumerate((loads[:1], loads, loads[::-1], (loads[1],) * 4)):
            got = case.run(made.pick, router.Arrival(number, 700, (7,)), seen)
            case.true(type(got) is int and 0 <= got < len(seen), f"pick returned {got!r} for {len(seen)} replicas")
        got = case.run(made.pick, router.Arrival(9, 40, ()), loads)
        case.true(type(got) is int and 0 <= got < 3, f"pick returned {got!r} for a prompt without a full block")


@check_router.part("random")
def _router_random(case: Case) -> None:
    _beats(case, router.PROJECT)


@check_kernel.part("example")
def _kernel_example(case: Case) -> None:
    _scored(case, _kernel(), 1)


@check_kernel.part("edges")
def _kernel_edges(case: Case) -> None:
    import torch

    from minillm.book.projects import kernel

    generator = torch.Generator().manual_seed(25)
    for rows, size in ((1, 1), (1, 128), (2, 3), (16, 33), (17, 64), (40, 5)):
        made = kernel.Case.make(kernel.Shape(rows, size), generator)
        with _refusals(case, f"a batch of shape [{rows}, {size}]"):
            made.run(case.student)
            made.check()
        case.comparisons += 1


@check_kernel.part("random")
def _kernel_random(case: Case) -> None:
    _beats(case, _kernel())


def _kernel() -> Project:
    """Imported late, since it imports Triton."""
    from minillm.book.projects import kernel

    return kernel.PROJECT


def _scored(case: Case, project: Project, seed: int) -> Score:
    """The submission breaks no rule on this seed."""
    with _refusals(case, f"seed {seed}"):
        score = project.score(case.student, seed)
    case.comparisons += 1
    return score


def _beats(case: Case, project: Project) -> None:
    """Better than the baseline, as a mean over seeds: the stated ones, or a lecturer's."""
    hidden = [1000 * case.seed + place for place in range(len(project.seeds) - 1)]
    seeds = hidden if case.seed else project.seeds
    scores = [_scored(case, project, seed) for seed in seeds]
    gain = project.gain(scores, seeds)
    pairs = ", ".join(
        f"{score.value:g} to {baseline_score(project, seed).value:g}" for score, seed in zip(scores, seeds)
    )
    case.true(
        gain > 1,
        f"the gain over the baseline is {gain:.3f}; it has to be above 1. Yours to the baseline's: {pairs}",
        hint=f"{project.value}; {'more' if project.more else 'less'} is better. Yours on the last seed: "
        f"{scores[-1].figures}.",
    )


class _refusals:
    """Turns a refusal of the harness into a failed check."""

    def __init__(self, case: Case, told: str):
        self.case, self.told = case, told

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if isinstance(error, Refused):
            self.case.fail(f"{self.told}: {error}", cause=error)
