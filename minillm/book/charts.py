"""Charts that several chapters draw: next-token bars, the roofline. Built in chapter 00."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from minillm.book.style import colour


def token_bars(
    ax,
    tokens: Sequence[str],
    probabilities: Sequence[float],
    *,
    kept: Sequence[bool] | None = None,
    chosen: int | None = None,
    title: str | None = None,
    limit: float | None = None,
) -> None:
    """Horizontal bars of next-token probabilities, first token on top.

    tokens, probabilities: equally long, in the order to draw; probabilities in [0, 1].
    kept:   which tokens a filter leaves in; the others turn pale.
    chosen: index of the token that was drawn, in the accent colour.
    limit:  right end of the axis, so that two panels compare; default is the largest bar.
    """
    if len(tokens) != len(probabilities):
        raise ValueError(f"{len(tokens)} tokens but {len(probabilities)} probabilities")
    kept = [True] * len(tokens) if kept is None else kept
    shades = [colour("ours") if keep else colour("background") for keep in kept]
    if chosen is not None:
        shades[chosen] = colour("other")
    rows = range(len(tokens))
    ax.barh(rows, [float(p) for p in probabilities], color=shades, height=0.72)
    right = limit or max(float(p) for p in probabilities) or 1.0
    for row, (probability, keep) in enumerate(zip(probabilities, kept, strict=True)):
        ax.text(
            float(probability) + right * 0.015,
            row,
            f"{float(probability):.3f}",
            va="center",
            fontsize=8.5,
            color=colour("text" if keep else "limit"),
        )
    ax.set(xlim=(0, right * 1.16), ylim=(len(tokens) - 0.4, -0.6), xlabel="probability")
    ax.set_yticks(list(rows), [visible(token) for token in tokens], family="monospace")
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    if title:
        ax.set_title(title)


def visible(token: str) -> str:
    """A token's text with its spaces and line breaks made visible."""
    return token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥").replace("$", r"\$") or "∅"


def roofline(
    ax,
    bandwidth: float,
    peak: float,
    *,
    points: Mapping[str, tuple[float, float]] | None = None,
    intensities: tuple[float, float] | None = None,
    label: str = "this machine",
) -> None:
    """The roofline: the rate that memory and arithmetic allow, against arithmetic intensity.

    bandwidth: bytes/s; peak: FLOP/s; points: name -> (FLOP/byte, FLOP/s), each drawn as a dot;
    intensities: range of the horizontal axis in FLOP/byte.
    Source: Williams, Waterman, Patterson, "Roofline" (2009).
    """
    if bandwidth <= 0 or peak <= 0:
        raise ValueError(f"bandwidth={bandwidth}, peak={peak}: both must be positive (bytes/s and FLOP/s)")
    ridge = peak / bandwidth
    points = points or {}
    seen = [x for x, _ in points.values()]
    low, high = intensities or (min([ridge / 64, *seen]) / 1.5, max([ridge * 16, *seen]) * 1.5)
    roof = [(x, min(peak, x * bandwidth)) for x in (low, ridge, high)]
    ax.plot(*zip(*roof, strict=True), color=colour("limit"), zorder=2)
    ax.fill_between(
        *zip(*roof, strict=True), y2=min(y for _, y in roof) / 10, color=colour("background"), alpha=0.45, zorder=1
    )
    ax.axvline(ridge, color=colour("limit"), linewidth=0.8, linestyle=(0, (2, 3)))
    ax.set(xscale="log", yscale="log", xlim=(low, high), xlabel="arithmetic intensity (FLOP/byte)", ylabel="FLOP/s")
    ax.set_ylim(min([roof[0][1], *(y for _, y in points.values())]) / 2, peak * 2.6)
    ax.annotate(
        f"{label}: {engineering(peak)}FLOP/s",
        (high, peak),
        (-4, 5),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        color=colour("text"),
    )
    ax.annotate(
        f"{engineering(bandwidth)}B/s",
        (math.sqrt(low * ridge), math.sqrt(low * ridge) * bandwidth),
        (-6, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        color=colour("text"),
    )
    ax.annotate(
        f"ridge {ridge:.3g} FLOP/byte",
        (ridge, ax.get_ylim()[0]),
        (4, 5),
        textcoords="offset points",
        fontsize=8.5,
        color=colour("text"),
    )
    for name, (x, y) in points.items():
        ax.plot(x, y, "o", color=colour("ours"), zorder=3)
        ax.annotate(name, (x, y), (6, -11), textcoords="offset points", fontsize=8.5)


def engineering(value: float) -> str:
    """12_300_000_000 -> "12.3 G", to stand before a unit."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "
