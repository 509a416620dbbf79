"""The pictures of chapter 03: a step with a cache, positions computed again, bytes. Built in chapter 03."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from minillm.book.style import Picture, canvas, colour, picture

_AGAIN, _COMPUTED, _CACHED = "computed again", "computed", "read from the cache"
_SHADES = {_AGAIN: colour("wasted"), _COMPUTED: colour("ours"), _CACHED: "#D6E6F2", "": "#FFF"}
_FADED = 0.45  # how much of the red is left once its step is over


class Growth(NamedTuple):
    """How a count grows with the tokens: the counts, the formula at the same tokens, and its leading term in words."""

    counts: Sequence[int]
    formula: Sequence[float]
    term: str


class Kept(NamedTuple):
    """What a model keeps of a request: bytes for each token, and the bytes of its weights."""

    per_token: int
    weights: int
    window: int | None = None


def append_and_attend() -> Picture:
    """One step with a cache: the new key and value are appended, the new query attends to all of them."""
    fig, ax = canvas(width=5.6, height=2.9)
    ax.set(xlim=(0, 11.2), ylim=(0, 5.8))
    ax.axis("off")
    for i, name in enumerate(("Once", "upon", "a", "time")):
        for row, kind in enumerate("vk"):
            _box(ax, 1.35 + 1.75 * i, 0.65 + 0.85 * row, 1.55, 0.7, f"{kind} {name}", "sky", 0.3)
    for row, kind in enumerate("vk"):
        _box(ax, 8.75, 0.65 + 0.85 * row, 1.7, 0.7, f"{kind} there", "ours", 0.75)
    _box(ax, 8.75, 4.1, 1.7, 0.7, "q there", "ours", 0.75)
    for i in range(5):
        _arrow(ax, (9.6, 4.0), (2.15 + 1.75 * i if i < 4 else 9.6, 2.35))
    ax.text(0.05, 1.45, "cache", va="center", fontsize=10)
    ax.text(4.75, 0.15, "kept from earlier steps", ha="center", fontsize=9.5)
    ax.text(9.6, 0.15, "appended", ha="center", fontsize=9.5, fontweight="bold")
    ax.text(8.6, 4.45, "the one new query attends to every key", ha="right", va="center", fontsize=9.5)
    ax.text(
        8.6, 5.25, "past queries are not needed again", ha="right", va="center", fontsize=9.5, color=colour("limit")
    )
    return picture(
        fig,
        "One step with a cache. The keys and values of Once, upon, a and time are kept from earlier steps. The key and "
        "the value of the new token, there, are appended, and its query attends to every key. Past queries are not "
        "needed again.",
    )


def grid(runs: Mapping[str, Sequence[Sequence[int]]], words: Sequence[str], step: int, flash: float = 1.0) -> Picture:
    """Steps against positions up to `step`: what was computed, computed again, or read from the cache.

    runs: name -> for each step, the positions that went through the layers. flash: how strong the red of `step` is.
    """
    fig, axes = canvas(width=10, height=3.9, cols=len(runs), sharey=True)
    steps, told = max(map(len, runs.values())), []
    for ax, (name, passes) in zip(axes, runs.items()):
        rows, image = _what_happened(passes, len(words))[:step], np.ones((steps, len(words), 3))
        for y, row in enumerate(rows):
            ink = np.where(np.array(row) == _AGAIN, flash if y == step - 1 else _FADED, 1.0)[:, None]
            image[y] = 1 - ink * (1 - np.array([to_rgb(_SHADES[what]) for what in row]))
        again, new = (sum(row.count(what) for row in rows) for what in (_AGAIN, _COMPUTED))
        told.append(f"{name.lower()} {new + again} positions computed, {again} of them again")
        ax.imshow(image, aspect="auto")
        ax.grid(visible=False)
        ax.hlines(np.arange(-0.5, steps), -0.5, len(words) - 0.5, color="white", lw=1.5)
        ax.vlines(np.arange(-0.5, len(words)), -0.5, steps - 0.5, color="white", lw=1.5)
        ax.set(title=f"{name}: {new + again} positions, {again} again", ylabel="step" if ax is axes[0] else "")
        ax.set_xticks(range(len(words)), words, rotation=90, family="monospace", fontsize=8)
        ax.set_yticks(range(steps), range(1, steps + 1))
    patches = [Patch(color=_SHADES[what], label=what) for what in _SHADES if what]
    fig.legend(handles=patches, loc="outside lower center", ncols=3)
    return picture(fig, f"Steps against positions of the text, after step {step}: {'; '.join(told)}.")


def film(
    runs: Mapping[str, Sequence[Sequence[int]]], words: Sequence[str], size: tuple[int, int] = (900, 351)
) -> Picture:
    """`grid` as an animated PNG, a step at a time; where nothing moves, the last picture is shown."""
    from PIL import Image

    steps = max(map(len, runs.values()))
    drawn = [grid(runs, words, step, flash) for step in range(1, steps + 1) for flash in (1.0, _FADED)]
    inks = [to_rgb(shade) for shade in _SHADES.values()] + [(grey, grey, grey) for grey in np.linspace(0.1, 1, 10)]
    inks.append(tuple(1 - _FADED * (1 - x) for x in inks[0]))
    palette = Image.new("P", (1, 1))
    palette.putpalette([round(255 * x) for ink in inks for x in ink])
    opened = [Image.open(io.BytesIO(one.png)).convert("RGB").resize(size) for one in drawn]
    frames, buffer = [image.quantize(palette=palette, dither=0) for image in opened], io.BytesIO()
    durations = [550, 250] * (steps - 1) + [550, 3000]
    frames[-2].save(buffer, "PNG", save_all=True, append_images=frames, default_image=True, duration=durations)
    alt = (
        "The same grid as a film, a step at a time: without a cache a growing row of positions computed again flashes "
        "red in every step, with a cache one new blue cell appears."
    )
    return Picture(buffer.getvalue(), alt, size[0])


def growth(panels: Mapping[str, Mapping[str, Growth]]) -> Picture:
    """Counts over their formulas. panels: what is counted -> run -> growth, the worse run first."""
    fig, axes = canvas(width=9.6, height=3.4, cols=len(panels))
    axes, told = np.atleast_1d(axes), []
    for ax, (name, runs) in zip(axes, panels.items()):
        for (label, grown), role in zip(runs.items(), ("wasted", "ours")):
            tokens = np.arange(1, len(grown.counts) + 1)
            dashed = "formula" if role == "ours" else None
            ax.plot(tokens, grown.formula, color=colour("prediction"), lw=1, ls="--", label=dashed)
            ax.plot(tokens[::8], grown.counts[::8], "o", ms=4, color=colour(role), label=label)
            ax.annotate(grown.term, (tokens[-1], grown.counts[-1]), (4, -3), textcoords="offset points")
            told.append(f"{name} {label} {grown.counts[-1]:,}")
        ax.set(xscale="log", yscale="log", xlabel="tokens generated", ylabel=f"{name}, in all", title=name.capitalize())
        ax.set_xlim(right=1.9 * tokens[-1])
        ax.set_xticks([1, 10, 100], [1, 10, 100])
    axes[0].legend()
    return picture(fig, f"Counts against tokens, each on its formula. After {tokens[-1]} tokens: {', '.join(told)}.")


def kept_in_memory(models: Mapping[str, Kept], limit: float, limit_name: str) -> Picture:
    """The cache of one request against its length, for each model. limit: bytes."""
    fig, ax = canvas(width=8.4, height=4)
    lengths, told = np.geomspace(256, 131072, 100), []
    for (name, model), role in zip(models.items(), ("wasted", "other", "ours", "good")):
        size = lengths * model.per_token / 1e9
        ax.plot(lengths, size, color=colour(role))
        ax.text(lengths[-1] * 1.07, size[-1], name, va="center", color=colour(role))
        if model.weights / model.per_token < lengths[-1]:
            ax.plot(model.weights / model.per_token, model.weights / 1e9, "o", ms=8, color=colour(role))
            told.append(f"{name} {model.weights // model.per_token:,}")
        if model.window:
            windowed = np.minimum(lengths, model.window) * model.per_token / 1e9
            ax.plot(lengths, windowed, "--", color=colour(role))
            label = f"{name},\nwindow {model.window:,}"
            ax.text(lengths[-1] * 1.07, windowed[-1], label, va="center", color=colour(role))
    ax.plot([lengths[0], lengths[-1]], [limit / 1e9] * 2, color=colour("limit"), lw=1)
    ax.text(270, 1.12 * limit / 1e9, limit_name, color=colour("text"), fontsize=9)
    ax.set(xscale="log", yscale="log", xlabel="tokens in one request", ylabel="KV cache (GB, 16 bits)",
           xlim=(230, 620_000), title="What one request keeps in memory (dot: as much as the weights)")  # fmt: skip
    ax.set_xticks([1e3, 1e4, 1e5], ["1,000", "10,000", "100,000"])
    return picture(
        fig,
        f"Size of one request's KV cache against its length, 16 bits, under a line: {limit_name}. The cache is as "
        f"large as the weights at this many tokens: {', '.join(told)}. A sliding window stops the growth.",
    )


def _what_happened(passes: Sequence[Sequence[int]], width: int) -> list[list[str]]:
    """For each step and each position: what was done to it, or ""."""
    seen: set[int] = set()
    rows = []
    for positions in passes:
        row = {p: _AGAIN if p in seen else _COMPUTED for p in positions}
        rows.append([row.get(p, _CACHED if p in seen else "") for p in range(width)])
        seen |= set(positions)
    return rows


def _box(ax, x: float, y: float, width: float, height: float, name: str, role: str, alpha: float) -> None:
    style = {"boxstyle": "round,pad=0,rounding_size=0.1", "facecolor": colour(role), "alpha": alpha}
    ax.add_patch(FancyBboxPatch((x, y), width, height, edgecolor=colour("text"), linewidth=1, **style))
    ink = "white" if alpha > 0.5 else colour("text")
    ax.text(x + width / 2, y + height / 2, name, ha="center", va="center", fontsize=9.5, color=ink)


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=colour("ours"), linewidth=1))
