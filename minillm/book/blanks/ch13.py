"""The blanks in the text of chapter 13."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "useful": Blank("FLOP per byte that the four filled rows do:", 4 * 2 * 2 / 4, "FLOP/byte"),
    "overflow": Blank(
        "The first block whose offset does not fit into an int32:", 2**31 // (8 * 128 * 16), "", within=1e-9
    ),
    "merged": Blank(
        "Two splits: mean 10 with L = 3, mean 20 with L = 1. The answer for all keys:",
        (2**3 * 10 + 2**1 * 20) / (2**3 + 2**1),
    ),
}
