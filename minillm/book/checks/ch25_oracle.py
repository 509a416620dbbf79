"""The reference of chapter 25's encoder budget: token by token, and slow. Built in chapter 25."""

from __future__ import annotations

from collections.abc import Sequence

Image = tuple[str, int, int]  # hash of the content, first token in the prompt, number of tokens


def encoder_plan(
    images: Sequence[Image], start: int, count: int, cached: frozenset[str], budget: int
) -> tuple[int, list[str]]:
    """Walk over the tokens of the chunk, and stop at the first one whose embedding cannot be had."""
    encoded: list[str] = []
    for token in range(start, start + count):
        for content, first, length in images:
            if first <= token < first + length and content not in cached and content not in encoded:
                if length > budget:
                    return max(0, max(token, start) - start), encoded
                budget -= length
                encoded.append(content)
    return count, encoded
