"""The blanks in the text of chapter 02."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "attention in tinyworld": Blank(
        "tinyworld has four layers. Numbers in the attention matrices of all of them:",
        4 * (2 * 256 * 256 + 2 * 128 * 256),
        "numbers",
    ),
    "pairs under a causal mask": Blank("A causal mask over 100 tokens. Pairs that it allows:", 100 * 101 / 2, "pairs"),
    "KV bytes of Llama-3-8B": Blank(
        "32 layers, 8 KV heads of 128 numbers, two bytes a number. Bytes that a token leaves:",
        2 * 32 * 8 * 128 * 2,
        "bytes",
    ),
}
