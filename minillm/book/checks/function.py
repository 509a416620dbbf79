"""The checker of an exercise that is a function: a right answer, cases, and mistakes that it knows.
Built in chapter 00."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from minillm.book.checks.case import Case, Raised
from minillm.book.checks.checker import PARTS, Checker, noted, switched
from minillm.book.checks.compare import same
from minillm.book.checks.draw import Draw
from minillm.book.checks.failure import CheckFailed
from minillm.book.checks.patience import SECONDS, Limit, bounded, stopped_after, within
from minillm.book.checks.snapshot import detached
from minillm.book.checks.wording import is_array

Arguments = tuple
Table = Iterable[Arguments] | Mapping[str, Arguments]
Cases = Table | Callable[[Draw], Table]
_OTHER_CASES = 20  # how many random ones are looked at where fixed ones may have been learnt by heart
_STOPS = 3  # of these, after which no more are looked at: a grader does not wait for ever


@dataclass(frozen=True)
class Timed:
    """A large case that must be answered within some seconds of computing, and rightly.

    what: for the message: "an automaton of 30,000 states". given: from a draw to the arguments.
    hint: what to do about an answer that is too slow. part: where it belongs.
    expected: from the arguments to what is right, where the reference would be too slow itself.
    lines: of Python that may run, where these tell a slow answer from a fast one on any machine; otherwise seconds do.
    """

    what: str
    given: Callable[[Draw], Arguments]
    hint: str
    part: str = "edges"
    expected: Callable[..., Any] | None = None
    seconds: float = SECONDS
    lines: int = 0


class FunctionChecker(Checker):
    """Compares a student's function with the book's, case by case.

        def lowest(free): ...            # the reference: plain rather than fast, the same parameters, changes nothing

        check_lowest = FunctionChecker(
            "lowest",                                        # the exercise's id
            lowest,
            examples=[([3, 1],), ([2],)],                    # tuples of arguments; one argument needs its comma
            edges={"no number": ([],), "twice": ([5, 5],)},  # with a note each, or a function of a `Draw` that yields
            random=lambda draw: (draw.rng.sample(range(99), draw.randint(1, 9)),),
            raises=(ValueError,),                            # what the reference raises, and the student must, too
            misconceptions={
                "The lowest, not the first.": lambda free: free[0],
                "Without a free block: ValueError.": lambda free: min(free, default=None),
            },
        )

    Each case is copied three times: for the reference, which is asked first, for the student, and for the message.
    So nothing that the student does to its arguments reaches the judge, and a change of them is a failure.

    reference:   the right answer. What it returns fixes the kinds: a list is no tuple, float64 no float32, a float
                 none of NumPy's (`kinds=False` where the statement leaves that open).
    examples, edges, random: the cases of the three parts. A mapping has a note on each case, which its failure tells.
                 `random` makes one case from a `Draw`, and is asked `trials` times, or once for each of them, which it
                 is handed; draw the sizes, too, so that a lecturer's secret seed brings other shapes.
    returns:     what the result is called in messages. A tuple of names for a result that is a tuple: each element is
                 compared under its own name. Or a function of the arguments that gives either.
    misconceptions: {hint: wrong function}. A student whose answer to a case is that of the wrong function gets its
                 hint; the first that fits counts. The proofs take every one of them as a mutant: it must fail, under
                 every seed, with its hint. So it is written once, here, and not in tests/mutants.
                 Write the reference with switches, and a mistake is `dict(dead=False)`.
                 A right but slow function belongs here too, under the hint of the `Timed` case that it fails.
    adapt:       from an answer to the function of the arguments that is judged, where the answer is another one: a
                 generator that is read to its end, a worker on many ranks. The reference and the misconceptions are
                 answers, too.
    named:       from the arguments of a case that raises to the numbers that the message of the error has to name.
    explain:     (got, expected, *arguments) -> a hint, or None: for hints with numbers in them.
    observe:     (result, *arguments) -> what is compared, where it is not the result: what it costs, if any best answer
                 is right; or the log of an argument. The arguments are those of this call.
    form:        (case, got, *arguments): what is to be judged before equality: "a run is a tuple of three".
    also:        (case, got, *arguments): what is to be judged beyond equality. The arguments are those that the
                 student had: a callable object among them (a model that notes what it is asked) tells what it saw.
    timed:       `Timed` cases.
    seconds:     of computing, for a case that is not timed: a loop that never ends is stopped, and said to be one.
    atol, rtol:  tolerances for floats; atol may be a function of the arguments.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        *,
        examples: Cases,
        random: Callable[[Draw], Arguments],
        edges: Cases = (),
        trials: int | tuple = 40,
        returns: str | tuple[str, ...] | Callable[..., str | tuple[str, ...]] = "the result",
        raises: tuple[type[Exception], ...] = (),
        atol: float | Callable[..., float] = 0.0,
        rtol: float = 0.0,
        kinds: bool = True,
        seconds: float = 10,
        timed: tuple[Timed, ...] = (),
        named: Callable[..., Iterable[int]] | None = None,
        adapt: Callable[[Any], Callable[..., Any]] = lambda answer: answer,
        explain: Callable[..., str | None] | None = None,
        observe: Callable[..., Any] | None = None,
        form: Callable[..., None] | None = None,
        also: Callable[..., None] | None = None,
        hint: str = "",
        misconceptions: Mapping[str, Callable[..., Any] | dict[str, Any]] | None = None,
        forbid: tuple[str, ...] = (),
        allow: tuple[str, ...] = (),
    ) -> None:
        super().__init__(
            name, hint=hint, misconceptions=switched(reference, misconceptions), forbid=forbid, allow=allow
        )
        self.reference, self.returns, self.timed = reference, returns, timed
        self.raises, self.named, self.adapt = raises, named, adapt
        self.cases: dict[str, Cases] = {"example": examples, "edges": edges, "random": self._random}
        self.make, self.trials = random, trials
        self.observe, self.explain, self.form, self.also = observe, explain, form, also
        self.atol, self.rtol, self.kinds, self.seconds = atol, rtol, kinds, seconds
        self.parts = {part: functools.partial(self._judge_part, part) for part in PARTS}
        self._seal()

    def _judge_part(self, part: str, case: Case) -> None:
        for note, given in noted(self.cases[part], case):
            self._judge_case(case, given, note)
        for timed in self.timed:
            if timed.part == part:
                self._judge_timed(case, timed)

    def _random(self, draw: Draw) -> Iterable[Arguments]:
        if isinstance(self.trials, int):
            return (self.make(draw) for _ in range(self.trials))
        return (self.make(draw, one) for one in self.trials)

    def _judge_case(self, case: Case, given: Arguments, note: str = "") -> None:
        if not isinstance(given, tuple):
            raise TypeError(f"{self.name}: a case is a tuple of arguments, not {given!r}")
        expected, mine = self._right(given), detached(given)
        case.diagnose = functools.partial(self._hint, given, note, expected)
        try:
            student = self._patient(case, stopped_after(case, "a small case", self._slow, self.seconds))
            if isinstance(expected, Raised):
                error = case.raises(expected.kind, student, *mine)
                if self.named:
                    _names(case, error, self.named(*given))
                return
            got = case.run(student, *mine)
            if self.form:
                self.form(case, got, *mine)
            self._compare(case, self._observed(got, mine), expected, given)
        finally:
            case.diagnose = lambda outcome: None
        if self.also:
            self.also(case, got, *mine)

    def _judge_timed(self, case: Case, timed: Timed) -> None:
        given = timed.given(case)
        expected = timed.expected(*given) if timed.expected else self._right(given)
        if timed.lines:
            got = bounded(case, timed.lines, timed.hint, self.adapt(case.student), *given)
        else:
            fast = within(case, timed.what, timed.hint, timed.seconds)
            got = case.run(self._patient(case, fast), *given)
        if self.form:
            self.form(case, got, *given)
        self._compare(case, self._observed(got, given), expected, given)  # misconceptions are slow here
        if self.also:
            self.also(case, got, *given)

    def _compare(self, case: Case, got: Any, expected: Any, given: Arguments) -> None:
        names = self.returns(*given) if callable(self.returns) else self.returns
        how = {"atol": self._atol(given), "rtol": self.rtol, "kinds": self.kinds, "dtypes": self.kinds}
        if isinstance(names, str):
            return case.close(got, expected, names, **how)
        case.comparisons += 1
        if type(got) is not tuple or len(got) != len(names):
            hint = case.diagnose(got) or ""
            case.close(got, expected, f"the tuple ({', '.join(names)})", hint=hint, **how)
        hint = case.hint  # one for all elements: it is the whole answer that is recognised
        if not self._alike(got, expected, given):
            hint = case.diagnose(got) or hint
        for name, one, right in zip(names, got, expected):
            case.close(one, right, name, hint=hint, **how)
        return None

    def _patient(self, case: Case, limit: AbstractContextManager) -> Callable[..., Any]:
        """The student's function under a limit on what it computes. To be called once."""
        answer = self.adapt(case.student)

        def patient(*args: Any) -> Any:
            with limit:
                return answer(*args)

        patient.__qualname__ = getattr(case.student, "__qualname__", type(case.student).__name__)
        return patient

    @property
    def _slow(self) -> str:
        return self.timed[0].hint if self.timed else "Does a loop never end?"

    def _right(self, given: Arguments) -> Any:
        """What the reference says; `Raised` where it raises what the statement asks for."""
        try:
            return self._outcome(self.reference, given)
        except self.raises as error:
            return Raised(type(error))

    def _hint(self, given: Arguments, note: str, expected: Any, got: Any) -> str | None:
        slow = {timed.hint for timed in self.timed}  # these are right
        for hint, wrong in self.misconceptions.items():
            if hint in slow:
                continue
            outcome = self._outcome_or_raised(wrong, given)
            if self._alike(got, outcome, given) and not self._alike(expected, outcome, given):
                return hint
        told = self._explained(given, got, expected) or self._in_another_order(given, got, expected)
        told = told or _precision(got, expected, self._atol(given), self.rtol)
        return f"Here {note}. {told or self.hint}" if note else told

    def _explained(self, given: Arguments, got: Any, expected: Any) -> str | None:
        try:
            return self.explain(got, expected, *detached(given)) if self.explain else None
        except Exception:  # it is written for results of the right kind
            return None

    def _in_another_order(self, given: Arguments, got: Any, expected: Any) -> str | None:
        names = self.returns(*given) if callable(self.returns) else self.returns
        if (
            isinstance(expected, Raised)
            or isinstance(names, str)
            or type(got) is not tuple
            or len(got) != len(names)
            or self._alike(got, expected, given)
        ):
            return None
        if any(self._alike(got, one, given) for one in itertools.permutations(expected)):
            return f"The right values, in another order: return ({', '.join(names)})."
        return None

    def _alike(self, got: Any, outcome: Any, given: Arguments) -> bool:
        return same(got, outcome, self._atol(given), self.rtol, kinds=False)

    def _atol(self, given: Arguments) -> float:
        return self.atol(*given) if callable(self.atol) else self.atol

    def _recognised(self, failed: CheckFailed, student: object, part: str, seed: int | None) -> None:
        """It was looked for at the case that failed."""

    def _check_other_cases(self, case: Case) -> None:
        """Fixed cases can be learnt by heart: of some random ones at least one must be right."""
        seen, stops = 0, 0
        while seen < _OTHER_CASES and stops < _STOPS:
            given = self.make(case)
            expected, right = self._right(given), False
            with Limit(self.seconds) as limit:
                right = self._alike(self._outcome_or_raised(case.student, given), expected, given)
            if right and not limit.exceeded:
                return
            seen, stops = seen + 1, stops + limit.exceeded
        told = f", and {stops} took more than {self.seconds:g} s of computing" if stops else ""
        hint = self._slow if stops else "An answer computes; it does not look up what the check is known to ask."
        case.fail(f"the {case.title.rsplit(': ', 1)[-1]} are right, and none of {seen} other cases is{told}", hint=hint)

    def _outcome(self, function: Callable[..., Any], given: Arguments) -> Any:
        mine = detached(given)
        return self._observed(self.adapt(function)(*mine), mine)

    def _outcome_or_raised(self, function: Callable[..., Any], given: Arguments) -> Any:
        try:
            return self._outcome(function, given)
        except CheckFailed:
            raise
        except (Exception, SystemExit) as error:
            return Raised(type(error))

    def _observed(self, got: Any, given: Arguments) -> Any:
        return self.observe(got, *given) if self.observe else got


def _names(case: Case, error: Exception, numbers: Iterable[int]) -> None:
    """The message of an error has these numbers in it."""
    wanted = [str(number) for number in numbers]
    case.true(
        set(wanted) <= set(re.findall(r"\d+", str(error))),
        f"the message of the {type(error).__name__} is {str(error)!r}; it must name {' and '.join(wanted)}",
    )


def _precision(got: Any, expected: Any, atol: float, rtol: float) -> str | None:
    """The hint for an answer that took a detour over float32."""
    mine, parts = map(_parts, (got, expected))
    if max(atol, rtol) >= 1e-6 or not any(map(_is_double, parts)) or same(got, expected, atol, rtol, kinds=False):
        return None
    # A number is close by its own size: 0.00201 is not nearly 0.00200. Of an array, cancellation leaves small ones.
    near = (same(one, right, 1e-5 * is_array(right), 1e-5, kinds=False) for one, right in zip(mine, parts))
    if len(mine) == len(parts) and all(near):
        return "Very close: does something pass through float32? Compute in float64 throughout."
    return None


def _parts(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else [value])


def _is_double(value: Any) -> bool:
    return "float64" in str(value.dtype) if is_array(value) else type(value) is float and math.isfinite(value)
