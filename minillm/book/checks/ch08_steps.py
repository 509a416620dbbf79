"""Checks of chapter 08: what a step takes of each prompt, by grains, by a repaired budget. Built in chapter 08."""

from __future__ import annotations

from collections.abc import Callable

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.chips import Html, table

# 3 · a planner of chunks


def planned(
    running, waiting, budget, max_num_seqs, cap, grain, *, decodes=True, key=lambda pair: pair[1], capped=True,
    whole=lambda todo, room, grain: todo <= room, passes=False, places=None, zeros=False,
) -> list[tuple[str, int]]:  # fmt: skip
    plan: list[tuple[str, int]] = []

    def give(name: str, todo: int) -> bool:
        left = budget - sum(count for _, count in plan)
        room = min(left, cap) if capped else left
        count = todo if whole(todo, room, grain) else min(todo, room) // grain * grain
        if count or zeros:
            plan.append((name, count))
        return count > 0

    first = [pair for pair in running if pair[1] == 1] if decodes else []
    for name, todo in first + sorted((one for one in running if one not in first), key=key):
        give(name, todo)
    free = max_num_seqs - (len(running) if places is None else places(plan, running))
    for name, todo in waiting:
        if free <= 0:
            break
        got = give(name, todo)
        free -= got
        if not got and not passes:
            break
    return plan


def _explain_plan(got, expected, running, waiting, budget, max_num_seqs, cap, grain) -> str | None:
    todo, left, queue = dict(running + waiting), budget, [name for name, _ in waiting]
    for name, count in got:
        if count <= 0:
            return f"{name} gets {count} tokens. Leave out the requests that get none."
        if count > left:
            return f"{name} gets {count} tokens, but {left} are left."
        if count > cap:
            return f"{name} gets {count} tokens, the cap is {cap}."
        if count != todo[name] and count % grain:
            return f"{name} is cut at {count}: it gets all {todo[name]} tokens, or a multiple of {grain}."
        left -= count
    served = [name for name, _ in got if name in queue]
    if len(served) > max(0, max_num_seqs - len(running)):
        return f"{len(running) + len(served)} requests are in the batch: every running one is, with or without tokens."
    if served != queue[: len(served)]:
        return f"a waiting request overtakes: {served}. The first waiting request that gets 0 tokens ends the plan."
    return None


def _random_step(draw: Draw) -> tuple:
    running = [(f"r{i}", draw.rng.choice((1, 1, draw.randint(2, 60)))) for i in range(draw.randint(0, 8))]
    waiting = [(f"w{i}", draw.randint(1, 60)) for i in range(draw.randint(0, 5))]
    draw.rng.shuffle(running)  # the order of the names says nothing
    return (
        running, waiting, draw.randint(0, 91), draw.randint(0, 12), draw.randint(16, 70), draw.rng.choice((1, 4, 8, 16))
    )  # fmt: skip


check_plan_step = FunctionChecker(
    "plan_step",
    planned,
    hint="Requests with one token left; then running prompts, the fewest tokens left first; then the queue in order.",
    examples=[
        ([("A", 1), ("B", 50), ("C", 1)], [("D", 20)], 32, 8, 99, 8),
        ([("A", 40), ("B", 1), ("C", 12)], [("D", 5)], 40, 8, 99, 8),
        ([("A", 40), ("B", 1)], [("D", 9)], 40, 8, 20, 8),  # the cap cuts A, and D can start
    ],
    edges=[
        ([], [], 16, 4, 99, 4),
        ([("A", 1), ("B", 9)], [("C", 3)], 0, 4, 99, 4),
        ([("A", 1), ("B", 1), ("C", 1)], [], 2, 4, 99, 4),  # fewer tokens than decoding requests
        ([("A", 30), ("B", 1), ("C", 1)], [], 2, 4, 99, 1),
        ([("B", 9), ("A", 9), ("C", 5)], [], 14, 4, 99, 4),
        ([("A", 30), ("B", 7)], [], 40, 4, 99, 16),  # a whole todo needs no grain
        ([("A", 9), ("B", 3)], [("C", 2)], 8, 4, 99, 8),  # B whole, A passed over, C fits
        ([("A", 9)], [("B", 9), ("C", 2)], 7, 4, 99, 8),
        ([], [("A", 16), ("B", 16)], 32, 4, 99, 16),
        ([], [("A", 17)], 16, 4, 99, 16),
        ([("A", 1), ("B", 40)], [("C", 3), ("D", 3)], 20, 3, 99, 16),  # one place left
        ([("A", 9), ("B", 9)], [("C", 3)], 4, 2, 99, 8),  # a running request without tokens still has its place
        ([("A", 1), ("B", 1)], [("C", 3)], 16, 1, 99, 4),  # more running requests than places
        ([], [("A", 3), ("B", 20), ("C", 1)], 12, 8, 99, 4),
        ([("A", 40), ("B", 16), ("C", 17)], [("D", 16)], 80, 8, 16, 8),  # exactly the cap, and one more
        ([("A", 40)], [("D", 30), ("E", 30)], 64, 8, 23, 8),  # a cap that is no multiple
        ([("A", 1), ("B", 7)], [("D", 5)], 30, 8, 4, 4),
        ([], [("A", 5), ("B", 1)], 30, 8, 99, 4),  # a waiting request with one token waits for its turn
    ],
    random=_random_step,
    trials=150,
    returns="the plan",
    misconceptions={
        "Running requests with todo 1 come first, before any prompt.": dict(decodes=False, key=lambda _: 0),
        "Of the running prompts the one with the smallest todo comes first.": dict(key=lambda pair: 0),
        "Of running prompts with equal todo the one that arrived first comes first.": dict(
            key=lambda pair: (pair[1], pair[0])
        ),
        "A whole todo need not be a multiple of the grain.": dict(whole=lambda *_: False),
        "No request gets more than the cap in one step.": dict(capped=False),
        "a waiting request overtakes: the first one that gets 0 tokens ends the plan.": dict(passes=True),
        "Every running request is in the batch, with or without tokens.": dict(places=lambda plan, running: len(plan)),
        "Leave out the requests that get 0 tokens.": dict(zeros=True),
    },
    explain=_explain_plan,
)

