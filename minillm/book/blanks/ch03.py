"""The blanks in the text of chapter 03."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "hundred tokens": Blank(
        "100 tokens generated without a cache, from one token. The positions sent through the layers:",
        100 * 101 // 2,
        "positions",
    ),
    "opt": Blank(
        "OPT-13B: 40 layers, 40 KV heads of size 128, 16 bits. The cache of one token:", 2 * 40 * 40 * 128 * 2, "bytes"
    ),
    "time of a request": Blank(
        "TTFT 200 ms, TPOT 20 ms, 101 output tokens. The time of the whole request:", 200 + (101 - 1) * 20, "ms", 1e-3
    ),
}
