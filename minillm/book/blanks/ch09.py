"""The blanks in the text of chapter 09."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "step price": Blank(
        "A step with 16 decoding rows, each with 1,000 tokens of context, on the A100 price list:",
        1e3 * (2 * 7.24e9 / 2.039e12 + 16 * 2 * 7.24e9 / 312e12 + 16 * 1000 * 131_072 / 2.039e12),
        "ms",
    ),
    "catching up": Blank("Requests of Bob that start before Ann's next one:", -(-3000 // 160), "requests", 1e-9),
    "safe": Blank("Seconds after which the long job cannot be overtaken:", (2000 - 40) / 80, "s"),
}
