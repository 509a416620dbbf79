"""The blanks in the text of chapter 04."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "forty rows": Blank(
        "The arithmetic intensity of a step that decodes 40 rows with 8-bit weights, caches left out:",
        2 * 40 / 1,
        "FLOP/byte",
    ),
    "ridge in rows": Blank(
        "A GPU with 400 TFLOP/s and 2 TB/s, 2-byte weights. The batch at its ridge point:",
        400e12 / 2e12 * 2 / 2,
        "rows",
    ),
    "four KV heads": Blank(
        "48 query heads and 4 KV heads. The intensity of attention in a decode step, 16 bits:",
        4 * 48 / (2 * 4 * 2),
        "FLOP/byte",
    ),
}
