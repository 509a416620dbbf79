"""`minillm course similarity`: a rewritten copy is found, independent answers are not, and it calls itself a hint."""

from __future__ import annotations

import csv

import pytest

from minillm.course import similarity
from minillm.course.grading.plan import Exercise
from minillm.course.shapes import fingerprints

STUB = '''def merge(left, right):
    """The sorted union of two sorted lists, without duplicates."""
    raise NotImplementedError()
'''
REFERENCE = '''def merge(left, right):
    """The sorted union of two sorted lists, without duplicates."""
    merged = []
    for value in heapq.merge(left, right):
        if not merged or merged[-1] != value:
            merged.append(value)
    return merged
'''
ORIGINAL = '''
def next_of(values, at):
    if at < len(values):
        return values[at], at + 1
    return None, at

def merge(left, right):
    """Both, in order."""
    i = j = 0
    out = []
    a, i = next_of(left, i)
    b, j = next_of(right, j)
    while a is not None or b is not None:
        if b is None or (a is not None and a <= b):
            best = a
            a, i = next_of(left, i)
        else:
            best = b
            b, j = next_of(right, j)
        if len(out) == 0 or out[len(out) - 1] < best:
            out.append(best)
    return out
'''
COPY = '''
def merge(xs: list[int], ys: list[int]) -> list[int]:
    # my own work
    p = q = 0
    result = []
    x, p = advance(xs, p)
    y, q = advance(ys, q)
    while x is not None or y is not None:
        if y is None or (x is not None and x <= y):
            smallest = x
            x, p = advance(xs, p)
        else:
            smallest = y
            y, q = advance(ys, q)
        if len(result) == 0 or result[len(result) - 1] < smallest:
            result.append(smallest)
    return result

def advance(items, place):
    """The item at a place."""
    if place < len(items):
        return items[place], place + 1
    return None, place
'''
OTHER = """
def merge(left, right):
    result, seen = [], set()
    stack = [list(reversed(left)), list(reversed(right))]
    while any(stack):
        heads = [part[-1] for part in stack if part]
        smallest = min(heads)
        for part in stack:
            while part and part[-1] == smallest:
                part.pop()
        if smallest not in seen:
            seen.add(smallest)
            result.append(smallest)
    return result
"""
ANSWERS = {"<ann>": ORIGINAL, "=bob": COPY, "cai <script>": OTHER, "dee": REFERENCE, "eva": STUB}


@pytest.fixture
def exercise():
    return Exercise("merge", {}, {}, REFERENCE, STUB)


def test_a_copy_in_other_words_is_found_and_independent_answers_are_not(exercise):
    found = similarity.pairs("06", exercise, ANSWERS)
    assert [(pair.first, pair.second) for pair in found] == [("<ann>", "=bob")]
    assert found[0].alike > 0.9 and found[0].of_reference < 0.5 and found[0].expected >= similarity.FLOOR


def test_names_literals_docstrings_and_order_do_not_count():
    assert fingerprints(COPY) == fingerprints(ORIGINAL)
    assert fingerprints(ORIGINAL.replace("<=", ">=")) != fingerprints(ORIGINAL)
    assert not fingerprints("def broken(:")


def test_what_all_share_is_no_hint(exercise):
    """The stub, short answers, and what two fifths of a class have written."""
    assert similarity.pairs("06", exercise, {"ann": STUB, "bob": STUB}) == []
    everyone = {f"s{i}": ORIGINAL for i in range(10)}
    assert similarity.pairs("06", exercise, everyone) == []


def test_a_class_that_follows_the_solution_raises_the_threshold(exercise):
    near = {name: REFERENCE.replace("merged", name) for name in ("one", "two", "three", "four")}
    assert similarity.pairs("06", exercise, {**near, **ANSWERS})[0].expected > 0.9


def test_the_report_is_a_hint_and_says_so(exercise, tmp_path):
    table, page = similarity.write(similarity.pairs("06", exercise, ANSWERS), tmp_path / "reports")
    text = page.read_text(encoding="utf-8")
    assert similarity.NOTE in text and "a hint, not a verdict" in text and "<td>&lt;ann&gt;</td>" in text
    rows = list(csv.reader(table.open(encoding="utf-8")))
    assert rows[1][:4] == ["06", "merge", "<ann>", "'=bob"]  # no spreadsheet takes a name for a formula


def test_a_course_is_compared_and_a_threshold_checked(course):
    assert similarity.compare(course) == []
    with pytest.raises(ValueError, match=r"threshold=2: above 0, at most 1"):
        similarity.compare(course, threshold=2)
