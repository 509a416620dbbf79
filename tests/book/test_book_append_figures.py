"""The pictures of chapter 03 say in words what they show."""

from __future__ import annotations

import io

from PIL import Image

from minillm.book import append_figures
from minillm.book.append_figures import Growth, Kept

RUNS = {"Without a cache": [[0, 1], [0, 1, 2]], "With a cache": [[0, 1], [2]]}


def test_one_step_with_a_cache():
    alt = append_figures.append_and_attend().alt
    assert "are appended" in alt and "its query attends to every key" in alt


def test_the_grid_counts_what_is_computed_again():
    alt = append_figures.grid(RUNS, "abc", 2).alt
    assert "without a cache 5 positions computed, 2 of them again" in alt
    assert "with a cache 3 positions computed, 0 of them again" in alt
    assert "without a cache 2 positions computed, 0 of them again" in append_figures.grid(RUNS, "abc", 1).alt


def test_the_film_has_two_pictures_a_step():
    """And one more, for where nothing moves; the first step recomputes nothing, so its two pictures are one."""
    film = append_figures.film(RUNS, "abc", size=(300, 117))
    assert Image.open(io.BytesIO(film.png)).n_frames == 1 + 1 + 2


def test_growth_and_what_is_kept():
    grown = {"without": Growth([1, 3, 6], [1, 3, 6], "n²/2"), "with": Growth([1, 2, 3], [1, 2, 3], "n")}
    assert "positions without 6, positions with 3" in append_figures.growth({"positions": grown}).alt
    kept = {"small": Kept(1000, 1_000_000), "windowed": Kept(1000, 10**12, window=4096)}
    alt = append_figures.kept_in_memory(kept, 16e9, "memory of a T4: 16 GB").alt
    assert "small 1,000" in alt and "windowed" not in alt and "16 GB" in alt
