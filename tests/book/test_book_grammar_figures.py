"""The drawings of chapter 19 say in their alt texts what they show."""

from __future__ import annotations

from minillm.book import grammar_figures
from minillm.book.style import canvas


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
