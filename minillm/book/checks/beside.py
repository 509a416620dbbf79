"""The checker of an exercise that is a class: it is driven beside the book's own, call by call.
Built in chapter 06."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from minillm.book.checks.case import Case, Raised
from minillm.book.checks.checker import PARTS, Checker, noted, switched
from minillm.book.checks.draw import Draw
from minillm.book.checks.failure import CheckFailed
from minillm.book.checks.snapshot import detached
from minillm.book.checks.wording import short

Call = tuple  # (method, *arguments)


class Once:
    """What can be looped over a single time, as `reversed(table)`."""

    def __init__(self, values: list[Any]) -> None:
        self.values, self.rest = values, iter(values)

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> Any:
        return next(self.rest)

    def __repr__(self) -> str:
        return f"iter({self.values})"


def calls_of(text: str) -> list[Call]:
    """The calls of a text such as `allocate(4) · free(iter([3]))`: arguments are literals, or can be read once."""
    calls = [ast.parse(one.strip(), mode="eval").body for one in text.split("·")]
    return [(call.func.id, *map(_argument, call.args)) for call in calls]


def _argument(node: ast.expr) -> Any:
    return Once(ast.literal_eval(node.args[0])) if isinstance(node, ast.Call) else ast.literal_eval(node)


@dataclass(frozen=True)
class Story:
    """An object, made with these arguments, and what is called of it.

    calls: one after the other, as tuples or in a text that `calls_of` reads; or a generator function of the book's
    object, which is sent what each has returned.
    around: from the case, the student's object, the book's and a call to a context manager around this call.
    """

    given: tuple
    calls: str | Iterable[Call] | Callable[[Any], Generator[Call, Any, None]]
    around: Callable[[Case, Any, Any, Call], AbstractContextManager] = lambda *_: contextlib.nullcontext()

    def told(self, right: Any) -> Generator[Call, Any, None]:
        """The calls, for the book's object `right`."""
        if callable(self.calls):
            return self.calls(right)
        return (call for call in (calls_of(self.calls) if isinstance(self.calls, str) else self.calls))


Table = Iterable[Story] | Mapping[str, Story]


