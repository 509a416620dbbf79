"""The blanks in the text of chapter 15."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "three bits": Blank(
        "Bits a weight of 3-bit codes in groups of 32, with zero points:", 3 + 16 / 32 + 3 / 32, "bits"
    ),
    "larger groups": Blank(
        "The bound on W4A16's gain over 16 bits, groups of 128:", 16 / (4 + 16 / 128), "times", 0.005
    ),
    "ridge of int4": Blank(
        "Rows at which int4 in groups of 64 reaches its ridge point on an A100, weights alone:",
        (4.25 / 8) / 2 * 312e12 / 2.039e12,
        "rows",
        0.03,
    ),
}
