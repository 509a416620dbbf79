"""The blanks in the text of chapter 16."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "smoothing scale": Blank(
        "The scale of an input that reaches 64, whose column reaches 0.25, at α = 0.5:", 64**0.5 / 0.25**0.5
    ),
    "second weight": Blank("Where the second weight stands before its turn:", 0.3 + 0.8 * 0.4, "", 0.02),
    "rotated outlier": Blank("What each of the 256 channels holds after the rotation:", 480 / 256**0.5),
}
