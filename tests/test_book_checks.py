"""The checkers' framework: messages that help, the student's own work only, nothing counted silently."""
from __future__ import annotations

import functools
import math
import types

import numpy
import pytest
import torch

from minillm.book import chips, paths
from minillm.book.checks import CheckFailed, Checker
from minillm.book.checks.compare import first_difference, short
from minillm.book.checks.origin import reference_behind


@pytest.fixture
def check_double():
    checker = Checker("double", hint="Multiply by two.")

    @checker.part("example")
    def _example(case):
        case.close(case.call(torch.tensor([1.0, 2.0])), torch.tensor([2.0, 4.0]), "the doubled values")

    @checker.part("edges")
    def _edges(case):
        case.equal(case.call([]), [])
        case.raises(TypeError, case.student, None)

    @checker.part("random")
    def _random(case):
        for _ in range(3):
            row = case.randn(case.randint(1, 5))
            case.close(case.call(row), row * 2)
    return checker


def double(x):
    return x * 2 if isinstance(x, torch.Tensor) else [2 * v for v in x]


@pytest.mark.parametrize("part", ["example", "edges", "random"])
def test_right_work_passes_and_says_so(check_double, part, capsys):
    check_double(double, part)
    assert capsys.readouterr().out == f"✓ double: {part}\n"


def message(checker, student, part="example", **kwargs) -> str:
    with pytest.raises(CheckFailed) as caught:
        checker(student, part, **kwargs)
    return str(caught.value)


def test_a_wrong_element_is_named_with_the_call_and_the_hint(check_double):
    assert message(check_double, lambda x: torch.tensor([2.0, 5.0])) == (
        "double: example: the doubled values is wrong at [1]: 1 of 2 elements differ, this is the first\n"
        "  expected: 4.0\n  got:      5.0\n"
        "  called:   test_a_wrong_element_is_named_with_the_call_and_the_hint.<locals>.<lambda>(tensor([1.0, 2.0]))\n"
        "  hint:     Multiply by two.")


def stub(x):
    raise NotImplementedError()


def test_a_stub_is_called_unwritten(check_double):
    for part in ("example", "edges", "random"):
        said = message(check_double, stub, part)
        assert "stub is not written yet" in said and "hint" not in said


def test_an_exception_is_told_not_swallowed(check_double):
    def broken(x):
        return {}["cache"]
    with pytest.raises(CheckFailed, match="broken raised KeyError: 'cache'") as caught:
        check_double(broken, "example")
    assert isinstance(caught.value.__cause__, KeyError)


def test_changing_an_argument_is_refused_unless_allowed(check_double):
    def in_place(x):
        return x.mul_(2)
    assert "changed one of its arguments" in message(check_double, in_place)
    allowed = Checker("double")
    allowed.part("example")(lambda case: case.equal(case.run(case.student, torch.tensor([1]), may_change=True), torch.tensor([2])))
    allowed(in_place, "example")


def test_a_missing_error_is_told(check_double):
    assert "returned []; expected it to raise TypeError" in message(check_double, lambda x: [2 * v for v in x or []], "edges")


def test_what_the_checker_cannot_use_is_the_students_failure():
    checker = Checker("shape")
    checker.part("example")(lambda case: case.equal(case.call(3).shape, [1]))
    assert "could not go on with what it was given: AttributeError: 'NoneType' object has no attribute 'shape'" in message(checker, lambda x: None)


def test_a_part_that_compares_nothing_is_an_error():
    checker = Checker("lazy")
    checker.part("example")(lambda case: case.call(1))
    with pytest.raises(RuntimeError, match="lazy: example compared nothing"):
        checker(lambda x: x, "example")


def test_unknown_parts_are_named(check_double):
    with pytest.raises(ValueError, match="no part 'hidden'; it has example, edges, random"):
        check_double(double, "hidden")
    with pytest.raises(ValueError, match="part 'bonus'"):
        check_double.part("bonus")


def test_seeds_repeat_and_differ():
    seen = []
    checker = Checker("seeds")

    @checker.part("random")
    def _random(case):
        seen.append((case.rng.random(), case.randint(0, 10 ** 9), case.randn(2).tolist(), case.randint(0, 10 ** 9, 2).tolist()))
        case.true(True, "")
    for seed in (None, 0, 7, 7):
        checker(lambda: None, "random", seed=seed)
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_only_the_last_calls_are_told():
    checker = Checker("many")

    @checker.part("example")
    def _example(case):
        for i in range(9):
            case.equal(case.call(i), i if i < 8 else 0)
    said = message(checker, lambda x: x)
    assert "... 5 earlier calls" in said and said.count("<lambda>(") == 4 and "(8)" in said


class Own:
    def free(self, block):
        return block


