"""What the statement of chapter 07's repaired cache leaves open, its check leaves open, too."""

from __future__ import annotations

from functools import partial

import pytest

from minillm.book.checks.ch07_repaired import Names, check_repair_cache, left_open


@pytest.mark.parametrize("copies", ["later", "at once", "never"])
def test_a_copy_may_take_the_name_at_any_time(copies):
    for seed in (None, 1, 2, 20_000_003):
        for part in ("example", "edges", "random"):
            check_repair_cache.judge(partial(Names, copies=copies), part, seed)


def test_events_tell_whether_it_shows():
    # Two copies of a block; the first one's is allocated again.
    copied = [("admit", name, "abcdx") for name in "AB"]
    copied += [("computed", name, 5) for name in "AB"] + [
        ("release", "A"),
        ("admit", "C", "123456789"),
        ("release", "C"),
    ]
    assert left_open(5, [*copied, ("admit", "D", "abcdx")])
    assert not left_open(9, [*copied, ("admit", "D", "abcdx")])
