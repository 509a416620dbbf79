"""The pictures of chapter 20 say what they show; its hole and its blanks have the answers that the chapter folds."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from minillm.book import nbfile, parallel_figures as figures
from minillm.book.blanks import BLANKS
from minillm.book.checks import ch20_holes as holes
from minillm.book.paths import repository_root
from minillm.parallel.cost import LINKS
from minillm.parallel.published import published
from minillm.parallel.schedules import bubble_fraction, timeline


def test_each_picture_has_its_numbers_in_words():
    assert "two results" in figures.layer_on_two_ranks().alt
    assert (
        "after 2 steps all chunks" in figures.ring_states([np.ones((2, 2)), np.ones((2, 2)), 2 * np.ones((2, 2))]).alt
    )
    curves = figures.all_reduce_curves(LINKS["NVLink 4"], 4, {"ring": {2**20: 19e-6}}, {"a token": 8192})
    assert "ring at 1,024 KiB 19 µs" in curves.alt
    assert "send: formula 8, counted 9" in figures.crossed({"send": 8}, {"send": 9}).alt
    plans = {"GPipe": timeline(2, 2, "gpipe"), "chunks": timeline(2, 2, "interleaved", num_chunks=2)}
    assert "GPipe: 2 devices, 33% bubble; chunks: 2 devices, 20% bubble" in figures.pipelines(plans).alt
    shares = {"zigzag": [1.0, 1.0], "contiguous": [0.5, 1.5]}
    assert "contiguous: 0.50, 1.50 of the mean" in figures.score_owners(2, 8, list(shares), shares).alt
    assert f"{len(published())} published results" in figures.published_chart(published()).alt


def test_a_ring_collects_every_part_in_one_chunk_of_each_rank_and_then_hands_it_round():
    states = figures.ring_progress(4)
    assert len(states) == 7 and [int((state == 4).sum()) for state in states] == [0, 0, 0, 4, 8, 12, 16]


def test_the_answer_of_the_hole_passes_and_is_the_one_that_the_chapter_folds():
    assert holes.check_kv_heads(holes.kv_heads_of) is None
    cells = nbfile.read(repository_root() / "chapters" / "20_one_model_many_devices.ipynb").cells
    folded = [source for cell in cells for source in re.findall(r"```python\n(.*?)```", cell.source, re.DOTALL)]
    assert inspect.getsource(holes.kv_heads_of) in folded


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rank, n, heads, kv: range(kv * rank // n, kv * (rank + 1) // n),  # none where ranks outnumber heads
        lambda rank, n, heads, kv: range(kv),
        lambda rank, n, heads, kv: [rank % kv],
        lambda rank, n, heads, kv: None,
    ],
)
def test_plausible_mistakes_in_the_hole_are_named(wrong):
    assert re.match(r"rank \d of \d, \d+ query heads", holes.check_kv_heads(wrong))


def test_the_blanks_are_what_their_formulas_say():
    assert bubble_fraction(4, 27) <= 0.1 < bubble_fraction(4, 26)
    assert BLANKS["micro-batches"].answer == 27
    assert BLANKS["hidden"].answer == 2 * 8 / 64 * 494.5e12 / 50e9
