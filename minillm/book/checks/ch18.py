"""Checks of chapter 18: the best length of a draft, a second chance, a lookup by votes, a draft cache kept in step.
Built in chapter 18.

`ch18_drafters` has the last two.
"""

from __future__ import annotations

import numpy as np

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch18_drafters import check_ngram_votes, check_repair_drafter
from minillm.book.checks.ch18_oracle import (
    ToyModel,
    second_chance,
    time_per_token,
    trace_of,
)

__all__ = [
    "ToyModel",
    "check_best_length",
    "check_ngram_votes",
    "check_repair_drafter",
    "check_second_chance",
    "trace_of",
]

_REJECTION = tuple(f"minillm.speculative.rejection.{name}" for name in ("accept", "residual", "RejectionSampler"))

check_best_length = Checker(
    "best_length",
    hint=(
        "Milliseconds of a step over tokens of a step; a step of the target has a token more, for each request, "
        "than was drafted."
    ),
    forbid=("minillm.speculative.adaptive.AdaptiveLength",),
)
check_second_chance = Checker(
    "second_chance",
    hint="Keep what is still to be given out: first p, after a rejection max(rest - q, 0), divided by its sum.",
    forbid=_REJECTION,
)


@check_best_length.part("example")
def _length_example(case: Case) -> None:
    _best(case, [0.8, 0.8, 0.8, 0.8], 1.0, {1: 10.0, 2: 10.0, 3: 11.0, 4: 12.0, 5: 15.0}, 1)
    _best(case, [0.9, 0.5, 0.9], 0.5, {4: 10.0, 8: 12.0, 12: 13.0, 16: 20.0}, 4)


@check_best_length.part("edges")
def _length_edges(case: Case) -> None:
    _best(case, [], 1.0, {1: 10.0}, 1)  # nobody guesses
    _best(case, [0.1, 0.1], 5.0, {1: 10.0, 2: 11.0, 3: 12.0}, 1)  # drafting never pays
    _best(case, [0.0, 1.0, 1.0], 0.0, {1: 8.0, 2: 8.0, 3: 8.0, 4: 8.0}, 1)  # as good as none: the shortest
    _best(case, [1.0, 1.0, 1.0], 0.0, {1: 8.0, 2: 16.0, 3: 24.0, 4: 32.0}, 1)  # all equal
    # A hard first place.
    _best(case, [0.5, 1.0, 1.0, 1.0, 1.0], 1.0, {1: 4.0, 2: 4.0, 3: 4.0, 4: 4.0, 5: 4.0, 6: 4.0}, 1)
    # Dearer at first, then it pays.
    _best(case, [0.9] * 5, 0.5, {1: 10.0, 2: 19.0, 3: 19.0, 4: 19.0, 5: 19.0, 6: 19.0}, 1)
    _best(case, [0.8] * 4, 0.2, {64: 10.0, 128: 20.0, 192: 30.0, 256: 40.0, 320: 50.0}, 64)  # a full machine
    _best(case, [0.75] * 4, 6.0, {8: 10.0, 16: 11.0, 24: 12.0, 32: 13.0, 40: 14.0}, 8)


@check_best_length.part("random")
def _length_random(case: Case) -> None:
    for _ in range(40):
        chances = [case.rng.choice((case.rng.random(), 0.9, 0.6)) for _ in range(case.randint(0, 9))]
        batch, now = case.rng.choice((1, 1, 2, 7, 32)), 10.0
        costs = {}
        for length in range(len(chances) + 1):
            now += case.rng.choice((0.0, 0.1, case.rng.random() * 6))
            costs[batch * (length + 1)] = round(now, 3)
        _best(case, chances, round(case.rng.random() * case.rng.choice((0.3, 3)), 3), costs, batch)


