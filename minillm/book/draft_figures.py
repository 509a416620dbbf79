"""The drawings of chapter 18: draft, verify, accept; what a draft head reads. Built in chapter 18."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minillm.book.style import COLOURS, Picture, canvas, colour, picture

TEXT = ("Mira", ".")
DRAFT = ("She", "had", "a", "cat")
OWN = ("She", "had", "a", "red", "")


def draft_verify_accept() -> Picture:
    """One step: four draft tokens, one pass of the target over all of them, three accepted and one replaced."""
    fig, ax = canvas(width=7.0, height=4.0)
    ax.set(xlim=(-0.2, 7.3), ylim=(-0.6, 4.7))
    ax.axis("off")
    for place, word in enumerate((*TEXT, *DRAFT)):
        _box(ax, 1.05 * place, 3.4, word, "pale" if place < len(TEXT) else "sky", width=0.95, size=12)
    ax.text(-0.1, 4.25, "1  draft", fontsize=12, weight="bold")
    ax.text(2.1, 4.25, "four small passes, one after another", fontsize=12, color=colour("limit"))
    ax.add_patch(
        FancyBboxPatch((1.05, 1.8), 5.15, 0.65, boxstyle="round,pad=0.02", facecolor=COLOURS["orange"], alpha=0.55)
    )
    ax.text(-0.1, 2.6, "2  verify", fontsize=12, weight="bold")
    ax.text(3.65, 2.12, "one pass of the target, five tokens", ha="center", va="center", fontsize=12)
    ax.text(-0.1, 1.05, "3  accept", fontsize=12, weight="bold")
    told = ("accepted", "accepted", "accepted", "own token", "discarded")
    for place, (word, shade) in enumerate(zip(OWN, ("green", "green", "green", "orange", "pale"))):
        x = 1.05 * (place + 1) + 0.48
        _arrow(ax, (x, 3.35), (x, 2.5))
        _arrow(ax, (x, 1.75), (x + 0.95, 0.65))
        _box(ax, 1.05 * (place + 2), 0.0, word or "…", shade, width=0.95, size=12)
        ax.text(x + 1.05, -0.15, told[place], ha="center", va="top", fontsize=9.5)
    return picture(
        fig,
        "A step in three rows. Draft: after 'Mira.' a draft model proposes four tokens, 'She had a cat', in four "
        "small passes. Verify: the target reads the last token and the four draft tokens in one pass and gives its own "
        "token at each of the five positions. Accept: 'She', 'had' and 'a' agree and are accepted; at the fourth "
        "position the target has 'red', so 'cat' is rejected and 'red' is taken; the fifth is discarded. One pass of "
        "the target generated four tokens.",
    )


def head_map(layers: Sequence[int] = (1, 2, 4)) -> Picture:
    """What a draft head reads: the target's features of the token before, the token itself, then its own output."""
    fig, ax = canvas(width=9.0, height=4.6)
    ax.set(xlim=(-0.3, 12.2), ylim=(-0.6, 5.8))
    ax.axis("off")
    ax.text(0.0, 5.45, "target: one pass, all tokens so far", fontsize=10, weight="bold")
    names = [f"layer {number}" for number in range(1, 5)]
    for place, name in enumerate(names):
        shade = "sky" if place + 1 in layers else "pale"
        _box(ax, 0.0, 1.5 + 0.9 * place, name, shade, width=1.6)
    _box(ax, 0.0, 0.4, "token t₄", "pale", width=1.6)
    _arrow(ax, (0.8, 0.95), (0.8, 1.45))
    for after, told in zip(layers, ("low", "mid", "high")):
        y = 1.77 + 0.9 * (after - 1)
        _arrow(ax, (1.65, y), (2.6, 2.9))
        ax.text(1.75, y + (0.3 if told == "high" else -0.45 if told == "low" else 0.2), told, fontsize=11)
    _box(ax, 2.65, 2.6, "fuse", "sky", width=1.1)
    ax.text(3.9, 3.35, "g₄", fontsize=10)
    _arrow(ax, (3.8, 2.9), (4.75, 2.9))
    ax.text(4.8, 5.45, "draft head: one layer, one token after the other", fontsize=10, weight="bold")
    for place in range(3):
        x = 4.8 + 2.5 * place
        _box(ax, x, 2.6, "head", "orange", width=1.3)
        _box(ax, x, 0.4, ("token t₅", "draft d₆", "draft d₇")[place], "pale", width=1.3)
        _arrow(ax, (x + 0.65, 0.95), (x + 0.65, 2.55))
        _arrow(ax, (x + 0.65, 3.2), (x + 0.65, 4.0))
        _box(ax, x, 4.05, ("d₆", "d₇", "d₈")[place], "green", width=1.3)
        if place:
            ax.text(x - 0.75, 3.1, f"h{'₅₆'[place - 1]}", fontsize=10)
            _arrow(ax, (x - 1.15, 2.9), (x - 0.05, 2.9))
    shared = "embedding and output matrix are\nthe target's, in the head's width"
    ax.text(5.6, 0.1, shared, fontsize=11, color=colour("limit"), va="top")
    return picture(
        fig,
        "Left, the target's pass over the text up to token t4: the hidden states behind layers "
        f"{', '.join(map(str, layers))}, low, mid and high, are fused into one feature g4. Right, the draft head, one "
        "layer: from g4 and token t5 it makes draft token d6 and its own feature h5; from h5 and d6 it makes d7 and "
        "h6; from h6 and d7 it makes d8. Embedding and output matrix are the target's, projected "
        "to the head's width.",
    )


def _box(ax, x: float, y: float, text: str, shade: str, width: float = 1.2, height: float = 0.55,
         size: float = 12) -> None:  # fmt: skip
    style = "round,pad=0.02,rounding_size=0.08"
    ax.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=COLOURS[shade], alpha=0.6, linewidth=0.8,
                       edgecolor=colour("limit"))
    )  # fmt: skip
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=colour("limit"), linewidth=1, shrinkA=0,
                        shrinkB=0)
    )  # fmt: skip
