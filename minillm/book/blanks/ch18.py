"""The blanks in the text of chapter 18."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "draft of two": Blank(
        "Tokens per step with two draft tokens, each accepted half of the time:",
        (1 - 0.5**3) / (1 - 0.5),
        "tokens per step",
    ),
    "draft at 0.15": Blank(
        "The formula's speed-up at α = 0.8, γ = 4 and c = 0.15:", (1 - 0.8**5) / ((1 - 0.8) * (4 * 0.15 + 1)), "times"
    ),
    "overlap of three": Blank(
        "The share of draft tokens that rejection sampling accepts:", sum(map(min, (0.5, 0.3, 0.2), (0.7, 0.1, 0.2)))
    ),
}
