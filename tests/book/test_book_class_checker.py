"""A class is judged beside the book's, call by call; a function by what its answer costs, or by its lines."""

from __future__ import annotations

import contextlib
import functools
import re

import pytest

from minillm.book.checks import CheckFailed, Draw, FunctionChecker, Timed
from minillm.book.checks.beside import ClassChecker, Story


class Stack:
    """The reference; with a mistake, it gives the oldest."""

    def __init__(self, room: int, oldest: bool = False) -> None:
        self.room, self.oldest, self.held = room, oldest, []

    def push(self, *values: int) -> None:
        if len(self.held) + len(values) > self.room:
            raise ValueError("full")
        self.held = [*self.held, *values]

    def pop(self) -> list[int]:
        value = self.held[0 if self.oldest else -1]
        self.held = self.held[1:] if self.oldest else self.held[:-1]
        return [value]

    def all(self) -> list[int]:
        return list(self.held)


def pushes(draw: Draw):
    def calls(stack: Stack):
        for _ in range(6):
            yield "push", draw.randint(0, 9)
            got = yield ("pop",)
            yield "push", got[0]

    return calls


check_stack = ClassChecker(
    "stack",
    Stack,
    what="stack",
    shows=("held",),
    examples=[Story((3,), "push(1, 2) · pop() · push(7, 8, 9) · all() · pop()")],
    random=lambda draw: Story((9,), pushes(draw)),
    raises=(ValueError,),
    explain=lambda got, expected, before, call: f"before it held {before.held}",
    misconceptions={"The newest leaves first.": lambda room: Stack(room, oldest=True)},
)


def said(student: object, part: str = "example") -> str:
    with pytest.raises(CheckFailed) as failed:
        check_stack.judge(student, part)
    return str(failed.value)


def test_the_book_s_own_class_passes():
    for part in ("example", "random"):
        check_stack.judge(Stack, part)


def test_a_stop_iteration_of_the_answer_s_ends_no_story():
    class Stops:
        def __init__(self, room):
            self.looks = iter([[]])

        @property
        def held(self):
            return next(self.looks)

        def push(self, *values):
            return None

    assert "StopIteration" in said(Stops)


def test_a_class_that_is_wrong_in_a_known_way_reads_so():
    assert "The newest leaves first." in said(check_stack.misconceptions["The newest leaves first."])
    assert "The newest leaves first." in said(check_stack.misconceptions["The newest leaves first."], "random")


def test_an_unknown_mistake_is_explained_from_the_state_before_the_call():
    class Loses(Stack):
        def pop(self):
            super().pop()
            return [99]

    text = said(Loses)
    assert "pop() is wrong at [0]" in text and "before it held [1, 2]" in text


def test_a_refused_call_changes_nothing():
    class Half(Stack):
        def push(self, *values):
            for value in values:
                super().push(value)

    text = said(Half)
    assert "held after the refused push(7, 8, 9)" in text and "must change nothing" in text


def test_what_is_returned_is_the_caller_s():
    class Lends(Stack):
        def all(self):
            return self.held

    assert "held after all()" in said(Lends)


def test_any_best_answer_is_right():
    """`observe` compares what an answer costs, `form` looks at it before."""

    def in_range(case, got, numbers):
        case.true(type(got) is int and 0 <= got < len(numbers), f"{got!r} is no place in the list")

    check = FunctionChecker(
        "least",
        lambda numbers: numbers.index(min(numbers)),
        observe=lambda place, numbers: numbers[place],
        form=in_range,
        returns="the number there",
        examples=[([2, 1, 1],)],
        random=lambda draw: ([draw.randint(0, 3) for _ in range(5)],),
    )
    check.judge(lambda numbers: len(numbers) - 1 - numbers[::-1].index(min(numbers)), "random")
    with pytest.raises(CheckFailed, match="the number there is wrong"):
        check.judge(lambda numbers: 0, "example")
    with pytest.raises(CheckFailed, match="9 is no place in the list"):
        check.judge(lambda numbers: 9, "example")


