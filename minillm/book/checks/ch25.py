"""Checks of chapter 25: an encoder budget, and the three projects. Built in chapter 25.

The projects are judged by their own harness (`minillm.book.projects`). A part that compares with the baseline takes its
seeds from the case, so that a lecturer's hidden tests bring other traces.
"""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch25_oracle import Image, encoder_plan
from minillm.book.projects import router, scheduler
from minillm.book.projects.scheduler import Asked
from minillm.book.projects.scoring import Project, Refused, Score, baseline_score

__all__ = ["check_encoder_plan", "check_kernel", "check_router", "check_scheduler"]

check_encoder_plan = Checker(
    "encoder_plan", hint="An image is encoded as a whole or not at all; the chunk may end just before it.")  # fmt: skip
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


@check_encoder_plan.part("example")
def _plan_example(case: Case) -> None:
    _planned(case, [("a", 10, 20)], 0, 64, set(), 100, "the image lies in the chunk, and the budget is large enough")
    _planned(case, [("a", 10, 20)], 0, 64, {"a"}, 0, "its embeddings are cached: nothing to encode")
    _planned(
        case, [("a", 10, 20)], 0, 64, set(), 19, "the budget is one token too small: the chunk ends before the image"
    )


@check_encoder_plan.part("edges")
def _plan_edges(case: Case) -> None:
    two = [("a", 0, 8), ("b", 16, 8)]
    _planned(case, two, 0, 32, set(), 16, "two images, and the budget is spent to the last token")
    _planned(case, two, 0, 32, set(), 15, "the second image does not fit any more")
    _planned(case, two, 0, 32, set(), 7, "not even the first one, and it stands at the very beginning")
    _planned(case, two, 0, 32, {"a"}, 8, "the first is cached")
    _planned(case, [("a", 0, 8), ("a", 16, 8)], 0, 32, set(), 8, "the same image twice: it is encoded once")
    _planned(case, two, 8, 8, set(), 8, "the chunk lies between the images")
    _planned(case, two, 4, 4, set(), 8, "the chunk begins inside an image whose embeddings are gone")
    _planned(case, two, 4, 4, set(), 7, "the same, and the budget is too small: no token can be processed")
    _planned(case, two, 12, 5, set(), 8, "the last token of the chunk is the first of the image")
    _planned(case, two, 12, 4, set(), 0, "the chunk ends just before the image")
    _planned(case, two, 24, 8, set(), 0, "both images lie before the chunk")
    _planned(
        case, [("a", 0, 8), ("b", 8, 8), ("c", 16, 8)], 0, 24, set(), 12, "b does not fit; c would, but lies behind it"
    )
    _planned(case, [("a", 0, 8), ("b", 8, 4)], 0, 12, set(), 4, "a does not fit; b would, but lies behind it")
    _planned(case, [], 5, 9, set(), 0, "no image at all")
    _planned(case, [("a", 3, 4)], 0, 0, set(), 9, "an empty chunk")


@check_encoder_plan.part("random")
def _plan_random(case: Case) -> None:
    for _ in range(200):
        images, place = [], case.randint(0, 6)
        for _ in range(case.randint(0, 6)):
            length = case.randint(1, 12)
            images.append((case.rng.choice("abcdef"), place, length))
            place += length + case.randint(0, 6)
        cached = {name for name in "abcdef" if case.rng.random() < 0.25}
        start = case.randint(0, place + 2)
        _planned(case, images, start, case.randint(0, 40), cached, case.randint(0, 40), "random images")


def _planned(case: Case, images: list[Image], start: int, count: int, cached: set[str], budget: int, told: str) -> None:
    expected = encoder_plan(images, start, count, frozenset(cached), budget)
    got = case.call(list(images), start, count, frozenset(cached), budget)
    known = ", ".join(sorted(cached)) or "none"
    hint = f"Here {told}. The chunk is [{start}, {start + count}), the budget {budget}, cached: {known}."
    case.true(
        isinstance(got, tuple) and len(got) == 2, f"the result is {got!r}, not a tuple (num_tokens, encode)", hint=hint
    )
    case.true(type(got[0]) is int, f"the number of tokens is {got[0]!r}, not an int", hint=hint)
    case.equal(got[0], expected[0], "the number of tokens", hint=hint)
    case.true(isinstance(got[1], list), f"the images to encode are {got[1]!r}, not a list", hint=hint)
    case.equal(got[1], expected[1], "the list of images to encode", hint=hint)


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