def _best(case: Case, chances: list[float], draft_ms: float, costs: dict[int, float], batch: int) -> None:
    def step_ms(num_tokens: int) -> float:
        if num_tokens not in costs:
            case.fail(
                (
                    f"step_ms was asked for {num_tokens} tokens: with batch={batch} a step has "
                    f"{', '.join(map(str, costs))}"
                ),
                hint="Each of the requests brings its last token and its guesses.",
            )
        return costs[num_tokens]

    got = case.call(chances, draft_ms, step_ms, batch)
    told = f"for chances={[round(c, 3) for c in chances]}, draft_ms={draft_ms}, batch={batch} and steps of {costs} ms"
    case.true(
        isinstance(got, tuple) and len(got) == 2, f"the result {told} is {got!r}, not (length, ms_per_token)", hint=""
    )
    times = [time_per_token(chances, draft_ms, costs.__getitem__, batch, length) for length in range(len(chances) + 1)]
    best = min(range(len(times)), key=lambda length: (round(times[length], 9), length))
    case.is_a(got[0], int, f"length {told}")
    case.true(0 <= got[0] <= len(chances), f"length is {got[0]} {told}; expected 0 to {len(chances)}")
    case.close(
        float(got[1]),
        times[got[0]],
        f"ms_per_token {told}, with length={got[0]}\n  ms_per_token",
        rtol=1e-6,
        hint=_why_time(got[1], chances, draft_ms, costs, batch, got[0]),
    )
    told_times = ", ".join(f"{length}: {ms:.4g}" for length, ms in enumerate(times))
    worse = round(times[got[0]], 9) > round(times[best], 9)
    case.equal(
        got[0],
        best,
        f"length {told}\n  length",
        hint=f"Lengths and their ms a token: {told_times}. "
        + (
            "They need neither fall nor rise all the way, so every length must be tried."
            if worse
            else "Of equally good lengths the shortest."
        ),
    )


def _why_time(
    found: float, chances: list[float], draft_ms: float, costs: dict[int, float], batch: int, length: int
) -> str | None:
    step, product, total = costs[batch * (length + 1)], np.cumprod(chances[:length]), length * draft_ms
    right = 1 + product.sum()
    mean = float(np.mean(chances[:length])) if length else 0.0
    wrong = {
        "The target's own token comes in every step: the guesses are on top of it.": (total + step)
        / (batch * max(product.sum(), 1e-12)),
        "A guess counts only if all before it were right: multiply the chances up to it.": (total + step)
        / (batch * (1 + sum(chances[:length]))),
        "The chances differ from place to place; their mean is not enough.": (total + step)
        / (batch * (1 + sum(mean**i for i in range(1, length + 1)))),
        "One pass of the draft serves the whole batch.": (batch * total + step) / (batch * right),
        "The draft runs once for each guess.": (draft_ms + step) / (batch * right),
        "Each request of the batch gets its tokens.": (total + step) / right,
        "Drafting takes its time too.": step / (batch * right),
    }
    return next((hint for hint, value in wrong.items() if length and abs(value - found) < 1e-6 * abs(value)), None)


@check_second_chance.part("example")
def _chance_example(case: Case) -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([[0.2, 0.7, 0.1], [0.6, 0.1, 0.3]])
    for chances, last in (([0.4, 0.9], 0.5), ([0.9, 0.1], 0.5), ([0.9, 0.9], 0.1), ([0.9, 0.9], 0.99)):
        _gives(case, p, [1, 2], q, chances, last)


