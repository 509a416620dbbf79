"""Check of chapter 07: an order of service. Built in chapter 07."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import partial
from itertools import permutations

from minillm.book.checks import Case, Draw, FunctionChecker


def serve(
    prompts, arrivals, block_size, capacity, ageing, *, order: Iterable[int] | None = None, mistake: str = ""
) -> list[tuple[int, int, int]]:
    """(index, start, computed tokens) of each prompt, by the rule of the statement, or in a given order."""
    cache: list[tuple[int, ...]] = []  # prefixes that end at a block's end, the least recently used first
    left, served, clock, given = list(range(len(prompts))), [], 0, iter(order or ())
    ties, matters = (1 if mistake == "late ties" else -1), mistake != "only ageing"
    ageing = Fraction(0 if mistake == "no ageing" else int(ageing) if mistake == "whole ageing" else ageing)

    def cached(prompt: Sequence[int]) -> int:
        blocks, last = 0, len(prompt) - (mistake != "full hit")
        while (blocks + 1) * block_size <= last and tuple(prompt[: (blocks + 1) * block_size]) in cache:
            blocks += 1
        return blocks * block_size

    while left:
        clock = max(clock, min(arrivals[i] for i in left))
        waiting = [i for i in left if arrivals[i] <= clock or mistake == "not there yet"]
        if mistake == "too late":
            waiting = [i for i in left if arrivals[i] < clock] or waiting
        scores = {i: matters * cached(prompts[i]) + ageing * (clock - arrivals[i]) for i in waiting}
        rounded = int if mistake == "whole score" else Fraction
        scores = {i: (rounded(score), ties * arrivals[i], ties * i) for i, score in scores.items()}
        index = max(waiting, key=scores.get) if order is None else next(given)
        prompt, computed = prompts[index], len(prompts[index]) - cached(prompts[index])
        ends = range(block_size, len(prompt) + (block_size if mistake == "partial" else 1), block_size)
        own = [tuple(prompt[:end]) for end in ends]
        kept = [key for key in cache if key not in own or mistake == "no touch"]
        new = [key for key in own if key not in kept]
        cache = kept + (new if mistake == "head first" else new[::-1])
        if mistake != "no eviction":
            cache = cache[:capacity] if mistake == "most recent" else cache[-capacity:]
        served.append((index, clock, computed))
        clock += computed
        left.remove(index)
    return served


def _against_all_orders(case: Case, got: list, prompts, arrivals, block_size, capacity, ageing) -> None:
    """Where the theorem holds, no order computes fewer tokens."""
    beginnings = any(a != b and b[: len(a)] == a for a in prompts for b in prompts)
    if ageing or any(arrivals) or beginnings or len(prompts) != 5:
        return
    orders = permutations(range(5))
    best = min(sum(row[2] for row in serve(prompts, arrivals, block_size, capacity, 0, order=one)) for one in orders)
    case.equal(sum(row[2] for row in got), best, "the sum of computed tokens, against the best of all 120 orders,")


def _explain_order(got, expected, prompts, arrivals, block_size, capacity, ageing) -> str | None:
    if sorted(row[0] for row in got) != list(range(len(prompts))):
        return "Every prompt is served once."
    place = next(place for place, (mine, right) in enumerate(zip(got, expected)) if mine != right)
    index = expected[place][0]
    return (
        f"Row {place} is prompt {index}, which is {prompts[index]}; arrivals {arrivals}, block_size={block_size}, "
        f"capacity={capacity}, ageing={ageing}; served before it: {[row[0] for row in expected[:place]]}."
    )


def _edges(draw: Draw) -> Iterable[tuple]:
    yield [[1]], [0], 4, 1, 0
    # At 9 the scores are 4, 4.5 and 2.
    yield [[1, 1, 1, 1, 9, 9, 9, 9, 9], [1, 1, 1, 1, 2], [5, 5], [1, 1, 3]], [0, 9, 6, 9], 2, 8, 1.5
    yield [[1, 2, 3], [4]], [50, 7], 1, 3, 1  # the clock jumps
    yield [[1, 2, 3, 4], [9], [1, 2, 3, 4], [1, 2, 3, 4]], [0, 0, 0, 0], 2, 2, 0  # the last token is computed
    yield [[1, 2], [1, 2, 3], [5, 6], [5, 6, 7]], [3, 0, 0, 1], 2, 1, 0  # room for one block
    yield [[1, 1, 9], [2, 2, 9], [2, 2, 8], [1, 1, 8]], [0, 1, 4, 5], 2, 1, 0
    # The first block of a prompt stays longer than its last one,
    yield [[1, 2, 3, 4, 5, 6, 7], [8, 8, 8], [1, 2, 9], [1, 2, 3, 4, 5, 6, 9]], [0] * 4, 2, 3, 0
    # and the last one is evicted.
    yield [[1, 2, 3, 4, 5, 6, 10], [8, 8, 11], [1, 2, 12], [1, 2, 3, 4, 5, 6, 13]], [0, 0, 9, 11], 2, 3, 0
    # Used again, so kept.
    yield [[1, 1, 9], [2, 2, 9], [1, 1, 8], [3, 3, 9], [1, 1, 7]], [0, 1, 5, 6, 9], 2, 2, 0
    yield [[3, 3, 3], [4, 4, 4], [3, 3, 5]], [2, 1, 0], 1, 3, 0
    yield [[1] * 9, *([[1] * 8 + [2 + i] for i in range(6)]), [5, 5]], [0, *range(0, 12, 2), 1], 4, 4, 1
    # At 16 the scores are 0.25 · 16 = 4 and 4 + 0.25: whole numbers would tie, and the earlier one would be served.
    yield [[1, 1, 1, 1, 2], [3] * 11, [5], [1, 1, 1, 1, 4]], [0, 0, 0, 15], 2, 8, 0.25
    yield [[1, 1, 1, 9], [5, 5], [1, 1, 1, 8]], [0, 1, 4], 1, 8, 0  # the third arrives when the first has been served
    for _ in range(4):
        heads = ([1, 1, 1, 1], [1, 1, 2, 2], [3, 3], [3, 3, 1, 1], [])
        yield [[*draw.rng.choice(heads), 10 + i] for i in range(5)], [0] * 5, 2, 2, 0


def _random_prompts(draw: Draw) -> tuple:
    size, prompts = draw.randint(1, 4), []
    for _ in range(draw.randint(1, 9)):
        base = draw.rng.choice(prompts) if prompts and draw.rng.random() < 0.7 else []
        shared = base[: draw.randint(0, len(base) + 1)]
        prompts.append([*shared, *(draw.randint(0, 3) for _ in range(draw.randint(1, 7)))])
    latest = draw.rng.choice((1, 40))
    arrivals = [draw.randint(0, latest) for _ in prompts]
    capacity = max(1, *(len(prompt) // size for prompt in prompts), 1) + draw.randint(0, 4)
    return prompts, arrivals, size, capacity, draw.rng.choice((0, 0.25, 0.5, 1, 4))


_SERVE_MISTAKES = {
    "A score may be a fraction: do not round it.": "whole score",
    "The last token is always computed, and with it its block, also of a prompt that is cached.": "full hit",
    "The last block of a prompt becomes the least recent of its blocks, the first one the most recent.": "head first",
    "A block that is used again becomes the most recently used; yours keeps its old place.": "no touch",
    "The least recently used blocks are evicted; yours evicts the most recent.": "most recent",
    "The cache holds at most `capacity` blocks; yours goes on growing.": "no eviction",
    "Only full blocks are cached; yours keeps the last one although it is not full.": "partial",
    "A prompt whose arrival is later than the clock does not wait yet.": "not there yet",
    "A prompt whose arrival equals the clock waits already.": "too late",
    "Ties go to the earlier arrival, then to the smaller index.": "late ties",
    "The score has the waiting time, too: `ageing` for each unit of time.": "no ageing",
    "The score has the cached tokens, too, not only the waiting time.": "only ageing",
    "`ageing` may be a fraction.": "whole ageing",
}
check_serve_order = FunctionChecker(
    "serve_order",
    serve,
    hint="The score of a waiting prompt: cached tokens + ageing · (clock - arrival); the greatest is served.",
    examples=[
        # The third overtakes the second, whose prefix is not cached;
        ([[1, 2, 3, 4, 5], [7, 7, 7, 7, 7], [1, 2, 3, 4, 6]], [0, 0, 0], 2, 4, 0),
        # here it came 4 later: 4 cached tokens against 2 for each unit of waiting.
        ([[1, 2, 3, 4, 5], [7, 7, 7, 7, 7], [1, 2, 3, 4, 6]], [0, 0, 4], 2, 4, 2),
    ],
    edges=_edges,
    random=_random_prompts,
    trials=30,
    returns="the list of (index, start, computed)",
    misconceptions={hint: partial(serve, mistake=mistake) for hint, mistake in _SERVE_MISTAKES.items()},
    explain=_explain_order,
    also=_against_all_orders,
)
