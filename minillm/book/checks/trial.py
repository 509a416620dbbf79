"""The checker of an exercise without a single right outcome: each trial is played, and judged as it goes.
Built in chapter 05."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minillm.book.checks.case import Case
from minillm.book.checks.checker import PARTS, Checker, noted
from minillm.book.checks.draw import Draw
from minillm.book.checks.failure import CheckFailed

Trials = Iterable[tuple] | Mapping[str, tuple]


class TrialChecker(Checker):
    """Plays trial after trial with a student's object.

        check_scaler = TrialChecker(
            "scaler",
            lived,                                    # (case, *trial): plays one trial, and compares through the case
            examples=[(CALM, 1.2)],                   # tuples; a mapping has a note on each, which its failure tells
            random=lambda draw: ((some_day(draw), 1.4) for _ in range(4)),
            misconceptions={"Look ahead.": partial(Scaler, ahead=0)},
        )

    examples, edges, random: the trials of the three parts, or a function of a `Draw` that gives them.
    misconceptions: hint -> a wrong answer. Where it fails the same trial with the same words, its hint is told.
    """

    def __init__(
        self,
        name: str,
        play: Callable[..., object],
        *,
        examples: Trials | Callable[[Draw], Trials],
        random: Trials | Callable[[Draw], Trials],
        edges: Trials | Callable[[Draw], Trials] = (),
        **how: Any,
    ) -> None:
        super().__init__(name, **how)
        self.play, self.trials = play, dict(zip(PARTS, (examples, edges, random)))
        self.parts = {part: functools.partial(self._judge_part, part) for part in PARTS}
        self._seal()

    def _judge_part(self, part: str, case: Case) -> None:
        for note, trial in noted(self.trials[part], case):
            with case.hinting(f"Here {note}. {self.hint}" if note else self.hint):
                self._judge_trial(case, trial)

    def _judge_trial(self, case: Case, trial: tuple) -> None:
        def again(wrong: Any) -> None:
            other = Case(wrong, case.title, case.hint, 0)
            self._guarded(other, lambda: self.play(other, *trial))

        try:
            self._guarded(case, lambda: self.play(case, *trial))
        except CheckFailed as failed:
            failed.hint = self._known_by(failed, case.student, f"{case.title}: ", again) or failed.hint
            raise

    def _recognised(self, failed: CheckFailed, student: object, part: str, seed: int | None) -> None:
        """It was looked for at the trial that failed."""
