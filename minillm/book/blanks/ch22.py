"""The blanks in the text of chapter 22."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "moved bytes": Blank("The keys and values of a prompt of 8,192 tokens of Qwen3-8B:", 1.208, "GB", 0.02),
    "two choices": Blank("Replicas whose load a power-of-two router reads for each request, of 1,000:", 2, "replicas"),
}