class ClassChecker(Checker):
    """Compares what a student's object returns and shows with the book's, after every call.

        check_pool = ClassChecker(
            "pool",
            Pool,                                     # the reference: plain rather than fast
            what="pool",
            shows=("num_free",),                      # attributes that are compared after each call
            examples=[Story((4,), "allocate(3) · free([1])")],
            random=lambda draw: Story((draw.randint(1, 9),), lambda pool: some_calls(draw, pool)),
            raises=(ValueError,),                     # what the reference raises, and the student must, too
            misconceptions={"The lowest ids go first.": HighestFirst},
        )

    examples, edges: stories, or a function of a `Draw` that gives them. A mapping has a note on each.
    shows:    names of attributes; or name -> a function of an object and the calls so far, for what takes arguments.
    returns:  method -> what its result is called in messages, where the call itself says too little.
    observe:  (result, call) -> what is compared, where it is not the result.
    adapt:    from an answer to what is driven, where that has other methods: an engine around a scheduler, say. The
              reference and the misconceptions are wrapped, too.
    atol, rtol: tolerances for floats.
    explain:  (got, expected, the book's object before the call, the call) -> a hint, or None.
    also:     part -> a function of the case: what is to be judged beyond the stories, the time of a call, say.
    lends:    the answer gets the caller's own lists, which the caller changes afterwards.
    A call that the reference refuses must leave the student's object as it was.
    """

    recognises_first = True

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        *,
        what: str,
        shows: Iterable[str] | Mapping[str, Callable[[Any, list[Call]], Any]],
        examples: Table | Callable[[Draw], Table],
        random: Callable[[Draw], Story],
        edges: Table | Callable[[Draw], Table] = (),
        trials: int = 12,
        returns: Mapping[str, str] | None = None,
        observe: Callable[[Any, Call], Any] = lambda result, call: result,
        adapt: Callable[[Any], Any] = lambda answer: answer,
        atol: float = 0.0,
        rtol: float = 0.0,
        lends: bool = False,
        raises: tuple[type[Exception], ...] = (),
        explain: Callable[[Any, Any, Any, Call], str | None] | None = None,
        also: Mapping[str, Callable[[Case], None]] | None = None,
        hint: str = "",
        misconceptions: Mapping[str, Callable[..., Any] | dict[str, Any]] | None = None,
        forbid: tuple[str, ...] = (),
        allow: tuple[str, ...] = (),
    ) -> None:
        super().__init__(
            name, hint=hint, misconceptions=switched(reference, misconceptions), forbid=forbid, allow=allow
        )
        self.reference, self.what, self.shows, self.raises, self.explain = reference, what, shows, raises, explain
        self.stories = {"example": examples, "edges": edges}
        self.make, self.trials, self.also = random, trials, also or {}
        self.returns, self.observe, self.adapt, self.lends = returns or {}, observe, adapt, lends
        self.near = {"atol": atol, "rtol": rtol}
        self.parts = {part: functools.partial(self._judge_part, part) for part in PARTS}
        self._seal()

    def _judge_part(self, part: str, case: Case) -> None:
        for note, story in noted(self.stories.get(part, ()), case):
            with case.hinting(f"Here {note}. {self.hint}" if note else self.hint):
                self._tell(case, story)
        for _ in range(self.trials * (part == "random")):
            self._tell(case, self.make(case))
        if part in self.also:
            self.also[part](case)

    def _tell(self, case: Case, story: Story) -> None:
        given, right = detached(story.given), self._made(story.given)
        make = _named_like(self.adapt(case.student), case.student)
        if isinstance(right, Raised):
            case.raises(right.kind, make, *given)
            return
        mine = case.run(make, *given, lend=self.lends)
        self._take_back(given)
        done: list[Call] = []
        self._compare_shown(case, mine, right, done, f"in a new {self.what}", None)
        calls, result = story.told(right), None
        while (call := _next_of(calls, result)) is not None:
            done.append(detached(call))
            case.diagnose = functools.partial(self._why, story.given, done)
            with story.around(case, mine, right, call):
                result = self._call(case, mine, right, done)
        case.diagnose = lambda outcome: None

    def _made(self, given: tuple) -> Any:
        """The book's object; `Raised` where it refuses these arguments."""
        try:
            return self.adapt(self.reference)(*detached(given))
        except self.raises as error:
            return Raised(type(error))

    def _call(self, case: Case, mine: Any, right: Any, done: list[Call]) -> Any:
        """Compare one call, and what is shown after it; returns what the book's object did."""
        method, *arguments = detached(done[-1])
        told = _written(done[-1])
        expected = self._outcome(right, done[-1])
        if isinstance(expected, Raised):
            case.raises(expected.kind, getattr(mine, method), *arguments)
            kept = f"A call that raises {expected.kind.__name__} must change nothing: look before you change anything."
            self._compare_shown(case, mine, right, done, f"after the refused {told}", kept)
            return expected
        got = case.run(getattr(mine, method), *arguments, lend=self.lends)
        what = self.returns.get(method, told)
        case.close(self.observe(got, done[-1]), self.observe(expected, done[-1]), what, **self.near)
        self._take_back((got, *(arguments if self.lends else ())))
        self._compare_shown(case, mine, right, done, f"after {told}", None)
        return expected

    def _take_back(self, values: Iterable[Any]) -> None:
        """The lists that an answer was lent, and those that it returned, are the caller's: they are emptied."""
        for value in values:
            if isinstance(value, list):
                value.clear()
            elif isinstance(value, tuple):
                self._take_back(value)

    def _compare_shown(self, case: Case, mine: Any, right: Any, done: list[Call], when: str, hint: str | None) -> None:
        right_shown = self._shown(right, done)
        for name, shown in self._shown(mine, done).items():
            what = f"{name} {when}"
            case.close(_seen(case, shown, what), right_shown[name](), what, hint=hint, **self.near)

    def _shown(self, one: Any, done: list[Call]) -> dict[str, Callable[[], Any]]:
        if isinstance(self.shows, Mapping):
            return {name: functools.partial(show, one, done) for name, show in self.shows.items()}
        return {name: functools.partial(getattr, one, name) for name in self.shows}

    def _outcome(self, one: Any, call: Call) -> Any:
        method, *arguments = detached(call)
        try:
            return getattr(one, method)(*arguments)
        except self.raises as error:
            return Raised(type(error))

    def _why(self, given: tuple, done: list[Call], got: Any) -> str | None:
        if self.explain is None:
            return None
        expected = self._outcome(self._replayed(given, done[:-1]), done[-1])
        try:
            return self.explain(got, expected, self._replayed(given, done[:-1]), done[-1])
        except Exception:  # it is written for results of the right kind
            return None

    def _replayed(self, given: tuple, calls: list[Call]) -> Any:
        one = self.adapt(self.reference)(*detached(given))
        for call in calls:
            self._outcome(one, call)
        return one


def _next_of(calls: Generator[Call, Any, None], result: Any) -> Call | None:
    """The next call of a story, whose generator is sent what the last one returned; None at its end."""
    try:
        return calls.send(result)
    except StopIteration:
        return None


def _seen(case: Case, shown: Callable[[], Any], what: str) -> Any:
    """What the student's object shows; what it raises instead is its failure, a StopIteration, too."""
    try:
        return shown()
    except (CheckFailed, AttributeError):  # of a name that is missing the checker tells more
        raise
    except NotImplementedError as error:
        case.fail(f"{what} is not written yet: it raises NotImplementedError", cause=error, hint="")
    except Exception as error:
        case.fail(f"{what} raised {type(error).__name__}: {error}".rstrip(": "), cause=error)


def _named_like(make: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    """`make` under the answer's own name, for messages."""

    def made(*given: Any) -> Any:
        return make(*given)

    made.__qualname__ = getattr(answer, "__qualname__", type(answer).__name__)
    return made


def _written(call: Call) -> str:
    method, *arguments = call
    return f"{method}({', '.join(map(short, arguments))})"
