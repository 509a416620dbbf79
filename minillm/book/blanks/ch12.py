"""The blanks in the text of chapter 12."""

from __future__ import annotations

import math

from minillm.book.blanks.asked import Blank

BLANKS = {
    "softmax state": Blank(
        "Bytes of the state of 128 queries with a head of 128, in float32:", 128 * (1 + 1 + 128) * 4, "bytes"
    ),
    "one more tile": Blank("The total after a tile whose two scores are both 4:", 1.5 * math.exp(2 - 4) + 2, ""),
    "masked tiles": Blank(
        "Masked tiles of a causal head, 4,096 tokens in tiles of 128 x 32:", 4096 // 128 * (128 // 32), "tiles", 1e-9
    ),
}
