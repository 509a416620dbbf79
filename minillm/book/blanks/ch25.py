"""The blanks in the text of chapter 25."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "preempted": Blank(
        "Tokens to compute again after a preemption at 1,200 prompt and 34 output tokens:", 1234, "tokens"
    ),
    "image tokens": Blank("Tokens of the prompt that an image of 448 × 896 pixels takes:", 512, "tokens", 1e-9),
}