def wrapping(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner


def closed_over():
    hidden = paths.chapter_number
    return lambda path: hidden(path)


class Derived(chips.Html):
    pass


class Borrowed:
    number = staticmethod(paths.chapter_number)


class Holder:
    def __init__(self):
        self.inner = paths.chapter_number

    def __call__(self, path):
        return self.inner(path)


@pytest.mark.parametrize("cheat", [
    paths.chapter_number, chips.Html, chips.Html("", ""), chips.Html("", "").__repr__, functools.partial(paths.chapter_number, "03"),
    functools.partial(lambda f, x: f(x), paths.chapter_number), functools.lru_cache(paths.chapter_number), wrapping(paths.chapter_number),
    closed_over(), Derived, Derived("", ""), Borrowed, Borrowed(), Holder(), type("New", (Derived,), {}), lambda x, f=paths.chapter_number: f(x),
    types.FunctionType(paths.chapter_number.__code__, {}, "mine"),
], ids=lambda cheat: getattr(cheat, "__name__", type(cheat).__name__))
def test_the_packages_own_work_is_refused(check_double, cheat):
    assert "or made from it. Write your own" in message(check_double, cheat)


def test_renaming_does_not_hide_it():
    copied = types.FunctionType(paths.chapter_number.__code__, {}, "mine")
    copied.__module__ = "__main__"
    assert reference_behind(copied)


@pytest.mark.parametrize("honest", [double, Own, Own(), Own().free, functools.partial(double), wrapping(double), len, torch.nn.Linear(2, 2),
                                    torch.relu, type("Module", (torch.nn.Module,), {})])
def test_own_work_is_taken(honest):
    assert reference_behind(honest) is None


def test_a_protocol_may_be_allowed_and_a_call_forbidden(check_double):
    assert reference_behind(Derived, allow=("minillm.book.chips.Html",)) is None

    def calls_it(x):
        return paths.chapter_number(x)

    def imports_it(x):
        from minillm.book.paths import chapter_number
        return chapter_number(x)
    strict = Checker("strict", forbid=("minillm.book.paths.chapter_number",))
    strict.part("example")(lambda case: case.equal(case.call("03_x"), 3))
    for cheat in (calls_it, imports_it):
        assert "minillm.book.paths.chapter_number" in message(strict, cheat)
    strict(lambda x: int(x[:2]), "example")


NAN = float("nan")


@pytest.mark.parametrize("got, expected", [
    (3, 3), (3.0, 3.0), ("a", "a"), (None, None), ([1, (2, 3)], [1, (2, 3)]), ((1, 2), [1, 2]), ({"a": [1.0]}, {"a": [1.0]}), (NAN, NAN),
    (torch.tensor([1.0, NAN, -math.inf]), torch.tensor([1.0, NAN, -math.inf])), (numpy.array([1, 2]), numpy.array([1, 2])),
    (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0])), (torch.tensor(5), 5), (torch.zeros(0), torch.zeros(0)),
])
def test_equal_values_have_no_difference(got, expected):
    assert first_difference(got, expected) is None


@pytest.mark.parametrize("got, expected, place, problem", [
    (4, 3, "", ""), (None, 3, "", "a None, not a int"), (True, 1, "", "a bool, not a int"), ([1, 2, 4], [1, 2, 3], "[2]", ""),
    ([1], [1, 2], "", "another length"), ([[1], [2, 9]], [[1], [2, 3]], "[1][1]", ""), ({"a": 1}, {"a": 1, "b": 2}, "", "a key is missing"),
    ({"a": 1, "c": 1}, {"a": 1}, "", "a key too many"), ({"a": [0]}, {"a": [1]}, "['a'][0]", ""), ([1], torch.tensor([1]), "", "a list, not a tensor"),
    (torch.zeros(2, 3), torch.zeros(3, 2), "", "another shape"), (torch.zeros(2), torch.zeros(2, dtype=torch.long), "", "another kind of number"),
    (torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "[1, 1]", "1 of 4 elements differ, this is the first"),
    (torch.tensor([math.inf]), torch.tensor([1.0]), "[0]", ""), (torch.tensor([NAN]), torch.tensor([1.0]), "[0]", ""), (NAN, 1.0, "", ""),
    ("abc", ["a", "b", "c"], "", "a str, not a list"),
])
def test_the_first_difference_is_placed(got, expected, place, problem):
    found = first_difference(got, expected)
    assert (found.place, found.problem) == (place, problem)


def test_tolerances_are_absolute_plus_relative():
    assert first_difference(1.0001, 1.0, atol=0, rtol=2e-4) is None and first_difference(1.0003, 1.0, atol=0, rtol=2e-4)
    left, right = torch.tensor([100.0, 0.0]), torch.tensor([100.5, 1e-7])
    assert first_difference(left, right, atol=1e-6, rtol=1e-2) is None and first_difference(left, right, atol=1e-6, rtol=1e-3).place == "[0]"


@pytest.mark.parametrize("value, text", [(torch.tensor([0.1, 2.0]), "tensor([0.1, 2.0])"), (torch.zeros(4, 17), "tensor[4, 17] float32"),
                                         (1 / 3, "0.333333"), ("x" * 200, "'" + "x" * 116 + "..."), ([0.1 + 0.2], "[0.3]")])
def test_values_are_told_in_one_line(value, text):
    assert short(value) == text
