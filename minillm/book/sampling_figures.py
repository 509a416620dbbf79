"""The pictures of chapter 01: one turn of the loop, and what the sampling parameters cost. Built in chapter 01."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle

from minillm.book.charts import token_bars
from minillm.book.sketch import arrow, box, path, sheet
from minillm.book.style import Picture, canvas, colour, picture


def one_turn() -> Picture:
    """From token ids to scores, from scores to probabilities, and one choice that is appended."""
    fig, ax = sheet(6.4, 3.0, 10, 4.7)
    for i, token in enumerate(("Once", "upon", "a")):
        box(ax, 0.75 + 1.2 * i, 3.9, 1.1, 0.6, token)
    box(ax, 4.35, 3.9, 1.1, 0.6, "time", "other")
    box(ax, 0.95 + 1, 2.2, 1.7, 0.9, "model", "ours", 11)
    arrow(ax, (1.95, 3.55), (1.95, 2.7))
    ax.text(2.1, 3.12, "token ids", fontsize=9, va="center")
    _bars(ax, 3.55, 1.75, (0.25, 0.95, 0.4, 0.6), "limit")
    arrow(ax, (2.85, 2.2), (3.4, 2.2))
    ax.text(4.2, 1.5, "logits:\none score\nper token", fontsize=9, ha="center", va="top")
    _bars(ax, 6.35, 1.75, (0.03, 1.15, 0.0, 0.2), "ours")
    arrow(ax, (5.0, 2.2), (6.2, 2.2))
    ax.text(5.2, 2.35, "temperature,\nfilters,\nsoftmax", fontsize=9)
    ax.text(7.0, 1.5, "probabilities", fontsize=9, ha="center", va="top")
    box(ax, 8.95, 2.2, 1.4, 0.8, "choose\none", "sky", 10)
    arrow(ax, (7.75, 2.2), (8.2, 2.2))
    path(ax, [(8.95, 2.65), (8.95, 3.9), (5.0, 3.9)])
    ax.text(6.9, 4.1, "append it, and go round again", fontsize=9, ha="center")
    ax.text(5.6, 0.25, "the model ends here; the sampler begins", fontsize=9, ha="center", color=colour("limit"))
    ax.plot([5.08, 5.08], [0.55, 3.5], color=colour("limit"), lw=1, ls=(0, (3, 3)))
    return picture(
        fig,
        "One turn of the loop: the token ids of 'Once upon a' enter the model, which returns logits, one score per "
        "token; temperature, filters and a softmax make probabilities of them; one token, 'time', is chosen and "
        "appended, and the loop goes round again. The model ends at the logits, where the sampler begins.",
    )


def _bars(ax, left: float, bottom: float, heights: Sequence[float], role: str) -> None:
    for i, height in enumerate(heights):
        ax.add_patch(Rectangle((left + 0.33 * i, bottom), 0.25, height, facecolor=colour(role)))
    ax.plot([left - 0.05, left + 1.3], [bottom, bottom], color=colour("text"), lw=0.8)


def bars_and_text(temperature: float, tokens: Sequence[str], probabilities, text: str) -> Picture:
    """The most likely next tokens at a temperature, beside a text that was drawn there."""
    fig, (bars, page) = canvas(width=9, cols=2, width_ratios=[1, 1.3])
    token_bars(bars, tokens, probabilities, title=f"T = {temperature:.1f}", limit=1.0)
    page.text(0, 1, textwrap.fill(text, 46), va="top", fontsize=10.5, linespacing=1.6)
    page.axis("off")
    return picture(fig, f"At temperature {temperature:.1f}: the ten best next tokens, and a text drawn there: {text}")


def kept_tokens(kept: Mapping[str, Sequence[int]], places: Sequence[str]) -> Picture:
    """How many tokens each rule keeps at each place. `kept`: rule -> a count for each place."""
    fig, ax = canvas(width=7, height=3.2)
    for i, (rule, counts) in enumerate(kept.items()):
        ax.bar_label(ax.bar([x + 0.27 * (i - 1) for x in range(len(places))], counts, 0.25, label=rule))
    ax.set_xticks(range(len(places)), places)
    ax.set(ylabel="tokens kept", title="Top-k keeps the same number whether the model is sure or not")
    ax.legend(loc="upper left")
    told = "; ".join(f"{rule} keeps {' and '.join(map(str, counts))}" for rule, counts in kept.items())
    return picture(fig, f"Tokens kept where the model is sure and where it is not: {told}.")


def against_temperature(
    grid: Mapping[tuple[float, float], Mapping[str, float]], real: Mapping[str, float], prediction=None
) -> Picture:
    """A panel for each property of generated text, a line for each top-p. `grid`: (temperature, top_p) -> properties.

    real: the same properties of text that the model has never read.
    """
    fig, axes = canvas(width=10, height=3.5, cols=len(real))
    temperatures, top_ps = (sorted({key[place] for key in grid}) for place in (0, 1))
    for ax, name in zip(axes, real, strict=True):
        for p, marker in zip(top_ps, ("o", "s", "^"), strict=False):
            values = [grid[T, p][name] for T in temperatures]
            ax.plot(temperatures, values, marker=marker, label=f"top_p = {p:g}")
        ax.axhline(real[name], color=colour("text"), ls="--", lw=1, label="held-out stories")
        ax.set(xlabel="temperature", title=name)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(top_ps) + 1)
    told = "; ".join(f"{name} of held-out stories {value:.2f}" for name, value in real.items())
    return picture(
        fig, f"Properties of generated text against temperature, a line for each top-p. Dashed lines: {told}."
    )
