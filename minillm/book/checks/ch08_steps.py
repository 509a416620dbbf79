"""Checks of chapter 08: what a step takes of each prompt, by grains, by a repaired budget, in even chunks.
Built in chapter 08."""

from __future__ import annotations

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch08_oracle import (
    Row,
    best_plan,
    chunk_cost,
    planned,
    rows_planned,
)

check_plan_step = Checker(
    "plan_step", hint="Those with one token left; then prompts under way, the least left first; then the queue."
)
check_repair_budget = Checker("repair_budget", hint="What is left can be used up, and no more than that.")
check_even_chunks = Checker(
    "even_chunks", hint="Within the target; then few steps; then a light heaviest step; then long chunks first."
)


@check_plan_step.part("example")
def _plan_example(case: Case) -> None:
    _plans(case, [("A", 1), ("B", 50), ("C", 1)], [("D", 20)], 32, 8, 99, 8)
    _plans(case, [("A", 40), ("B", 1), ("C", 12)], [("D", 5)], 40, 8, 99, 8)
    _plans(case, [("A", 40), ("B", 1)], [("D", 9)], 40, 8, 20, 8)  # A is cut by the cap, and D can start


@check_plan_step.part("edges")
def _plan_edges(case: Case) -> None:
    _plans(case, [], [], 16, 4, 99, 4)
    _plans(case, [("A", 1), ("B", 9)], [("C", 3)], 0, 4, 99, 4)
    _plans(case, [("A", 1), ("B", 1), ("C", 1)], [], 2, 4, 99, 4)  # fewer tokens than rows that decode
    _plans(case, [("A", 30), ("B", 1), ("C", 1)], [], 2, 4, 99, 1)  # a prompt came first, and has to wait
    # Least left first, ties in order, what is left of a grain.
    _plans(case, [("A", 9), ("B", 9), ("C", 5)], [], 14, 4, 99, 4)
    _plans(case, [("A", 30), ("B", 7)], [], 40, 4, 99, 16)  # whole ones need no grain
    _plans(case, [("A", 9), ("B", 3)], [("C", 2)], 8, 4, 99, 8)  # B whole, A passed over, C fits
    _plans(case, [("A", 9)], [("B", 9), ("C", 2)], 7, 4, 99, 8)  # nobody overtakes in the queue
    _plans(case, [], [("A", 16), ("B", 16)], 32, 4, 99, 16)  # exactly the budget
    _plans(case, [], [("A", 17)], 16, 4, 99, 16)
    _plans(case, [("A", 1), ("B", 40)], [("C", 3), ("D", 3)], 20, 3, 99, 16)  # one place left
    _plans(case, [("A", 9), ("B", 9)], [("C", 3)], 4, 2, 99, 8)  # a running request without tokens still has its place
    _plans(case, [("A", 1), ("B", 1)], [("C", 3)], 16, 1, 99, 4)  # more running than places
    _plans(case, [], [("A", 3), ("B", 20), ("C", 1)], 12, 8, 99, 4)
    _plans(case, [("A", 40), ("B", 16), ("C", 17)], [("D", 16)], 80, 8, 16, 8)  # exactly the cap, and one more
    _plans(case, [("A", 40)], [("D", 30), ("E", 30)], 64, 8, 23, 8)  # a cap that is no multiple
    _plans(case, [("A", 1), ("B", 7)], [("D", 5)], 30, 8, 4, 4)


@check_plan_step.part("random")
def _plan_random(case: Case) -> None:
    for _ in range(150):
        running = [(f"r{i}", case.rng.choice((1, 1, case.randint(2, 60)))) for i in range(case.randint(0, 8))]
        waiting = [(f"w{i}", case.randint(1, 60)) for i in range(case.randint(0, 5))]
        _plans(
            case,
            running,
            waiting,
            case.randint(0, 90),
            case.randint(0, 12),
            case.randint(16, 70),
            case.rng.choice((1, 4, 8, 16)),
        )
    for _ in range(6):  # whole runs: everybody gets to the end
        _runs(
            case,
            [case.randint(1, 80) for _ in range(case.randint(1, 7))],
            case.randint(20, 50),
            case.randint(1, 5),
            case.rng.choice((16, 30)),
            case.rng.choice((1, 4, 16)),
        )


