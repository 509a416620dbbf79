"""The blanks in the text of chapter 19."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "all masks": Blank("All masks of a pattern with 26 states, for 128,000 tokens:", 26 * 128_000 // 8, "bytes"),
    "ax when valid": Blank(
        "The probability of ax, given that the text is valid:", 0.6 * 0.1 / (0.6 * 0.1 + 0.4 * 0.5), within=0.01
    ),
    "forced tokens": Blank("Steps that jump-forward leaves:", 120 - 70, "steps", 1e-9),
}
