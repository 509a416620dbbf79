"""Checks of chapter 18: the best length of a draft, a second chance, a lookup by votes, a draft cache kept in step.
Built in chapter 18.

`ch18_oracle` has the references, `ch18_drafters` the last two, `ch18_trees` a tree in one pass and acceptance by
position.
"""

from __future__ import annotations

import numpy as np

from minillm.book.checks import Draw, FunctionChecker
from minillm.book.checks.ch18_drafters import check_ngram_votes, check_repair_drafter
from minillm.book.checks.ch18_oracle import Steps, ToyModel, best_length, second_chance, trace_of
from minillm.book.checks.ch18_trees import check_by_position, check_verify_tree

__all__ = [
    "ToyModel",
    "check_best_length",
    "check_by_position",
    "check_ngram_votes",
    "check_repair_drafter",
    "check_second_chance",
    "check_verify_tree",
    "trace_of",
]


# --- 1: the best length of a draft


def _given(chances: list[float], draft_ms: float, step_ms: list[float], batch: int) -> tuple:
    """step_ms: of a step with 1, 2, ... tokens for each request."""
    return chances, draft_ms, Steps({batch * place: ms for place, ms in enumerate(step_ms, 1)}), batch


def _random_lengths(draw: Draw) -> tuple:
    chances = [draw.rng.choice((draw.rng.random(), 0.9, 0.6)) for _ in range(draw.randint(0, 9))]
    now, step_ms = 10.0, []
    for _ in range(len(chances) + 1):
        now += draw.rng.choice((0.0, 0.1, draw.rng.random() * 6))
        step_ms.append(round(now, 3))
    draft_ms = round(draw.rng.random() * draw.rng.choice((0.3, 3)), 3)
    return _given(chances, draft_ms, step_ms, draw.rng.choice((1, 1, 2, 7, 32)))


def _times(got: object, expected: object, chances: list[float], *rest: object) -> str:
    times = [best_length(chances[:length], *rest, tried=(length,))[1] for length in range(len(chances) + 1)]
    return f"Milliseconds per token of each length: {', '.join(f'{n}: {ms:.6g}' for n, ms in enumerate(times))}."


check_best_length = FunctionChecker(
    "best_length",
    best_length,
    returns=("length", "ms_per_token"),
    examples=[
        _given([0.8, 0.8, 0.8, 0.8], 1.0, [10.0, 10.0, 11.0, 12.0, 15.0], 1),
        _given([0.9, 0.5, 0.9], 0.5, [10.0, 12.0, 13.0, 20.0], 4),
    ],
    edges=[
        _given([], 1.0, [10.0], 1),
        _given([0.1, 0.1], 5.0, [10.0, 11.0, 12.0], 1),  # drafting never pays
        _given([0.0, 1.0, 1.0], 0.0, [8.0] * 4, 1),  # as good as none: the shortest
        _given([1.0, 1.0, 1.0], 0.0, [8.0, 16.0, 24.0, 32.0], 1),  # all equal
        _given([0.1], 0.0, [10.0, 11.0 - 2e-11], 1),  # equal to nine decimal places
        _given([0.1], 0.0, [10.0, 11.0 - 2e-8], 1),  # not equal in the eighth
        _given([0.1], 0.0, [10.0, 11.0 - 7.7e-10], 1),  # less than 1e-9 apart, and not equal when rounded
        _given([0.5, 1.0, 1.0, 1.0, 1.0], 1.0, [4.0] * 6, 1),  # a hard first place
        _given([0.9] * 5, 0.5, [10.0, *[19.0] * 5], 1),  # more expensive at first, then it pays
        _given([0.8] * 4, 0.2, [10.0, 20.0, 30.0, 40.0, 50.0], 64),  # a full machine
        _given([0.75] * 4, 6.0, [10.0, 11.0, 12.0, 13.0, 14.0], 8),
    ],
    random=_random_lengths,
    explain=_times,
    atol=1e-12,
    rtol=1e-12,
    hint="Divide a step's time by the tokens it generates. In a step, a request has one more token than it drafted.",
    misconceptions={
        "Times that are equal after round(ms, 9) are equal.": dict(decimals=15),
        "Round both times and compare; times less than 1e-9 apart may be unequal when rounded.": dict(
            decimals=99, better=lambda ms, best: ms < best - 1e-9
        ),
        "Of equally good lengths the shortest.": dict(better=lambda ms, best: ms <= best),
        "Nine decimal places decide, not fewer.": dict(decimals=6),
        "The times may rise and then fall again: try every length.": dict(patient=False),
        "A length of 0 is one of the choices.": dict(shortest=1),
        "In every step the target adds a token of its own to the accepted draft tokens.": dict(own=1e-12),
        "A draft token counts only if all before it were accepted: multiply the chances.": dict(
            chance=lambda before, chance: chance
        ),
        "One pass of the draft model serves the whole batch.": dict(passes=lambda n, batch: n * batch),
        "The draft model runs once for each draft token.": dict(passes=lambda n, batch: min(n, 1)),
        "Drafting takes time, too.": dict(passes=lambda n, batch: 0),
        "A step generates tokens for every request of the batch.": dict(requests=lambda batch: 1),
    },
    forbid=("minillm.speculative.adaptive.AdaptiveLength",),
)


