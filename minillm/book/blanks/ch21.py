"""The blanks in the text of chapter 21."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "mixtral": Blank("GB of the experts of one layer of Mixtral, in bf16:", 2.82, "GB"),
    "touched": Blank("Experts of 128, 8 for each token, that a step with 16 tokens reads:", 82.4, "experts"),
    "dispatch": Blank("Bytes of a token's dispatch and combine in one layer of DeepSeek-V3:", 172_032, "bytes"),
}
