"""The drawing of chapter 17: what a layer keeps of a text, and what a step reads of it. Built in chapter 17."""

from __future__ import annotations

from matplotlib.patches import Rectangle

from minillm.book.style import Picture, canvas, colour, picture

TOKENS = 16  # of the text; the last one is the query
WINDOW, FIRST = 6, 2


def what_is_kept() -> Picture:
    """A row for each idea of the chapter: which keys and values are kept (outlined), and read in this step (filled)."""
    rows = (
        ("everything", {}, "grows with the text"),
        ("fewer bits", {"height": 0.26}, "grows ½ or ¼ as fast"),
        ("sinks and a window", {"kept": _ends(FIRST), "read": _ends(FIRST)}, "fixed size, forgets"),
        ("a window, learned sinks", {"kept": _ends(0), "read": _ends(0)}, "fixed size, the sink is a weight"),
        ("sparse reading", {"read": {2, 3, 9, 14, 15}}, "grows, little is read"),
        ("a state", {"kept": set(), "read": set()}, "fixed size, mixes all"),
    )
    fig, ax = canvas(width=7.4, height=3.4)
    ax.set(xlim=(-10.6, 29.0), ylim=(-6.0, 0.9))
    ax.axis("off")
    for place, (name, how, effect) in enumerate(rows):
        _row(ax, -place, **how)
        ax.text(-0.4, 0.3 - place, name, ha="right", va="center", fontsize=11)
        ax.text(TOKENS + 0.6, 0.3 - place, effect, va="center", fontsize=11)
    ax.add_patch(Rectangle((8.7, -2.95), 0.5, 0.5, facecolor=colour("orange")))
    ax.add_patch(Rectangle((0, -4.95), 1.6, 0.5, facecolor=colour("blue")))
    return picture(
        fig,
        "Sixteen tokens of a text, a row for each idea. Everything: all keys and values are kept and read. Fewer bits: "
        "all of them, in lower boxes. Sinks and a window: the first two and the last six. A window and learned sinks: "
        "the last six, and beside them a number that belongs to the weights. Sparse reading: all are kept, five of "
        "them are read. A state: one box of fixed size in place of all.",
    )


def _ends(first: int) -> set[int]:
    return {*range(first), *range(TOKENS - WINDOW, TOKENS)}


def _row(ax, y: float, kept: set[int] | None = None, read: set[int] | None = None, height: float = 0.6) -> None:
    everything = set(range(TOKENS))
    kept, read = everything if kept is None else kept, everything if read is None else read
    for token in kept:
        face = colour("blue") if token in read else "none"
        ax.add_patch(Rectangle((token, y), 0.8, height, facecolor=face, edgecolor=colour("blue"), lw=0.8))
