"""The blanks in the text of chapter 14."""

from __future__ import annotations

from minillm.book.blanks.asked import Blank

BLANKS = {
    "launches": Blank(
        "28 layers of 33 operations, 5 µs of the host for each. The least time of a step, if the device takes none:",
        28 * 33 * 5 / 1000,
        "ms",
    ),
    "padding": Blank("The rows that a step of 37 sequences computes for nothing:", 48 - 37, "rows"),
    "overlap": Blank(
        "The host takes 0.4 ms and the device 1 ms. Scheduling ahead multiplies the number of steps per second by:",
        (0.4 + 1.0) / max(0.4, 1.0),
    ),
}
