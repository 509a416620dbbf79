"""The blanks in the text of chapter 01."""

from __future__ import annotations

import math

from minillm.book.blanks.asked import Blank

BLANKS = {
    "ratio at half the temperature": Blank(
        "Logits 2 and 0, temperature 0.5. How many times as likely is the first token as the second?",
        math.exp((2 - 0) / 0.5),
        "×",
    ),
    "tokens in the nucleus": Blank("Probabilities 0.5, 0.3, 0.15, 0.05 and top_p = 0.7. Tokens kept:", 2, "tokens"),
    "perplexity by hand": Blank(
        "Three tokens in a row had probability 0.5, 0.25 and 0.125. The perplexity:", (0.5 * 0.25 * 0.125) ** (-1 / 3)
    ),
}
