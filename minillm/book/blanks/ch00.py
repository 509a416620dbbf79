"""The blanks in the text of chapter 00."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "intensity in bfloat16": Blank(
        "A weight in half precision has two bytes. FLOPs for each byte, one token at a time:", 2 / 2, "FLOP/byte"
    ),
    "ceiling of one stream": Blank(
        "A billion float32 weights, read at 20 GB/s. Tokens a second, at most, for one request:",
        20e9 / (1e9 * 4),
        "tokens/s",
    ),
}
