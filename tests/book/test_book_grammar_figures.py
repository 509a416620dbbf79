"""The drawings of chapter 19 say in their alt texts what they show."""

from __future__ import annotations

import torch

from minillm.book import grammar_figures
from minillm.book.prediction import Prediction
from minillm.book.style import canvas

AB = [{ord("a"): 1}, {ord("b"): 2}, {}], {1, 2}  # the automaton of ab?


def test_the_constrained_step_names_its_three_parts():
    alt = grammar_figures.constrained_step().alt
    assert alt.index("State:") < alt.index("Mask:") < alt.index("Draw:")
    for token, _, allowed in grammar_figures.WANTED:
        spoken = {",": "a comma"}.get(token, token)
        assert (alt.index(spoken, alt.index("Mask:")) > alt.index("forbidden")) == allowed


def test_a_forbidden_label_is_struck_out_and_no_wider_than_its_text():
    _fig, ax = canvas(width=7.5, height=2.7)
    told = grammar_figures.struck_bars(ax, ["colour", "p", "pe"], [0.8, 0.1, 0.1], [False, True, True], 1, "step 2")
    assert told == "'colour' struck out, 'p' taken, 'pe' allowed"
    [strike] = ax.lines
    assert not strike.get_in_layout()
    label = ax.get_yticklabels()[0].get_window_extent().transformed(ax.transAxes.inverted())
    assert list(strike.get_xdata()) == [label.x0, label.x1] and list(strike.get_ydata()) == [0, 0]


def test_an_automaton_and_its_masks_are_told_in_words():
    moves, may_end = AB
    assert grammar_figures.states_picture(moves, may_end, "ab?").alt == (
        "ab?: from 0 to 1 by a; from 1 to 2 by b. It may end in [1, 2]."
    )
    alt = grammar_figures.allowed_tokens(moves, may_end, [[True, False], [True, True], [False, True]]).alt
    assert alt == "Allowed tokens in 3 states: [1, 2, 1]; in 1 only one character may follow."


def test_a_step_shows_the_taken_token_even_where_it_is_not_among_the_best():
    vocabulary = [None, *(bytes([byte]) for byte in b"abcdefgh")]
    p = torch.tensor([0.0, 0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.04, 0.01])
    mask = torch.arange(9) > 7
    shown, strip = grammar_figures.masked_step([(0, p, mask, 8)], [True], vocabulary, 1)
    assert shown.alt.startswith("Step 1: 'a' struck out") and shown.alt.endswith("'h' taken")
    assert repr(strip) == "after step 1\nh"


def test_results_are_told_with_their_numbers():
    verdicts = {1.0: {"right": 1, "valid, wrong": 1, "no JSON": 2}, 2.0: {"right": 0, "valid, wrong": 3, "no JSON": 1}}
    alt = grammar_figures.valid_and_right(verdicts, verdicts, Prediction("?", 3), at=2.0).alt
    assert "Percent of 4 answers at the temperatures (1.0, 2.0)" in alt and "'valid, free': [50.0, 75.0]" in alt
    assert "depth 1 to 2" in grammar_figures.nesting(range(1, 3), {"[ ]": [4, 6], "{ }": [6, 14]}, '{"a": [1]}').alt
    scores = [[-1.0], [-1.0, -0.1], [-3.0, 0.0, 0.0]]
    alt = grammar_figures.choice_scores([" ox", " goat", " badger"], scores).alt
    assert "by the sum the best is ' ox'" in alt and "by the mean the best is ' goat'" in alt
