"""Holes in a chapter: the reader's function is taken when it is right, the book's otherwise; the answers that the
notebook folds are those that it goes on with."""

from __future__ import annotations

import inspect
import re

import pytest

from minillm.book import nbfile
from minillm.book.checks import ch23_holes
from minillm.book.holes import fill_in, is_empty
from minillm.book.paths import repository_root

HOLES = {"leave": "check_leave", "sse_event": "check_event", "adapter_bytes": "check_bytes"}


def check_double(function):
    return None if function(2) == 4 else f"function(2) is {function(2)}, expected 4"


def book_double(number):
    return number * 2


def test_a_right_answer_is_taken(capsys):
    def double(number):
        return number + number

    assert fill_in(double, book_double, check_double) is double
    assert "✓ double is right" in capsys.readouterr().out


def test_an_empty_hole_and_a_wrong_answer_are_told_apart(capsys):
    def empty(number):
        """To be written."""

    def wrong(number):
        return number

    def broken(number):
        raise KeyError("number")

    for function, said in ((empty, "still empty"), (wrong, "function(2) is 2"), (broken, "raised KeyError")):
        assert fill_in(function, book_double, check_double) is book_double
        assert said in capsys.readouterr().out
    assert is_empty(empty) and not is_empty(wrong) and not is_empty(lambda number: 5)


@pytest.mark.parametrize("name", HOLES)
def test_the_books_answers_pass_and_are_those_that_chapter_23_folds(name):
    answer = getattr(ch23_holes, name)
    assert getattr(ch23_holes, HOLES[name])(answer) is None
    cells = nbfile.read(repository_root() / "chapters" / "23_the_server.ipynb").cells
    folded = [source for cell in cells for source in re.findall(r"```python\n(.*?)```", cell.source, re.DOTALL)]
    assert inspect.getsource(answer) in folded


@pytest.mark.parametrize(
    "check, wrong, said",
    [
        ("check_leave", lambda thread, request: thread.end(request), "in the caller's thread"),
        ("check_leave", lambda thread, request: thread.tell(thread.end(request)), "in the caller's thread"),
        ("check_leave", lambda thread, request: thread.tell(lambda: None), "has to call thread.end"),
        ("check_event", lambda data: f"data: {data}\n\n".encode(), "two"),
        ("check_bytes", lambda k, w, h, r: (k * w * h * 4, (w * h + r * (w + h)) * 4), "(16, 576, 1536, 8)"),
    ],
)
def test_plausible_mistakes_are_named(check, wrong, said):
    assert said in getattr(ch23_holes, check)(wrong)
