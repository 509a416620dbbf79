"""The blanks in the text of chapter 07."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "the same prompt again": Blank(
        "The same prompt of 96 tokens for the second time, blocks of 16. Tokens found in the cache:",
        (96 - 1) // 16 * 16,
        "tokens",
        1e-9,
    ),
    "chats under way": Blank("Blocks of 16 that hold ten whole chats:", 10 * 6 * 70 / 16, "blocks", 0.02),
    "prompts of a loop": Blank(
        "Prompt tokens that a loop of 20 turns sends in all:", 20 * 4000 + 600 * 20 * 19 // 2, "tokens", 1e-9
    ),
}
