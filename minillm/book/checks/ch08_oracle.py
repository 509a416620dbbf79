"""References of chapter 08's checks, written to be plain rather than quick. Built in chapter 08."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

from minillm.book.chips import Html, table

Row = tuple[str, int, bool]  # name, tokens, whether it may be cut


def judged(
    requests: Sequence[tuple[float, list[float]]], targets: dict[str, float], start: float, end: float
) -> tuple[float, float | None, list[str]]:
    """(goodput, attainment, a word on each request of the window)."""
    good, verdicts = 0, []
    for index, (arrival, times) in enumerate(requests):
        if not start <= (times[-1] if times else arrival) < end:
            continue
        if not times:
            verdicts.append(f"request {index} failed")
            continue
        gaps = [times[i] - times[i - 1] for i in range(1, len(times))]
        numbers = {"ttft": times[0] - arrival, "e2e": times[-1] - arrival}
        if gaps:
            numbers |= {"itl": max(gaps), "tpot": sum(gaps) / len(gaps)}
        broken = [name for name in targets if numbers.get(name, 0.0) > targets[name]]
        good += not broken
        verdicts.append(
            f"request {index} "
            + (f"breaks {' and '.join(f'{name} ({numbers[name]:.3g})' for name in broken)}" if broken else "keeps all")
        )
    return good / (end - start), good / len(verdicts) if verdicts else None, verdicts


def gaps_of(trace: Sequence[tuple[float, dict[str, int]]]) -> list[float]:
    """All gaps of all requests, from each request's own list of token times."""
    times: dict[str, list[float]] = {}
    for time, delivered in trace:
        for name, count in delivered.items():
            times.setdefault(name, []).extend([time] * count)
    return [later - sooner for own in times.values() for sooner, later in pairwise(own)]


def planned(
    running: Sequence[tuple[str, int]], waiting: Sequence[tuple[str, int]], budget: int, seqs: int, cap: int, grain: int
) -> list[tuple[str, int]]:
    """The plan of the statement, rule by rule."""
    plan: list[tuple[str, int]] = []

    def left() -> int:
        return budget - sum(count for _, count in plan)

    def give(name: str, todo: int) -> bool:
        count = max((n for n in range(todo + 1) if n <= min(left(), cap) and (n == todo or n % grain == 0)), default=0)
        if count:
            plan.append((name, count))
        return count > 0

    for name, todo in running:
        if todo == 1:
            give(name, todo)
    for _, (name, todo) in sorted(enumerate(running), key=lambda pair: (pair[1][1], pair[0])):
        if todo > 1:
            give(name, todo)
    places = seqs - len(running)
    for name, todo in waiting:
        if places <= 0 or not give(name, todo):
            break
        places -= 1
    return plan


def rows_planned(rows: Sequence[Row], budget: int) -> list[tuple[str, int]]:
    plan: list[tuple[str, int]] = []
    for name, tokens, may_cut in rows:
        left = budget - sum(count for _, count in plan)
        count = min(tokens, left)
        if count > 0 and (may_cut or count == tokens):
            plan.append((name, count))
    return plan


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


def chunk_cost(chunks: Sequence[int], streams: int, c0: int, c1: int, c2: int) -> list[int]:
    """What each step costs, position by position: the token at position p reads p + 1 keys."""
    ends = list(accumulate(chunks))
    reads = [sum(range(end - n + 1, end + 1)) for n, end in zip(chunks, ends)]
    return [c0 + c1 * (n + streams) + c2 * read for n, read in zip(chunks, reads)]


def best_plan(prompt: int, streams: int, target: int, c0: int, c1: int, c2: int) -> list[int]:
    """The best of all possible plans, by looking at every one; for small prompts."""

    def rank(chunks: tuple[int, ...]) -> tuple:
        return len(chunks), max(chunk_cost(chunks, streams, c0, c1, c2)), [-n for n in chunks]

    return list(
        min((plan for plan in _compositions(prompt) if max(chunk_cost(plan, streams, c0, c1, c2)) <= target), key=rank)
    )


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as a sum of positive whole numbers, in order."""
    if not total:
        yield ()
    for first in range(1, total + 1):
        for rest in _compositions(total - first):
            yield first, *rest
