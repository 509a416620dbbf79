"""Drawings for images in prompts: the way into a prompt, a cache that fills. Built in chapter 25."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import FancyArrowPatch, Rectangle

from minillm.book.style import Picture, canvas, colour, picture


def image_drawing() -> Picture:
    """Pixels, patches, embeddings, and the prompt that they stand in; below, where each of them is kept."""
    fig, ax = canvas(width=9.2, height=3.3)
    ax.set(xlim=(0, 18.4), ylim=(-1.6, 5.0), aspect="equal")
    ax.axis("off")
    for row in range(4):
        for column in range(4):
            shade = 0.25 + 0.5 * ((row * 3 + column * 5) % 7) / 7
            ax.add_patch(Rectangle((column * 0.9, row * 0.9), 0.84, 0.84, facecolor=colour("sky"), alpha=shade))
    ax.text(1.8, 4.0, "an image\nin patches", ha="center", va="bottom", fontsize=9)
    _arrow(ax, (3.9, 1.8), (5.5, 1.8))
    ax.add_patch(Rectangle((5.6, 0.7), 2.3, 2.2, facecolor=colour("paper"), edgecolor=colour("other"), linewidth=1.4))
    ax.text(6.75, 1.8, "encoder", ha="center", va="center", fontsize=9)
    ax.text(6.75, 4.0, "sees the whole\nimage at once", ha="center", va="bottom", fontsize=9)
    _arrow(ax, (8.0, 1.8), (9.3, 1.8))
    kinds = ["text"] * 3 + ["image"] * 4 + ["text"] * 4
    for place, kind in enumerate(kinds):
        face = colour("other" if kind == "image" else "background")
        box = Rectangle((9.4 + place * 0.8, 1.3), 0.72, 1, facecolor=face, edgecolor=colour("limit"), linewidth=0.6)
        ax.add_patch(box)
    ax.text(
        13.8, 4.0, "a prompt: embeddings stand\nwhere tokens would have stood", ha="center", va="bottom", fontsize=9
    )
    ax.text(10.6, 0.95, "system", ha="center", va="top", fontsize=8, color=colour("limit"))
    ax.text(13.4, 0.95, "image", ha="center", va="top", fontsize=8, color=colour("limit"))
    ax.text(16.6, 0.95, "question", ha="center", va="top", fontsize=8, color=colour("limit"))
    notes = {
        1.8: "hash of the content",
        6.4: "a budget for each step",
        10.2: "encoder cache:\nembeddings by hash",
        15.2: "KV cache: blocks whose hash\nincludes the image's",
    }
    for x, text in notes.items():
        ax.text(x, -0.75, text, ha="center", va="center", fontsize=8, color=colour("ours"))
    alt = """An image is cut into patches; an encoder that sees the whole image turns them into embeddings; these stand
        in the prompt between the system's tokens and the question. The image is known by the hash of its content, the
        encoder has a budget for each step, its output lies in a cache, and the hash is part of the hashes of the KV
        blocks."""
    return picture(fig, alt)


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour("limit"), linewidth=1.2))


def runs_by_size(sizes: Sequence[int], runs: Sequence[int], floor: int, requests: int) -> Picture:
    """Encoder runs against the size of its cache, between one for each request and one for each image."""
    fig, ax = canvas(width=7, height=2.9)
    ax.plot(sizes, runs, "o-", color=colour("ours"), label="encoder runs")
    for level, text in ((requests, "no cache: one for each request"), (floor, "one for each image")):
        ax.axhline(level, color=colour("limit"), linestyle="--", linewidth=1)
        ax.text(sizes[-1], level, text, ha="right", va="bottom", fontsize=8, color=colour("limit"))
    ax.set(xlabel="size of the encoder's cache (images)", ylabel="encoder runs", ylim=(0, requests * 1.12),
           title="What a cache by content saves")  # fmt: skip
    told = ", ".join(f"{run} at {size}" for size, run in zip(sizes, runs))
    alt = f"Encoder runs for {requests} requests against the size of the cache in images: {told}; {floor} at the least."
    return picture(fig, alt)
