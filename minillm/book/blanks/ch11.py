"""The blanks in the text of chapter 11."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "tile intensity": Blank(
        "FLOP per byte loaded of a tile of 128 x 256, in 16 bits:", 128 * 256 / (128 + 256), "FLOP/byte", 0.02
    ),
    "buffers": Blank("The least number of buffers with which the products never pause:", (6 + 2) / 2, "buffers", 1e-9),
    "programs by registers": Blank(
        "Programs of 4 warps with 96 registers a thread, by the registers of an SM of an A100:",
        65536 // (4 * 32 * 96),
        "programs",
        1e-9,
    ),
}
