"""The blanks in the text of chapter 04."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "forty rows": Blank(
        "The arithmetic intensity of a step that decodes 40 rows with 16-bit weights, caches left out:",
        2 * 40 / 2,
        "FLOP/byte",
    ),
    "ridge in rows": Blank(
        "A GPU with 400 TFLOP/s and 2 TB/s, 2-byte weights. The batch at its ridge point:",
        400e12 / 2e12 * 2 / 2,
        "rows",
    ),
    "seventy billion": Blank(
        "Llama-3.1-70B has 64 query heads and 8 KV heads. The intensity of its attention in a decode step, 16 bits:",
        4 * 64 / (2 * 8 * 2),
        "FLOP/byte",
    ),
}
