"""Checks of chapter 08: a prompt in chunks of equal cost. Built in chapter 08."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

from minillm.book.checks import Draw, FunctionChecker, Timed


def chunk_cost(chunks: Sequence[int], streams: int, c0: int, c1: int, c2: int) -> list[int]:
    """What each step costs, position by position: the token at position p reads p + 1 keys."""
    ends = list(accumulate(chunks))
    reads = [sum(range(end - n + 1, end + 1)) for n, end in zip(chunks, ends)]
    return [c0 + c1 * (n + streams) + c2 * read for n, read in zip(chunks, reads)]


def best_plan(prompt, streams, target, c0, c1, c2) -> list[int]:
    """The best of all possible lists, found by looking at every one, if there are not too many."""
    if prompt > 10:
        return evened(prompt, streams, target, c0, c1, c2)
    plans = [(max(chunk_cost(plan, streams, c0, c1, c2)), plan) for plan in _compositions(prompt)]
    within = [(len(plan), most, [-n for n in plan]) for most, plan in plans if most <= target]
    if not within:
        raise ValueError("a step of one token costs more than the target")
    return [-n for n in min(within)[2]]


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as a sum of positive whole numbers, in order."""
    if not total:
        yield ()
    for first in range(1, total + 1):
        for rest in _compositions(total - first):
            yield first, *rest


def evened(
    prompt, streams, target, c0, c1, c2, *, reads=lambda n, s: n * s + n * (n + 1) // 2, others=True, even=True,
    fits=bisect_right, refuses=True, halves=True,
) -> list[int]:  # fmt: skip
    """The same by two bisections, for long prompts; with switches for mistakes."""

    def greedy(limit: int, most: int = prompt) -> list[int] | None:
        chunks, done = [], 0
        while done < prompt:
            cost = lambda n, s=done: c0 + c1 * (n + streams * others) + c2 * reads(n, s)
            n = fits(range(1, prompt - done + 1), limit, key=cost)
            if (not n and refuses) or len(chunks) == most:
                return None
            chunks.append(max(1, n))
            done += chunks[-1]
        return chunks

    first = greedy(target)
    if first is None:
        raise ValueError("a step of one token costs more than the target")
    if not even:
        return first
    if not halves:
        limit = target
        while limit and greedy(limit - 1, len(first)):
            limit -= 1
        return greedy(limit, len(first))
    lowest = bisect_left(range(target), True, key=lambda limit: greedy(limit, len(first)) is not None)
    return greedy(lowest, len(first))


def _explain_chunks(got, expected, prompt, streams, target, c0, c1, c2) -> str | None:
    if not isinstance(expected, list):
        return "ValueError if somewhere in the prompt a step of one token costs more than the target."
    if sum(got) != prompt or min(got) < 1:
        return f"The chunks are 1 or more, and their sum is {prompt}."
    most, lowest = (max(chunk_cost(plan, streams, c0, c1, c2)) for plan in (got, expected))
    if most > target:
        return f"A step costs {most}, over the target of {target}."
    if len(got) > len(expected):
        return f"{len(expected)} steps are enough."
    if most > lowest:
        return f"the most expensive step costs {most}, but with as few steps it can be {lowest}."
    return "Of equally good lists take the one whose first chunk is longest, then the second, and so on."


def _random_chunks(draw: Draw) -> tuple:
    prompt, streams = (
        draw.rng.choice((draw.randint(1, 11), draw.randint(1, 11), draw.randint(11, 200))),
        draw.randint(0, 4),
    )
    c0, c1, c2 = draw.randint(0, 8), draw.randint(0, 5), draw.randint(0, 3)
    least = c0 + c1 * (1 + streams) + c2 * prompt  # below this the last token fits in no step
    return prompt, streams, least + draw.randint(-(draw.rng.random() < 0.1), 3 + least), c0, c1, c2


_HALVE = "Bisect the limit of the most expensive step, and find each chunk by bisection, too."

check_even_chunks = FunctionChecker(
    "even_chunks",
    best_plan,
    hint="Within the target; then the fewest steps; then the lowest maximum; then long chunks first.",
    examples=[(12, 0, 10, 2, 1, 0), (10, 0, 30, 1, 1, 1)],
    edges=[
        (1, 0, 5, 2, 1, 1),
        (9, 0, 100, 1, 1, 1),  # one step
        (7, 0, 3, 2, 1, 0),  # one token a step
        (11, 3, 12, 2, 1, 0),  # the streams' tokens cost, too
        (10, 0, 17, 0, 0, 1),  # attention alone
        (9, 4, 6, 6, 0, 0),  # only the step itself costs
        (5, 2, 4, 2, 1, 0),  # a step of one token costs 2 + 3
        (12, 0, 12, 1, 1, 1),  # the first tokens fit; the last one alone costs 1 + 1 + 12
        (8, 0, 7, 0, 1, 0),
        (5, 2, 0, 0, 0, 0),  # a step costs nothing, and may cost nothing
        (3, 0, 2**60 + 2, 2**60, 1, 0),  # three tokens cost 1 too much, which a float of 53 bits loses
    ],
    random=_random_chunks,
    raises=(ValueError,),
    returns="the list of chunks",
    misconceptions={
        "Of lists with the fewest steps take one whose most expensive step is as cheap as possible.": partial(
            evened, even=False
        ),
        "The tokens of the other requests cost c1 each, too.": partial(evened, others=False),
        "Each token also reads the keys of the chunks before.": partial(evened, reads=lambda n, s: n * (n + 1) // 2),
        "The token at position p reads p + 1 keys: n tokens of a chunk read n (n + 1) / 2 of their own chunk.": partial(
            evened, reads=lambda n, s: n * s + n * n
        ),
        "A step may cost exactly the target.": partial(evened, fits=bisect_left),
        "ValueError if somewhere in the prompt a step of one token costs more than the target.": partial(
            evened, refuses=False
        ),
        "Of equally good lists take the one with the longest first chunk.": lambda *given: best_plan(*given)[::-1],
        _HALVE: partial(evened, halves=False),
    },
    explain=_explain_chunks,
    timed=(
        Timed(
            "a prompt of 100,000 tokens",
            lambda draw: (100_000, draw.randint(4, 16), 60_000_000, 1_000_000, 5_000, 1),
            hint=_HALVE,
            seconds=2,
        ),
    ),
)
