"""The checker of an exercise that is a class: it is driven beside the book's own, call by call.
Built in chapter 06."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minillm.book.checks.case import Case, Raised
from minillm.book.checks.checker import PARTS, Checker
from minillm.book.checks.draw import Draw
from minillm.book.checks.snapshot import detached

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
    """

    given: tuple
    calls: str | Iterable[Call] | Callable[[Any], Generator[Call, Any, None]]

    def told(self, right: Any) -> Generator[Call, Any, None]:
        """The calls, for the book's object `right`."""
        if callable(self.calls):
            return self.calls(right)
        return (call for call in (calls_of(self.calls) if isinstance(self.calls, str) else self.calls))


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

    shows:    names of attributes; or name -> a function of an object and the calls so far, for what takes arguments.
    explain:  (got, expected, the book's object before the call, the call) -> a hint, or None.
    also:     part -> a function of the case: what is to be judged beyond the stories, the time of a call, say.
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
        examples: Iterable[Story],
        random: Callable[[Draw], Story],
        edges: Iterable[Story] = (),
        trials: int = 12,
        raises: tuple[type[Exception], ...] = (),
        explain: Callable[[Any, Any, Any, Call], str | None] | None = None,
        also: Mapping[str, Callable[[Case], None]] | None = None,
        hint: str = "",
        misconceptions: Mapping[str, Callable[..., Any]] | None = None,
        forbid: tuple[str, ...] = (),
        allow: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, hint=hint, misconceptions=misconceptions, forbid=forbid, allow=allow)
        self.reference, self.what, self.shows, self.raises, self.explain = reference, what, shows, raises, explain
        self.stories = {"example": examples, "edges": edges}
        self.make, self.trials, self.also = random, trials, also or {}
        self.parts = {part: functools.partial(self._judge_part, part) for part in PARTS}
        self._seal()

    def _judge_part(self, part: str, case: Case) -> None:
        for story in self.stories.get(part, ()):
            self._tell(case, story)
        for _ in range(self.trials * (part == "random")):
            self._tell(case, self.make(case))
        if part in self.also:
            self.also[part](case)

    def _tell(self, case: Case, story: Story) -> None:
        right = self.reference(*detached(story.given))
        mine = case.run(case.student, *story.given)
        done: list[Call] = []
        self._compare_shown(case, mine, right, done, f"in a new {self.what}", None)
        calls = story.told(right)
        with contextlib.suppress(StopIteration):
            call = next(calls)
            while True:
                done.append(detached(call))
                case.diagnose = functools.partial(self._why, story.given, done)
                call = calls.send(self._call(case, mine, right, done))
        case.diagnose = lambda outcome: None

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
        got = case.run(getattr(mine, method), *arguments)
        case.equal(got, expected, told)
        if isinstance(got, list):
            got.clear()  # it is the caller's
        self._compare_shown(case, mine, right, done, f"after {told}", None)
        return expected

    def _compare_shown(self, case: Case, mine: Any, right: Any, done: list[Call], when: str, hint: str | None) -> None:
        for name, shown in self._shown(mine, done).items():
            case.equal(shown(), self._shown(right, done)[name](), f"{name} {when}", hint=hint)

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
        return self.explain(got, expected, self._replayed(given, done[:-1]), done[-1])

    def _replayed(self, given: tuple, calls: list[Call]) -> Any:
        one = self.reference(*detached(given))
        for call in calls:
            self._outcome(one, call)
        return one


def _written(call: Call) -> str:
    method, *arguments = call
    return f"{method}({', '.join(map(repr, arguments))})"
