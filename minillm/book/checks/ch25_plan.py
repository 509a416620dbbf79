"""The check of chapter 25's encoder budget, whose reference goes token by token. Built in chapter 25."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minillm.book.checks import Draw, FunctionChecker

Image = tuple[str, int, int]  # hash of the content, first token in the prompt, number of tokens


def encoder_plan(
    images: Sequence[Image],
    start: int,
    count: int,
    cached: frozenset[str],
    budget: int,
    *,
    skips: bool = False,
    forgets: bool = False,
    each: bool = False,
) -> tuple[int, list[str]]:
    """Walk over the tokens of the chunk, and stop at the first one whose embedding cannot be had.
    The keywords are mistakes."""
    encoded: list[str] = []
    for token in range(start, start + count):
        for content, first, length in images:
            known = content in cached or (content in encoded and (not forgets or token != first))
            if not first <= token < first + length or known:
                continue
            if length > budget:
                if skips:
                    continue
                return token - start, encoded
            budget -= 0 if each else length
            encoded.append(content)
    return count, encoded


def _facts(got: Any, expected: Any, images: list[Image], start: int, count: int, cached: Any, budget: int) -> str:
    known = ", ".join(sorted(cached)) or "none"
    return f"The chunk is [{start}, {start + count}), the budget {budget}, cached: {known}."


def _random(draw: Draw) -> tuple:
    images, place = [], draw.randint(0, 6)
    for _ in range(draw.randint(0, 6)):
        length = draw.randint(1, 12)
        images.append((draw.rng.choice("abcdef"), place, length))
        place += length + draw.randint(0, 6)
    cached = frozenset(name for name in "abcdef" if draw.rng.random() < 0.25)
    return images, draw.randint(0, place + 2), draw.randint(0, 40), cached, draw.randint(0, 40)


_NONE: frozenset[str] = frozenset()
_ONE, _TWO = [("a", 10, 20)], [("a", 0, 8), ("b", 16, 8)]
check_encoder_plan = FunctionChecker(
    "encoder_plan",
    encoder_plan,
    returns=("the number of tokens", "the list of images to encode"),
    examples={
        "the image lies in the chunk, and the budget is large enough": (_ONE, 0, 64, _NONE, 100),
        "its embeddings are cached: nothing to encode": (_ONE, 0, 64, frozenset("a"), 0),
        "the budget is one token too small: the chunk ends before the image": (_ONE, 0, 64, _NONE, 19),
    },
    edges={
        "two images, and the budget is spent to the last token": (_TWO, 0, 32, _NONE, 16),
        "the second image does not fit any more": (_TWO, 0, 32, _NONE, 15),
        "not even the first one fits, and it stands at the very beginning": (_TWO, 0, 32, _NONE, 7),
        "the first is cached": (_TWO, 0, 32, frozenset("a"), 8),
        "the same image twice: it is encoded once": ([("a", 0, 8), ("a", 16, 8)], 0, 32, _NONE, 8),
        "the chunk lies between the images": (_TWO, 8, 8, _NONE, 8),
        "the chunk begins inside an image whose embeddings are gone": (_TWO, 4, 4, _NONE, 8),
        "the same, and the budget is too small: no token can be processed": (_TWO, 4, 4, _NONE, 7),
        "the last token of the chunk is the first of the image": (_TWO, 12, 5, _NONE, 8),
        "the chunk ends just before the image": (_TWO, 12, 4, _NONE, 0),
        "both images lie before the chunk": (_TWO, 24, 8, _NONE, 0),
        "b does not fit; c would, but lies behind it": (
            [("a", 0, 8), ("b", 8, 8), ("c", 16, 8)],
            0,
            24,
            _NONE,
            12,
        ),
        "a does not fit; b would, but lies behind it": ([("a", 0, 8), ("b", 8, 4)], 0, 12, _NONE, 4),
        "no image at all": ([], 5, 9, _NONE, 0),
        "an empty chunk": ([("a", 3, 4)], 0, 0, _NONE, 9),
    },
    random=_random,
    trials=200,
    explain=_facts,
    hint="An image is encoded as a whole or not at all; the chunk may end just before it.",
    misconceptions={
        "The chunk ends before an image that does not fit; what lies behind it comes later.": dict(skips=True),
        "An image that is encoded already costs nothing the second time.": dict(forgets=True),
        "All images of a chunk share one budget.": dict(each=True),
    },
)
