"""The blanks in the text of chapter 17."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "overtakes at 8": Blank(
        "Tokens of each text at which the cache of eight requests overtakes the weights:",
        8.03e9 * 2 / (8 * 2 * 32 * 8 * 128 * 2),
        "tokens",
    ),
    "half a step": Blank("The largest error of the int4 codes of a vector whose largest number is 21:", 21 / 14),
    "window blocks": Blank(
        "The most blocks that the request with sinks and a window ever owns:",
        1 + (60 + 16 - 2) // 16 + 1,
        "blocks",
        1e-9,
    ),
}
