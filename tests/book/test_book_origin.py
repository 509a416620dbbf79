"""Whose work a checker takes: not the package's, however it is wrapped, and no helper that calls what is forbidden."""

from __future__ import annotations

import functools
import importlib
import sys
import types

import pytest
import torch

from minillm.book import chips, paths
from minillm.book.checks import Checker, CheckFailed
from minillm.book.checks.origin import forbidden_call, reference_behind, spying


def refusal(checker, student) -> str:
    if "example" not in checker.parts:
        checker.part("example")(lambda case: case.true(True, ""))
    with pytest.raises(CheckFailed) as caught:
        checker(student, "example")
    return str(caught.value)


def double(x):
    return x * 2 if isinstance(x, torch.Tensor) else [2 * v for v in x]


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


@pytest.mark.parametrize(
    "cheat",
    [
        paths.chapter_number,
        chips.Html,
        chips.Html("", ""),
        chips.Html("", "").__repr__,
        functools.partial(paths.chapter_number, "03"),
        functools.partial(lambda f, x: f(x), paths.chapter_number),
        functools.lru_cache(paths.chapter_number),
        wrapping(paths.chapter_number),
        closed_over(),
        Derived,
        Derived("", ""),
        Borrowed,
        Borrowed(),
        Holder(),
        type("New", (Derived,), {}),
        lambda x, f=paths.chapter_number: f(x),
        types.FunctionType(paths.chapter_number.__code__, {}, "mine"),
    ],
    ids=lambda cheat: getattr(cheat, "__name__", type(cheat).__name__),
)
def test_the_packages_own_work_is_refused(cheat):
    assert "or made from it. Write your own" in refusal(Checker("own"), cheat)


def test_renaming_does_not_hide_it():
    copied = types.FunctionType(paths.chapter_number.__code__, {}, "mine")
    copied.__module__ = "__main__"
    assert reference_behind(copied)


@pytest.mark.parametrize(
    "honest",
    [
        double,
        Own,
        Own(),
        Own().free,
        functools.partial(double),
        wrapping(double),
        len,
        torch.nn.Linear(2, 2),
        torch.relu,
        type("Module", (torch.nn.Module,), {}),
    ],
)
def test_own_work_is_taken(honest):
    assert reference_behind(honest) is None


def test_a_protocol_may_be_allowed_and_a_call_forbidden():
    assert reference_behind(Derived, allow=("minillm.book.chips.Html",)) is None

    def calls_it(x):
        return paths.chapter_number(x)

    def imports_it(x):
        from minillm.book.paths import chapter_number

        return chapter_number(x)

    strict = Checker("strict", forbid=("minillm.book.paths.chapter_number",))
    strict.part("example")(lambda case: case.equal(case.call("03_x"), 3))
    for cheat in (calls_it, imports_it):
        assert "minillm.book.paths.chapter_number" in refusal(strict, cheat)
    strict(lambda x: int(x[:2]), "example")


def calls_the_package(path):
    return paths.chapter_number(path)


def two_steps_away(path):
    return calls_the_package(path)


def by_its_name(path):
    return importlib.import_module("minillm.book.paths").chapter_number(path)


def by_two_names(path):
    name = "chapter_number"
    return getattr(sys.modules["minillm.book.paths"], name)(path)


class Helper:
    def number(self, path):
        return two_steps_away(path)


def imports_the_package(path):
    from minillm.book import paths as renamed

    return renamed.chapter_number(path)


@functools.lru_cache
def decorated(path):
    return imports_the_package(path)


helper = Helper()


@pytest.mark.parametrize(
    "hidden",
    [
        lambda p: two_steps_away(p),
        lambda p: Helper().number(p),
        lambda p: helper.number(p),
        lambda p: decorated(p),
        lambda p: by_its_name(p),
        lambda p: by_two_names(p),
        type("Student", (), {"step": lambda self, p: two_steps_away(p)}),
        functools.partial(two_steps_away, "03_x"),
    ],
)
def test_a_forbidden_call_is_found_in_helpers(hidden):
    assert forbidden_call(hidden, ("minillm.book.paths.chapter_number",)) == "minillm.book.paths.chapter_number"


@pytest.mark.parametrize(
    "honest", [lambda p: double(p), lambda p: torch.relu(p), lambda x: Own().free(x), torch.nn.Linear(2, 2), Own]
)
def test_helpers_and_torch_are_fine(honest):
    assert forbidden_call(honest, ("minillm.book.paths.chapter_number",)) is None


INTERFACE, PIECES = "__array_interface__", ("__arr", "ay_inter", "face__")


def reads_memory(name):
    """An array over the memory of any object, by the name that NumPy asks for."""
    import numpy

    held = types.SimpleNamespace(**{name: {"data": (id(name), True), "shape": (1,), "typestr": "|u1", "version": 3}})
    return numpy.asarray(held)


def in_pieces(x):
    return reads_memory("__array_" + x + "interface__")


def joined(x):
    return reads_memory(x.join(PIECES))


def formatted(x):
    return reads_memory(f"__array{x}_struct__")


def from_a_global(x):
    return reads_memory(INTERFACE)


def by_ctypes(x):
    import ctypes

    return ctypes.string_at(x)


class Disguised:
    @property
    def __array_interface__(self):
        return {}


def of_a_class(x):
    return Disguised().__array_interface__


@pytest.mark.parametrize("cheat", [in_pieces, joined, formatted, from_a_global, by_ctypes, of_a_class])
def test_an_array_at_any_address_is_refused(cheat):
    """The name by which NumPy finds such an array need not stand in the code whole: its pieces are enough."""
    assert reads_memory(INTERFACE).size == 1  # so much can be read
    checker = Checker("memory")
    assert "An answer has no business with what judges it" in refusal(checker, cheat)


the_check = Checker("the_check")
the_check.part("example")(lambda case: case.true(True, ""))


def by_a_search(x):
    return next(module for name, module in list(sys.modules.items()) if name.endswith("ch07"))


def by_an_import_inside(x):
    import sys as renamed

    return renamed.modules[x]


def by_the_notebook(x):
    return globals()["the_check"].parts


@pytest.mark.parametrize("cheat", [by_a_search, by_an_import_inside, by_the_notebook])
def test_the_judge_is_not_found_by_a_search(cheat):
    assert "An answer has no business with what judges it" in refusal(Checker("found"), cheat)


@pytest.mark.parametrize("honest", [lambda model: list(model.modules()), lambda x: globals()["double"](x)])
def test_modules_of_a_model_and_own_globals_are_fine(honest):
    assert spying(honest) is None


@pytest.mark.parametrize(
    "honest",
    [lambda x: "array" + "_" + str(x), lambda x: {"in": 1, "__array_": 2, "face__": x}, lambda x: f"__array{x}"],
)
def test_strings_that_spell_no_such_name_are_fine(honest):
    assert spying(honest) is None
