"""The picture of chapter 00: what an inference engine does in each step. Built in chapter 00."""

from __future__ import annotations

from matplotlib.patches import FancyBboxPatch

from minillm.book.sketch import arrow, box, path, sheet
from minillm.book.style import Picture, colour, picture


def engine_loop() -> Picture:
    """Requests, the loop of the engine, and the text that streams back."""
    fig, ax = sheet(6.4, 3.3, 10, 5.2)
    ax.add_patch(FancyBboxPatch((2.35, 0.95), 7.5, 4.1, boxstyle="round,pad=0,rounding_size=0.2", linewidth=1,
                                facecolor=colour("paper"), edgecolor=colour("limit"), linestyle="--"))  # fmt: skip
    ax.text(2.55, 4.72, "inference engine", fontsize=10, fontweight="bold", va="center")
    for i in range(3):
        box(ax, 0.95, 3.75 - 0.8 * i, 1.7, 0.6, f"request {i + 1}")
        arrow(ax, (1.8, 3.75 - 0.8 * i), (2.75, 2.95))
    box(ax, 3.7, 2.95, 1.8, 0.9, "scheduler:\npick requests", "sky", 9)
    box(ax, 6.25, 2.95, 1.5, 0.9, "model", "ours", 10.5)
    box(ax, 8.75, 2.95, 1.8, 0.9, "sampler:\nchoose a token", "sky", 9)
    box(ax, 6.25, 4.5, 2.3, 0.55, "weights (a file)", "other")
    arrow(ax, (6.25, 4.2), (6.25, 3.45))
    ax.text(6.42, 3.84, "read in every step", fontsize=9, va="center")
    arrow(ax, (4.65, 2.95), (5.45, 2.95))
    arrow(ax, (7.05, 2.95), (7.8, 2.95))
    ax.text(7.4, 3.28, "scores", fontsize=9, ha="center")
    ax.text(5.05, 3.28, "tokens", fontsize=9, ha="center")
    path(ax, [(8.75, 2.45), (8.75, 1.6), (3.7, 1.6), (3.7, 2.45)])
    ax.text(6.25, 1.28, "one new token for each request, again and again", fontsize=9, ha="center", va="center")
    path(ax, [(3.7, 1.6), (0.95, 1.6), (0.95, 0.85)])
    ax.text(0.15, 0.45, "text, streamed to the user token by token", fontsize=9.5, va="center")
    return picture(
        fig,
        "An inference engine as a loop. Requests enter a scheduler; the model, which reads its weights from a file "
        "in every step, turns their tokens into scores; a sampler chooses one new token for each request; the token "
        "goes back to the scheduler and is streamed to the user.",
    )
