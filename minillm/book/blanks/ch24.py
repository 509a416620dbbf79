"""The blanks in the text of chapter 24."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "office": Blank(
        "120 people, 28 s of reading, answers after 2 s. The rate that they send:", 4.0, "requests a second"
    ),
    "upper bound": Blank("The least number of requests at which P99 has an upper bound:", 368, "requests", 1e-9),
    "api": Blank("What 1,000 chat requests cost at the API:", 0.0512, "dollars"),
}