@check_second_chance.part("edges")
def _chance_edges(case: Case) -> None:
    p = np.array([0.1, 0.2, 0.3, 0.4])
    none = np.zeros((0, 4))
    for last in (0.0, 0.05, 0.3, 0.9999999, 1 - 2**-53):
        _gives(case, p, [], none, [], last)  # no guess at all
    _gives(case, p, [3, 0], np.stack([p, p]), [0.999, 0.5], 0.5)  # q is p: always accepted
    ngram = np.eye(4)
    for chance in (0.29, 0.31):
        _gives(case, p, [2, 3], ngram[[2, 3]], [chance, 0.5], 0.5)  # guesses that were looked up
    _gives(case, p, [2, 1, 0], ngram[[2, 1, 0]], [0.9, 0.9, 0.9], 0.5)
    _gives(case, np.array([0.5, 0.5, 0.0, 0.0]), [2], np.full((1, 4), 0.25), [0.0], 0.6)  # the target never says it
    # Exactly on the border.
    _gives(case, np.array([0.5, 0.5, 0.0, 0.0]), [1], np.array([[0.0, 1.0, 0.0, 0.0]]), [0.5], 0.0)
    # And the draw, too.
    _gives(case, np.array([0.25, 0.25, 0.25, 0.25]), [0], np.array([[0.5, 0.5, 0.0, 0.0]]), [0.5], 0.5)
    _gives(case, np.array([0.0, 0.0, 1.0, 0.0]), [0], np.array([[1.0, 0.0, 0.0, 0.0]]), [0.0], 0.0)
    # Nothing is left over.
    _gives(case, np.array([0.5, 0.5, 0.0]), [2, 0], np.array([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8]]), [0.3, 0.7], 0.7)


@check_second_chance.part("random")
def _chance_random(case: Case) -> None:
    rng = np.random.default_rng(case.seed)
    for _ in range(120):
        size, number = int(rng.integers(2, 9)), int(rng.integers(0, 4))
        p = rng.dirichlet(np.full(size, rng.choice([0.3, 1.0, 5.0])))
        qs = np.array([rng.dirichlet(np.full(size, 1.0)) for _ in range(number)]).reshape(number, size)
        guesses = [int(rng.choice(size, p=q)) for q in qs]
        _gives(case, p, guesses, qs, rng.random(number).tolist(), float(rng.random()))
    p, q = np.array([0.5, 0.25, 0.15, 0.1]), np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    count, seen = 8000, np.zeros(4)
    for _ in range(count):
        token, _ = case.student(
            p, [int(rng.choice(4, p=row)) for row in q], q, rng.random(2).tolist(), float(rng.random())
        )
        seen[token] += 1
    square = float(((seen - count * p) ** 2 / (count * p)).sum())
    case.true(
        square < 27.9,
        (
            f"of {count} draws the tokens came {seen.astype(int).tolist()} times, "
            f"expected about {(count * p).astype(int).tolist()}: chi-square {square:.1f}"
        ),
    )


def _gives(case: Case, p: np.ndarray, guesses: list[int], qs: np.ndarray, chances: list[float], last: float) -> None:
    given = (p.copy(), list(guesses), qs.copy(), list(chances), last)
    got = case.call(*given)
    told = (
        f"for p={_short(p)}, guesses={guesses}, qs={[_short(q) for q in qs]}, "
        f"chances={[round(c, 4) for c in chances]}, last={last:.6g}"
    )
    case.true(isinstance(got, tuple) and len(got) == 2, f"the result {told} is {got!r}, not (token, which)", hint="")
    right = second_chance(*given)
    case.true(
        int(got[0]) == right[0] and got[1] == right[1],
        f"(token, which) is {got!r} {told}; expected {right!r}",
        hint=_why_token(got, given),
    )


def _short(x: np.ndarray) -> list[float]:
    return [round(float(v), 4) for v in x]


def _why_token(got: tuple, given: tuple) -> str | None:
    p, guesses, qs, chances, _last = given
    mistakes = {
        "The token of the draw is the first at which the running sum is larger than `last`, not equal to it.": {
            "at_least": True
        },
        "After a rejection the rest is divided by its sum, before the next guess is looked at.": {"normalise": False},
        "A guess is compared with what is left to give out after the rejections before it, not with p.": {
            "accept_p": True
        },
        "Each rejection takes its own q off what the one before has left, not off p.": {"update": False},
        "After the last rejection draw from the rest, not from p: the guesses have had their part of p.": {
            "rest_from_p": True
        },
    }
    for hint, flag in mistakes.items():
        if second_chance(*given, **flag) == (got[0], got[1]):
            return hint
    for index, (guess, q, chance) in enumerate(zip(guesses, qs, chances)):
        if got[1] == index and chance * q[guess] == p[guess]:
            return "chance * q < rest: exactly on the border is a rejection."
    return None