def _plans(
    case: Case, running: list, waiting: list, budget: int, seqs: int, cap: int, grain: int
) -> list[tuple[str, int]]:
    got = case.call(running, waiting, budget, seqs, cap, grain)
    told = f"with running={running}, waiting={waiting}, budget={budget}, max_num_seqs={seqs}, cap={cap}, grain={grain}"
    case.true(
        isinstance(got, list) and all(len(pair) == 2 for pair in got),
        f"the result is {got!r}, not a list of pairs",
        hint="[(name, tokens), ...]",
    )
    todo, left = dict(running) | dict(waiting), budget
    for name, count in got:
        case.true(
            name in todo and 0 < count <= todo[name],
            f"{name} gets {count} of {todo.get(name)} tokens {told}",
            hint="Who gets nothing is not in the list.",
        )
        case.true(
            count <= left,
            f"{name} gets {count} tokens where {left} are left {told}",
            hint="What one gets, the next ones do not have.",
        )
        case.true(count <= cap, f"{name} gets {count} tokens, the cap is {cap} {told}")
        case.true(
            count == todo[name] or count % grain == 0,
            f"{name} is cut at {count} {told}",
            hint=f"All {todo[name]} tokens, or a multiple of {grain}.",
        )
        left -= count
    names = [name for name, _ in got]
    slots = len(running) + sum(name in dict(waiting) for name in names)
    case.true(
        slots <= max(seqs, len(running)),
        f"{slots} requests are in the batch {told}",
        hint="Every running request has a place, tokens or not.",
    )
    served = [name for name, _ in waiting if name in names]
    case.true(served == [name for name, _ in waiting[: len(served)]], f"a waiting request overtakes: {served} {told}",
              hint="The first waiting request that gets nothing ends the planning.")  # fmt: skip
    case.equal(
        [tuple(pair) for pair in got],
        planned(running, waiting, budget, seqs, cap, grain),
        f"the plan {told}\n  the plan",
    )
    return got


def _runs(case: Case, prompts: list[int], budget: int, seqs: int, cap: int, grain: int) -> None:
    """Serve all prompts, two output tokens each, step by step."""
    waiting, running, outputs = [(f"p{i}", todo) for i, todo in enumerate(prompts)], [], {}
    for _ in range(40 + 2 * sum(prompts)):
        if not waiting and not running:
            return
        counts = dict(_plans(case, running, waiting, budget, seqs, cap, grain))
        running += [one for one in waiting if one[0] in counts]
        waiting = [one for one in waiting if one[0] not in counts]
        running = [(name, todo - counts.get(name, 0)) for name, todo in running]
        for name, todo in running:
            outputs[name] = outputs.get(name, 0) + (todo == 0)
        running = [(name, todo or 1) for name, todo in running if outputs[name] < 2]
    case.fail(
        f"after {40 + 2 * sum(prompts)} steps there are still {[name for name, _ in running + waiting]} of the "
        f"prompts {prompts}"
    )


@check_repair_budget.part("example")
def _budget_example(case: Case) -> None:
    _rows(case, [("A", 1, True), ("B", 1, True), ("P", 7, False), ("D", 20, True)], 8)
    _rows(case, [("A", 1, True), ("P", 7, False), ("D", 20, True)], 9)


@check_repair_budget.part("edges")
def _budget_edges(case: Case) -> None:
    _rows(case, [], 8)
    _rows(case, [("A", 3, True), ("P", 3, False)], 0)
    _rows(case, [("P", 8, False), ("A", 1, True)], 8)  # exactly
    _rows(case, [("P", 9, False), ("A", 1, True)], 8)
    _rows(case, [("P", 9, False), ("Q", 8, False), ("R", 1, False)], 8)  # a shorter one fits after one that does not
    _rows(case, [("A", 0, True), ("P", 0, False), ("B", 2, True)], 8)
    _rows(case, [("A", 8, True), ("B", 1, True), ("P", 1, False)], 8)
    case.raises(
        ValueError,
        case.student,
        [("A", 1, True)],
        -1,
        hint="A budget below 0 is somebody else's mistake, and must not be hidden.",
    )
    case.raises(ValueError, case.student, [], -3, hint="Also when there is no row.")


@check_repair_budget.part("random")
def _budget_random(case: Case) -> None:
    for _ in range(150):
        rows = [
            (f"r{i}", case.rng.choice((0, 1, 1, case.randint(2, 30))), case.rng.random() < 0.6)
            for i in range(case.randint(0, 8))
        ]
        _rows(case, rows, case.randint(0, 40))


