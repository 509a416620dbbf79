"""The blanks in the text of chapter 10."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "warps": Blank("Warps that keep the scheduler busy in every cycle:", (10 + 90) / 10, "warps", 1e-9),
    "masked lanes": Blank("Lanes masked in the last program:", -1000 % 128, "lanes", 1e-9),
    "bytes to move": Blank("Bytes that the fused kernel has to move:", 4 * 32 * 4096 * 2 + 4096 * 2, "bytes"),
}
