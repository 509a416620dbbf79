"""The blanks and the pictures of chapter 24: what they tell, in words."""

from __future__ import annotations

import pytest

from minillm.book import blank, load_figures
from minillm.book.blanks import BLANKS


@pytest.mark.parametrize("name", BLANKS)
def test_a_blank_says_whether_a_number_is_right_and_never_what_it_is(name):
    answer = BLANKS[name].answer
    assert "✓" in repr(blank(name, answer))
    assert "too large" in repr(blank(name, 3 * answer)) and "too small" in repr(blank(name, answer / 3))
    assert "three dots" in repr(blank(name, ...)) and f"{answer:g}" not in repr(blank(name, ...))


def test_a_blank_takes_one_number():
    with pytest.raises(TypeError, match="put one number"):
        blank("office", "four")
    with pytest.raises(KeyError):
        blank("no such blank", 4)


def test_a_test_that_passes_beside_one_that_fails():
    quick, slow = (
        [(float(i), i + 0.5) for i in range(100)],
        [(float(i), i + (9.0 if i > 90 else 0.5)) for i in range(100)],
    )
    alt = load_figures.passed_and_failed({"calm": quick, "stalled": slow}, promise=2.0).alt
    assert "calm, 1.0 requests/s, P99 0.50 s, 0.0% late: it passes" in alt
    assert "P99 9.00 s, 9.0% late: it fails" in alt


@pytest.mark.parametrize(
    "n, low, high, told",
    [(600, 589, 599, "upper bound at rank 599"), (100, 97, None, "no upper bound"), (12, 9, 12, "9")],
)
def test_the_ranks_of_an_interval(n, low, high, told):
    assert told in load_figures.ranks(n, 99, low, high).alt


def test_a_measured_knee_may_lack_a_bound():
    picture = load_figures.knee({5.0: 0.1, 10.0: 2.0}, {8.0: (0.3, None, 0.4), 9.0: (0.5, 0.4, None)}, 0.3, 8.5, 11.0)
    assert "leaves the promise at 8.5 requests/s" in picture.alt and "9.0/s: 0.50 s" in picture.alt


def test_the_other_pictures_carry_their_numbers():
    assert "three users" in load_figures.two_loops().alt
    assert "0.60 s in the first interval" in load_figures.warming_up([0, 5, 10], [0.6, 0.65, 0.68], 0.7).alt
    assert "from 1.00 s to 3.00 s" in load_figures.spread_of_runs([1.0, 2.0, 3.0], 2.5, 2.0).alt
    assert "512: 14,540 and 28" in load_figures.pareto({512: 14_540.0}, {512: 15_000.0}, 221.0).alt
    assert "7 replicas" in load_figures.a_day([0, 12, 24], [1, 9, 1], 7, 2.0, "Utilization 25%").alt
