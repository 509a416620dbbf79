"""The blanks in the text of chapter 20."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "micro-batches": Blank("The least number of micro-batches with which 4 stages idle for at most 10%:", 27, "", 1e-9),
    "hidden": Blank("The least number of tokens on each rank that hides the transfer:", 2472.5, "tokens"),
}
