"""The blanks in the text of chapter 22."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "moved bytes": Blank("The keys and values of a prompt of 8,192 tokens of Qwen3-8B:", 1.208, "GB", 0.02),
    "router cost": Blank(
        "Cost of a replica that caches 3,000 of 4,200 prompt tokens, with a load of 6,000 (w = 0.25):", 2700, "tokens"
    ),
}