# 4 · a repaired budget


def rows_planned(rows, budget, *, negative=False, cuts=False, stops=False, strict=False, zeros=False):
    if budget < 0 and not negative:
        raise ValueError("the budget is below 0")
    plan: list[tuple[str, int]] = []
    for name, tokens, may_cut in rows:
        left = budget - sum(count for _, count in plan)
        count = min(tokens, left) if may_cut or cuts or tokens < left + (not strict) else 0
        if count > 0 or zeros:
            plan.append((name, count))
        elif stops:
            break
    return plan


def _explain_rows(got, expected, rows, budget) -> str | None:
    wants, left = {name: (tokens, may_cut) for name, tokens, may_cut in rows}, budget
    for name, count in got:
        if count <= 0:
            return f"{name} was given {count} tokens. Counts are positive; leave out a row that gets none."
        if count > left:
            return f"{name} was given {count} tokens, {left} were left."
        if not wants[name][1] and count != wants[name][0]:
            return f"{name} was cut to {count} of {wants[name][0]} tokens; it gets all or none."
        left -= count
    return None


def _random_rows(draw: Draw) -> tuple:
    todo = [draw.rng.choice((0, 1, 1, draw.randint(2, 30))) for _ in range(draw.randint(0, 8))]
    budget = draw.randint(-1, 40) if draw.rng.random() < 0.2 else draw.randint(0, 40)
    return [(f"r{i}", tokens, draw.rng.random() < 0.6) for i, tokens in enumerate(todo)], budget


check_repair_budget = FunctionChecker(
    "repair_budget",
    rows_planned,
    hint="Go through the rows in order; when a row gets no tokens, go on with the next one.",
    examples=[
        ([("A", 1, True), ("B", 1, True), ("P", 7, False), ("D", 20, True)], 8),
        ([("A", 1, True), ("P", 7, False), ("D", 20, True)], 9),
    ],
    edges=[
        ([], 8),
        ([("A", 3, True), ("P", 3, False)], 0),
        ([("P", 8, False), ("A", 1, True)], 8),
        ([("P", 9, False), ("A", 1, True)], 8),
        ([("P", 9, False), ("Q", 8, False), ("R", 1, False)], 8),
        ([("A", 0, True), ("P", 0, False), ("B", 2, True)], 8),
        ([("A", 8, True), ("B", 1, True), ("P", 1, False)], 8),
        ([("A", 1, True)], -1),
        ([], -3),
    ],
    random=_random_rows,
    trials=150,
    raises=(ValueError,),
    returns="the plan",
    misconceptions={
        "A budget below 0 raises ValueError, also if there are no rows: the caller made a mistake.": dict(
            negative=True
        ),
        "A row that may not be cut gets all its tokens or none.": dict(cuts=True),
        "After a row that gets no tokens go on with the next one.": dict(stops=True),
        "A row fits if it needs exactly what is left.": dict(strict=True),
        "Leave out a row that gets no tokens.": dict(zeros=True),
    },
    explain=_explain_rows,
)


def budget_trace(plan: Callable, budget: int = 8) -> Html:
    """Serve two requests that decode, a picture and a document with `plan`, and show each step."""
    todo, outputs, shown = {"A": 1, "B": 1, "P": 7, "D": 20}, {"A": 3, "B": 4}, []
    for step in range(1, 8):
        rows = [(name, count, name != "P") for name, count in todo.items() if count]
        if not rows:
            break
        given = plan(rows, budget)
        left = [budget - sum(count for _, count in given[: i + 1]) for i in range(len(given))]
        for name, count in given:
            todo[name] -= count
            if name in outputs and outputs[name] > 1:
                outputs[name], todo[name] = outputs[name] - 1, 1
        plan_told, total = ", ".join(f"{name} {count}" for name, count in given), sum(count for _, count in given)
        shown.append([step, plan_told, ", ".join(map(str, left)), f"{total} of {budget}", 20 - todo["D"]])
    return table(shown, ["step", "plan", "left after each row", "sum", "tokens of D computed"])