def _rows(case: Case, rows: list[Row], budget: int) -> None:
    got = case.call(rows, budget)
    told = f"with rows={rows}, budget={budget}"
    case.true(
        isinstance(got, list) and all(len(pair) == 2 for pair in got),
        f"the result is {got!r}, not a list of pairs",
        hint="[(name, tokens), ...]",
    )
    wants, left = {name: (tokens, may_cut) for name, tokens, may_cut in rows}, budget
    for name, count in got:
        case.true(
            count > 0,
            f"{name} was given {count} tokens {told}",
            hint="Nobody goes back, and who gets nothing is not in the list.",
        )
        case.true(count <= left, f"{name} was given {count} tokens, {left} were left {told}")
        case.true(
            wants[name][1] or count == wants[name][0],
            f"{name} was cut to {count} of {wants[name][0]} tokens {told}",
            hint="all or nothing",
        )
        left -= count
    case.equal([tuple(pair) for pair in got], rows_planned(rows, budget), f"the plan {told}\n  the plan",
               hint="Each row in its turn; the next one has its chance when one gets nothing.")  # fmt: skip


@check_even_chunks.part("example")
def _even_example(case: Case) -> None:
    _even(case, 12, 0, 10, 2, 1, 0)  # no attention: 8 + 4 fits, 6 + 6 is lighter
    _even(case, 10, 0, 30, 1, 1, 1)


@check_even_chunks.part("edges")
def _even_edges(case: Case) -> None:
    _even(case, 1, 0, 5, 2, 1, 1)
    _even(case, 9, 0, 100, 1, 1, 1)  # one step
    _even(case, 7, 0, 3, 2, 1, 0)  # one token a step
    _even(case, 11, 3, 12, 2, 1, 0)  # the streams' tokens cost too
    _even(case, 10, 0, 17, 0, 0, 1)  # attention alone
    _even(case, 9, 4, 6, 6, 0, 0)  # nothing costs anything but the step
    case.raises(ValueError, case.student, 5, 2, 4, 2, 1, 0, hint="A step with one token costs 2 + 3.")
    case.raises(
        ValueError, case.student, 12, 0, 12, 1, 1, 1, hint="The first tokens fit; the last one alone costs 1 + 1 + 12."
    )
    long = case.call(100_000, 8, 60_000_000, 1_000_000, 5_000, 1)
    case.equal(sum(long), 100_000, "the sum of the chunks of a prompt of 100,000 tokens")
    costs = chunk_cost(long, 8, 1_000_000, 5_000, 1)
    case.true(
        max(costs) <= 60_000_000,
        f"the heaviest of {len(long)} steps costs {max(costs):,}, over the target of 60,000,000",
    )
    case.true(max(costs) - min(costs) < 0.01 * max(costs),
              f"the steps of the long prompt cost from {min(costs):,} to {max(costs):,}",
              hint="With so many tokens all steps can be nearly equally heavy.")  # fmt: skip


@check_even_chunks.part("random")
def _even_random(case: Case) -> None:
    for _ in range(40):
        prompt, streams = case.randint(1, 13), case.randint(0, 4)
        c0, c1, c2 = case.randint(0, 8), case.randint(0, 5), case.randint(0, 3)
        least = c0 + c1 * (1 + streams) + c2 * prompt
        _even(case, prompt, streams, least + case.randint(0, 3 + least), c0, c1, c2)


def _even(case: Case, prompt: int, streams: int, target: int, c0: int, c1: int, c2: int) -> None:
    got = case.call(prompt, streams, target, c0, c1, c2)
    told = f"for prompt={prompt}, streams={streams}, target={target}, c0={c0}, c1={c1}, c2={c2}"
    case.true(
        isinstance(got, list) and sum(got) == prompt and min(got) >= 1, f"{got!r} are not chunks of {prompt} tokens"
    )
    best = best_plan(prompt, streams, target, c0, c1, c2)
    mine, theirs = chunk_cost(got, streams, c0, c1, c2), chunk_cost(best, streams, c0, c1, c2)
    case.true(max(mine) <= target, f"{got} costs {mine}, over the target {told}")
    case.true(len(got) <= len(best), f"{got} takes {len(got)} steps; {best} takes {len(best)} {told}")
    case.true(max(mine) <= max(theirs),
              f"the most expensive step of {got} costs {max(mine)}; that of {best} only {max(theirs)} {told}",
              hint="Among plans with the fewest steps, the load is to be spread.")  # fmt: skip
    case.equal(
        got,
        best,
        f"the chunks {told}",
        hint="Among equally good plans: the first chunk as long as possible, then the second.",
    )