# --- 2: a second chance


def _chance_edges() -> list[tuple]:
    p, ngram, quarter = np.array([0.1, 0.2, 0.3, 0.4]), np.eye(4), np.full(4, 0.25)
    halves, tenths = np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.1] * 10 + [0.0])
    left = np.array([0.5, 0.0, 0.25, 0.0]) / 0.75
    return [
        *((p, [], np.zeros((0, 4)), [], last) for last in (0.0, 0.05, 0.3, 0.9999999, 1 - 2**-53)),
        (p, [3, 0], np.stack([p, p]), [0.999, 0.5], 0.5),  # q is p: always accepted
        *((p, [2, 3], ngram[[2, 3]], [chance, 0.5], 0.5) for chance in (0.29, 0.31)),
        (p, [2, 1, 0], ngram[[2, 1, 0]], [0.9, 0.9, 0.9], 0.5),
        (halves, [2], quarter[None], [0.0], 0.6),  # the target never generates it
        (halves, [1], ngram[[1]], [0.5], 0.0),  # exactly on the border
        (quarter, [0], halves[None], [0.5], 0.5),  # and the draw, too
        (ngram[2], [0], ngram[[0]], [0.0], 0.0),
        # Nothing is left: of p, and of what a first rejection had left.
        (np.array([0.5, 0.5, 0.0]), [2, 0], np.array([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8]]), [0.3, 0.7], 0.7),
        (np.array([0.5, 0.25, 0.25, 0.0]), [1, 3], np.stack([ngram[1], left]), [0.9, 0.3], 0.6),
        # Little is left, and that is not nothing.
        (np.array([0.5, 0.5 - 2**-45, 2**-45]), [1], np.array([[0.5, 0.5, 0.0]]), [1 - 2**-53], 0.5),
        # The running sum of ten tenths ends below 1, and is not divided by its end.
        *((tenths, [], np.zeros((0, 11)), [], last) for last in (1 - 2**-53, float(np.cumsum(tenths)[4]))),
    ]


def _random_chances(draw: Draw) -> tuple:
    rng = np.random.default_rng(draw.rng.getrandbits(32))
    size, number = int(rng.integers(2, 9)), int(rng.integers(0, 6))
    p = rng.dirichlet(np.full(size, rng.choice([0.3, 1.0, 5.0])))
    qs = np.array([rng.dirichlet(np.full(size, 1.0)) for _ in range(number)]).reshape(number, size)
    guesses = [int(rng.choice(size, p=q)) for q in qs]
    return p, guesses, qs, rng.random(number).tolist(), float(rng.random())


check_second_chance = FunctionChecker(
    "second_chance",
    second_chance,
    returns=("token", "which"),
    examples=[
        (np.array([0.5, 0.3, 0.2]), [1, 2], np.array([[0.2, 0.7, 0.1], [0.6, 0.1, 0.3]]), chances, last)
        for chances, last in (([0.4, 0.9], 0.5), ([0.9, 0.1], 0.5), ([0.9, 0.9], 0.1), ([0.9, 0.9], 0.99))
    ],
    edges=_chance_edges(),
    random=_random_chances,
    trials=120,
    hint="Keep the rest: at first p, after each rejection max(rest - q, 0) divided by its sum.",
    misconceptions={
        "Do not divide by the running sum's end: where it never exceeds `last`, take the last token with a rest.":
            dict(ends_at_one=True),
        "If a rejection leaves nothing, the rest stays what it was.": dict(nothing="p"),
        "The token of the draw is the first at which the running sum is larger than `last`, not equal to it.":
            dict(at_least=True),
        "Where the running sum never exceeds `last`, the token is the last one whose rest is not 0.":
            dict(last_id=True),
        "chance * q < rest: exactly on the border is a rejection.": dict(strictly=False),
        "After a rejection the rest is divided by its sum, before the next draft token is tried.":
            dict(normalise=False),
        "A draft token is compared with the rest after the rejections before it, not with p.": dict(accept_p=True),
        "Each rejection subtracts its own q from the rest that the one before has left, not from p.":
            dict(update=False),
        "After the last rejection draw from the rest, not from p.": dict(rest_from_p=True),
        "All draft tokens are tried.": dict(most=1),
    },
    forbid=tuple(f"minillm.speculative.rejection.{name}" for name in ("accept", "residual", "RejectionSampler")),
)  # fmt: skip
