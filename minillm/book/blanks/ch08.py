"""The blanks in the text of chapter 08."""

from __future__ import annotations

from math import ceil

from minillm.book.blanks.asked import Blank

BLANKS = {
    "one pause": Blank("TPOT of 101 tokens, one every 20 ms, with one gap of 1 s:", 1e3 * (99 * 0.02 + 1) / 100, "ms"),
    "chunks": Blank("Steps that the prompt takes:", ceil(4000 / (256 - 24)), "steps", 1e-9),
    "batch weight": Blank("The largest number of tokens in a step:", (60 - 10) / 0.25, "tokens"),
}
