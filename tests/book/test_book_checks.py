"""The checkers' framework: messages that help, the student's own work only, nothing counted silently."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode

from minillm.book.checks import Checker, CheckFailed
from minillm.book.checks.compare import Difference, first_difference
from minillm.book.checks.wording import apart, short


@dataclass
class Point:
    x: float
    rest: list


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
        "double: example: the doubled values are wrong at [1]: 1 of 2 elements differ, this is the first\n"
        "  expected: 4.0\n  got:      5.0\n"
        "  called:   test_a_wrong_element_is_named_with_the_call_and_the_hint.<locals>.<lambda>(tensor([1.0, 2.0]))\n"
        "  hint:     Multiply by two."
    )


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
    allowed.part("example")(
        lambda case: case.equal(case.run(case.student, torch.tensor([1]), may_change=True), torch.tensor([2]))
    )
    allowed(in_place, "example")


def test_an_argument_that_is_changed_before_the_expected_error_is_told():
    checker = Checker("lowest")
    checker.part("example")(lambda case: case.raises(ValueError, case.student, [3, 1]))

    def spoils(numbers):
        numbers.clear()
        return min(numbers)

    assert "spoils changed one of its arguments" in message(checker, spoils)


def test_a_mistake_is_recognised_where_the_exercise_has_the_functions_name():
    def judge(case):
        case.equal(case.call(2), 4)

    checker = Checker("double", misconceptions={"Not the square.": lambda x: x + 5})
    checker.part("example")(judge)

    def double(x):
        return x + 5

    assert "Not the square." in message(checker, double)


def test_a_missing_error_is_told(check_double):
    assert "returned []; expected it to raise TypeError" in message(
        check_double, lambda x: [2 * v for v in x or []], "edges"
    )


def test_what_the_checker_cannot_use_is_the_students_failure():
    checker = Checker("shape")
    checker.part("example")(lambda case: case.equal(case.call(3).shape, [1]))
    assert (
        "could not go on with what it was given: AttributeError: 'NoneType' object has no attribute 'shape'"
        in message(checker, lambda x: None)
    )


class Halfway:
    def append(self, item):
        return self.items


def test_a_missing_method_is_called_missing():
    checker = Checker("halfway")
    checker.part("example")(lambda case: case.run(case.student().step, 1))
    checker.part("edges")(lambda case: case.run(case.student().append, 1))
    assert "halfway: example: Halfway has no 'step'; the statement asks for it" in message(checker, Halfway)
    assert "Halfway.append raised AttributeError" in message(checker, Halfway, "edges")


@pytest.mark.parametrize(
    "kind, right, wrong, said",
    [
        (int, 3, True, "must be an int; got a bool: True"),
        (int, 3, 3.0, "must be an int; got a float: 3.0"),
        (int, 3, torch.tensor(3), "must be an int; got an int64 tensor: tensor(3)"),
        (list, [3], (3,), "must be a list; got a tuple: (3,)"),
        (
            torch.int64,
            torch.tensor([3]),
            torch.tensor([3], dtype=torch.int32),
            "must be an int64 tensor; got an int32 tensor: tensor([3])",
        ),
        (torch.float32, torch.zeros(1), [0.0], "must be a float32 tensor; got a list: [0.0]"),
        (torch.float32, torch.zeros(1), None, "got None: None"),
    ],
)
def test_a_type_is_asked_for_exactly(kind, right, wrong, said):
    checker = Checker("kind")
    checker.part("example")(lambda case: case.is_a(case.call(), kind, "the answer"))
    checker(lambda: right, "example")
    assert said in message(checker, lambda: wrong)


def test_the_elements_of_a_list_have_a_type_too():
    checker = Checker("ids")
    checker.part("example")(lambda case: case.is_a(case.call(), list, "the ids", of=int))
    checker(lambda: [1, 2], "example")
    assert "the ids, element 1, must be an int; got a float: 2.0" in message(checker, lambda: [1, 2.0])


def test_what_was_raised_comes_back():
    checker = Checker("named")
    checker.part("example")(
        lambda case: case.true("17" in str(case.raises(ValueError, case.student, 17)), "17 is not named")
    )

    def refuses(number, told="{}"):
        raise ValueError(told.format(number))

    checker(refuses, "example")
    assert "17 is not named" in message(checker, lambda number: refuses(number, "too large"))


def test_a_hint_for_what_raises():
    checker = Checker("hints", hint="In general.")

    @checker.part("example")
    def _example(case):
        with case.hinting("In particular."):
            case.equal(case.call(1), 1)
        case.equal(case.call(0), 0)

    assert "In particular." in message(checker, lambda x: 1 // (x - 1))
    assert "In general." in message(checker, lambda x: x // x)


@pytest.mark.parametrize(
    "what, verb",
    [
        ("the logits after an empty output", "are"),
        ("the mask [row, token]", "is"),
        ("the tokens with -inf logits at temperature 0.7", "are"),
        ("the list of new token ids", "is"),
        ("the bias", "is"),
        ("positions() after 4 tokens", "is"),
        ("num_computed_tokens", "is"),
        ("the plan of 3 rows\n  the plan", "is"),
        ("the pair (answer, votes)", "is"),
        ("keys[:, :3] [KV head, position, dimension]", "are"),
    ],
)
def test_one_is_and_many_are(what, verb):
    checker = Checker("grammar")
    checker.part("example")(lambda case: case.equal(case.call(), 1, what))
    assert f"{what} {verb} wrong" in message(checker, lambda: 2)


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
        seen.append(
            (case.rng.random(), case.randint(0, 10**9), case.randn(2).tolist(), case.randint(0, 10**9, 2).tolist())
        )
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
    assert "... 6 earlier calls" in said and said.count("<lambda>(") == 3 and "(8)" in said and said.count("\n") < 9


NAN = float("nan")


@pytest.mark.parametrize(
    "got, expected",
    [
        (3, 3),
        (3.0, 3.0),
        ("a", "a"),
        (None, None),
        ([1, (2, 3)], [1, (2, 3)]),
        ((1, 2), (1, 2)),
        ({1, 2}, {2, 1}),
        (deque([1, 2]), deque([1, 2])),
        (Point(1, [2.0]), Point(1, [2.0])),
        (3, 3.0),
        (torch.zeros(2).shape, [2]),
        ({"a": [1.0]}, {"a": [1.0]}),
        (NAN, NAN),
        (torch.tensor([1.0, NAN, -math.inf]), torch.tensor([1.0, NAN, -math.inf])),
        (numpy.array([1, 2]), numpy.array([1, 2])),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0])),
        (torch.zeros(0), torch.zeros(0)),
    ],
)
def test_equal_values_have_no_difference(got, expected):
    assert first_difference(got, expected) is None


class Yes(float):
    """Equal to everything, and a float to those who ask `isinstance`."""

    __eq__ = __ge__ = __le__ = lambda *_: True
    __hash__ = float.__hash__


class Agrees(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return True


class Pretender:
    """Looks like an array."""

    shape, dtype = (2,), "float32"

    def tolist(self):
        return [1.0, 2.0]


class Copycat:
    __eq__ = lambda *_: True
    __hash__ = None


Copycat.__module__, Copycat.__qualname__ = "builtins", "list"


@pytest.mark.parametrize(
    "got, expected, kinds",
    [
        ((1, 2), [1, 2], "a tuple, not a list"),
        ([1, 2], (1, 2), "a list, not a tuple"),
        (3.0, 3, "a float, not an int"),
        (True, 1, "a bool, not an int"),
        (1, True, "an int, not a bool"),
        (numpy.float64(0.5), 0.5, "a float64, not a float"),
        (numpy.float32(0.5), 0.5, "a float32, not a float"),
        (numpy.int64(3), 3, "an int64, not an int"),
        (numpy.bool_(True), True, "a bool of numpy, not the one asked for"),
        (torch.tensor(5), 5, "an int64 tensor, not an int"),
        (Yes(2.0), 0.5, "a Yes, not a float"),
        ([Yes(2.0)], [0.5], "a Yes, not a float"),
        (Copycat(), [1], "not a list"),
        (Pretender(), torch.tensor([1.0, 2.0]), "a Pretender, not a tensor"),
        (torch.zeros(2).as_subclass(Agrees), torch.ones(2), "an Agrees, not a tensor"),
        (numpy.ones(2), torch.ones(2), "an array, not a float32 tensor"),
        ({1, 2}, frozenset({1, 2}), "a set, not a frozenset"),
        ({1: Yes(0)}, {1: 0.5}, "a Yes, not a float"),
        ({Yes(1): 0}, {1.0: 0}, "a key too many"),
        (deque([1]), [1], "a deque, not a list"),
        ("a", b"a", "a str, not a bytes"),
        (Point(1, [Yes(1)]), Point(1, [2.0]), "a Yes, not a float"),
    ],
)
def test_another_kind_is_a_difference_and_no_object_is_asked_whether_it_is_equal(got, expected, kinds):
    assert kinds in first_difference(got, expected).problem


def test_a_tensor_or_array_that_stands_in_for_every_operation_is_another_kind():
    class Evil(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return torch.ones(2)

    Evil.__module__, torch.Evil = "torch", Evil  # as an answer can have it
    try:
        assert first_difference(torch.zeros(2).as_subclass(Evil), torch.ones(2))
    finally:
        del torch.Evil
    named = numpy.zeros(2, dtype=[("float", "O")])
    assert first_difference(named, numpy.ones(2)) and first_difference(numpy.ones(2, dtype=object), numpy.ones(2))
    shadowed = torch.tensor(5)
    shadowed.item = shadowed.detach = lambda: 6
    assert first_difference(shadowed, 6, kinds=False)


def test_a_mode_that_was_left_on_answers_no_comparison():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return torch.ones(2)

    zeros, ones = torch.zeros(2), torch.ones(2)
    with Mode():
        assert first_difference(zeros, ones)


def test_sets_hold_no_impostors():
    assert first_difference({Yes(1), 2.0}, {1.0, 2.0}) and first_difference({True, 2}, {1, 2})
    assert first_difference({1}, {1, 2}) == Difference("", "{1, 2}", "{1}")


@pytest.mark.parametrize("got, expected", [((1, 2), [1, 2]), (torch.tensor(5), 5), (numpy.float64(0.5), 0.5), (3.0, 3)])
def test_where_the_statement_leaves_the_kind_open_only_values_count(got, expected):
    assert first_difference(got, expected, kinds=False) is None and first_difference(got, expected)


def test_truth_is_no_number_whatever_the_statement_leaves_open():
    assert first_difference(True, 1, kinds=False) and first_difference(1, True, kinds=False)
    assert first_difference(Yes(2.0), 0.5, kinds=False) and first_difference([Yes(2.0)], (0.5,), kinds=False)


def test_a_dtype_counts_where_it_is_asked_for():
    one = torch.ones(2)
    assert first_difference(one.double(), one) is None
    assert first_difference(one.double(), one, dtypes=True).problem == "another dtype"


@pytest.mark.parametrize(
    "left, right, shown",
    [
        (1.0, 1.0 + 1e-9, ("1.0", "1.000000001")),
        (0.1 + 0.2, 0.3, ("0.30000000000000004", "0.3")),
        ([1.0, 2.00000004], [1.0, 2.0], ("[1.0, 2.00000004]", "[1.0, 2.0]")),
        ("a" * 200 + "b", "a" * 200 + "c", ("'" + "a" * 30 + "b'", "'" + "a" * 30 + "c'")),
    ],
)
def test_numbers_are_printed_until_they_differ(left, right, shown):
    told = apart(left, right)
    assert told[0].endswith(shown[0]) and told[1].endswith(shown[1])


@pytest.mark.parametrize(
    "got, expected, place, problem",
    [
        (4, 3, "", ""),
        (None, 3, "", "None, not an int"),
        (True, 1, "", "a bool, not an int"),
        ([1, 2, 4], [1, 2, 3], "[2]", ""),
        ([1], [1, 2], "", "another length"),
        ([[1], [2, 9]], [[1], [2, 3]], "[1][1]", ""),
        ({"a": 1}, {"a": 1, "b": 2}, "", "a key is missing"),
        ({"a": 1, "c": 1}, {"a": 1}, "", "a key too many"),
        ({"a": [0]}, {"a": [1]}, "['a'][0]", ""),
        ([1], torch.tensor([1]), "", "a list, not a tensor"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "", "another shape"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.long), "", "another kind of number"),
        (
            torch.tensor([[1.0, 2.0], [3.0, 9.0]]),
            torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
            "[1, 1]",
            "1 of 4 elements differ, this is the first",
        ),
        (torch.tensor([math.inf]), torch.tensor([1.0]), "[0]", ""),
        (torch.tensor([NAN]), torch.tensor([1.0]), "[0]", ""),
        (NAN, 1.0, "", ""),
        ("abc", ["a", "b", "c"], "", "a str, not a list"),
    ],
)
def test_the_first_difference_is_placed(got, expected, place, problem):
    found = first_difference(got, expected)
    assert (found.place, found.problem) == (place, problem)


def test_tolerances_are_absolute_plus_relative():
    assert first_difference(1.0001, 1.0, atol=0, rtol=2e-4) is None and first_difference(1.0003, 1.0, atol=0, rtol=2e-4)
    left, right = torch.tensor([100.0, 0.0]), torch.tensor([100.5, 1e-7])
    assert (
        first_difference(left, right, atol=1e-6, rtol=1e-2) is None
        and first_difference(left, right, atol=1e-6, rtol=1e-3).place == "[0]"
    )


@pytest.mark.parametrize(
    "value, text",
    [
        (torch.tensor([0.1, 2.0]), "tensor([0.1, 2.0])"),
        (torch.zeros(4, 17), "tensor[4, 17] float32"),
        (1 / 3, "0.333333"),
        ("x" * 200, "'" + "x" * 116 + "..."),
        ([0.1 + 0.2], "[0.3]"),
    ],
)
def test_values_are_told_in_one_line(value, text):
    assert short(value) == text
