"""The blanks in the text of chapter 05."""

from __future__ import annotations

from math import ceil

from minillm.book.blanks.asked import Blank

BLANKS = {
    "first batch": Blank(
        "Answers of 132, 8, 86 and 31 tokens in one static batch. Its idle places:",
        4 * 132 - (132 + 8 + 86 + 31),
        "places",
        1e-9,
    ),
    "alone": Blank(
        "A prompt of 13 tokens, 5 output tokens, a budget of 8 tokens a step. The steps it needs when alone:",
        ceil(13 / 8) + 5 - 1,
        "steps",
        1e-9,
    ),
    "four in a batch": Blank(
        "Spread 1, four batch slots. The share of its places that a static batch uses:",
        100 / (1 + 1 / 2 + 1 / 3 + 1 / 4),
        "%",
        0.02,
    ),
}
