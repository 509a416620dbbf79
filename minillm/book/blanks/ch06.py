"""The blanks in the text of chapter 06."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

NUM_SLOTS = 12 * 2**30 // 819_200  # KV slots of OPT-13B in 12 GiB

BLANKS = {
    "pieces that fit": Blank(
        "Requests that fit at a time if each reserves the limit:", NUM_SLOTS // 2048, "requests", 1e-9
    ),
    "slot of a position": Blank(
        "Blocks of 16 tokens, the table [5, 2, 9]. The KV slot of position 37:", 9 * 16 + 37 % 16, "", 1e-9
    ),
    "ends of blocks": Blank(
        "Blocks of 16, 32 requests at a time. Share of the memory in the unfilled ends of their last blocks:",
        100 * 32 * (16 - 1) / 2 / NUM_SLOTS,
        "%",
        0.03,
    ),
}