def test_a_slow_answer_is_told_by_its_lines():
    """On a fast machine as on a slow one; each of the cases of `random` is handed what it is made with."""

    def slowly(count):
        total = 0
        for number in range(count):
            total += number
        return total

    made = []
    check = FunctionChecker(
        "sum_to",
        lambda count: count * (count - 1) // 2,
        examples=[(4,)],
        random=lambda draw, least: made.append(least) or (least + draw.randint(0, 3),),
        trials=(5, 50),
        timed=(Timed("a sum of 10,000 numbers", lambda draw: (10_000,), "There is a formula.", "example", lines=200),),
    )
    check.judge(lambda count: count * (count - 1) // 2, "example")
    check.judge(slowly, "random")
    assert made == [5, 50]
    with pytest.raises(CheckFailed, match="stopped after 200 lines") as failed:
        check.judge(slowly, "example")
    assert failed.value.hint == "There is a formula."


def test_no_chapter_s_checks_import_another_chapter_s(root):
    """What two chapters need is the drivers'."""
    folder = root / "minillm" / "book" / "checks"
    found = [
        (file.name, other)
        for file in sorted(folder.glob("ch[0-9][0-9]*.py"))
        for other in re.findall(r"from minillm\.book\.checks\.(ch\d\d)", file.read_text(encoding="utf-8"))
        if not file.name.startswith(other)
    ]
    assert found == []


class Tray:
    """Keeps numbers in order, and what it was given; `keeps` is a mistake."""

    def __init__(self, held: list[float], keeps: bool = False) -> None:
        self.held = held if keeps else list(held)

    def put(self, values: list[float]) -> list[float]:
        self.held = [*self.held, *values]
        return list(self.held)


def put_once(shift: float = 0.0):
    """A story whose numbers come from the case, and are shifted by `around` before the call."""

    def shifted(case, mine, right, call):
        for tray in (mine, right):
            tray.held = [value + shift for value in tray.held]
        return contextlib.nullcontext()

    return lambda draw: {f"the shift is {shift}": Story(([1.0, 2.0],), [("put", [draw.rng.random()])], shifted)}


def tray_checker(**how):
    how = {"examples": put_once(), "random": lambda draw: Story(([],), "put([1.0])"), "lends": True} | how
    return ClassChecker("tray", Tray, what="tray", shows={"held": lambda tray, calls: list(tray.held)}, **how)


def test_lists_that_are_lent_are_changed_afterwards():
    check = tray_checker()
    check.judge(Tray, "example")
    with pytest.raises(CheckFailed, match="held in a new tray is wrong"):
        check.judge(lambda held: Tray(held, keeps=True), "example")
    tray_checker(lends=False).judge(lambda held: Tray(held, keeps=True), "example")


def test_numbers_are_near_and_stories_have_notes():
    """`atol` holds for results and for what is shown, and a note stands before the hint."""

    class Near(Tray):
        def put(self, values):
            super().put(values)
            self.held = [value + 1e-3 for value in self.held]
            return list(self.held)

    tray_checker(atol=1e-2).judge(Near, "example")
    with pytest.raises(CheckFailed) as failed:
        tray_checker(atol=1e-4, hint="Put, and no more.").judge(Near, "example")
    assert failed.value.hint == "Here the shift is 0.0. Put, and no more."


def test_what_is_around_a_call_sees_both_objects():
    class Copies(Tray):
        """Answers from a second copy, so that a change of `held` from outside does not show."""

        def __init__(self, held):
            super().__init__(held)
            self.second = list(held)

        def put(self, values):
            self.second = [*self.second, *values]
            return list(self.second)

    shifting = tray_checker(examples=put_once(0.5))
    shifting.judge(Tray, "example")
    with pytest.raises(CheckFailed, match=r"put\(\[.*\]\) is wrong at \[0\]"):
        shifting.judge(Copies, "example")


def test_a_class_may_be_driven_by_way_of_another():
    """`adapt` wraps the answer, the reference and the misconceptions; messages have the answer's own name."""

    class Twice:
        def __init__(self, tray_type, *given):
            self.tray = tray_type(*given)

        def put(self, values):
            self.tray.put(values)
            return self.tray.put(values)

    check = ClassChecker(
        "tray",
        Tray,
        adapt=lambda kind: functools.partial(Twice, kind),
        what="tray",
        shows={"held": lambda twice, calls: list(twice.tray.held)},
        examples=[Story(([],), "put([1.0])")],
        random=lambda draw: Story(([],), "put([1.0])"),
        returns={"put": "the sum of the tray"},
        observe=lambda got, call: sum(got),
        misconceptions={"Nothing is lost.": lambda held: Forgets(held)},
    )
    check.judge(Tray, "example")
    with pytest.raises(CheckFailed, match="the sum of the tray is wrong") as failed:
        check.judge(Forgets, "example")
    assert failed.value.hint == "Nothing is lost." and "Forgets([])" in str(failed.value)


class Forgets(Tray):
    def put(self, values):
        self.held = list(values)
        return list(self.held)


def test_a_constructor_may_have_to_refuse():
    def full(room):
        if room < 1:
            raise ValueError("no room")
        return Stack(room)

    check = ClassChecker(
        "stack", full, what="stack", shows=("held",), examples=[Story((0,), "")], random=pushes, raises=(ValueError,)
    )
    check.judge(full, "example")
    with pytest.raises(CheckFailed, match="expected it to raise ValueError"):
        check.judge(Stack, "example")


def test_a_stop_iteration_of_the_answer_ends_no_story():
    """`next(...)` that finds nothing raises it, as does the story's own generator at its end."""

    class Stops(Stack):
        asked = 0

        @property
        def held(self):
            self.asked += 1
            if self.asked > 3:
                raise StopIteration
            return vars(self)["held"]

        @held.setter
        def held(self, values):
            vars(self)["held"] = values

    class Unwritten(Stack):
        @property
        def held(self):
            raise NotImplementedError

        @held.setter
        def held(self, values):
            pass

    assert "raised StopIteration" in said(Stops)
    assert "held in a new stack is not written yet" in said(Unwritten)


def test_two_messages_are_one_up_to_rounding():
    """A misconception that computes in another precision is recognised."""

    def near(room):
        stack = Stack(room, oldest=True)
        stack.pop = lambda: [value + 1e-7 for value in Stack.pop(stack)]
        return stack

    check = ClassChecker(
        "stack",
        Stack,
        what="stack",
        shows=("held",),
        examples=[Story((3,), "push(1.5, 2.25) · pop()")],
        random=pushes,
        misconceptions={"The newest leaves first.": near},
    )
    with pytest.raises(CheckFailed) as failed:
        check.judge(lambda room: Stack(room, oldest=True), "example")
    assert failed.value.hint == "The newest leaves first."
