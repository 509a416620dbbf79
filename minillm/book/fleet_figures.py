"""The pictures of chapter 22: a fleet, a stream over two replicas, routers, bytes, goodput. Built in chapter 22."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minillm.book.chips import Html
from minillm.book.style import Picture, canvas, colour, picture


def the_fleet() -> Picture:
    """A router before three replicas, each with a queue and a cache; one request moves, one replica is dead."""
    fig, ax = canvas(width=9.4, height=3.0)
    ax.set(xlim=(0, 14), ylim=(0, 5.1))
    ax.axis("off")
    _box(ax, 0.1, 1.9, 1.6, 1.0, "client", "background")
    _box(ax, 3.0, 1.6, 2.4, 1.6, "router\nloads, blocks", "other")
    _arrow(ax, (1.75, 2.6), (2.95, 2.6), "request")
    _arrow(ax, (2.95, 2.1), (1.75, 2.1), "")
    ax.text(2.35, 1.62, "one stream", ha="center", fontsize=8.5)
    dead = "replica 1 is dead:\nits requests go on\nelsewhere"
    for place, (name, state) in enumerate((("replica 0", "ours"), (dead, "wasted"), ("replica 2", "ours"))):
        y = 3.55 - 1.75 * place
        _box(ax, 8.3, y, 3.0, 1.25, name, state)
        _arrow(ax, (5.5, 2.4), (8.2, y + 0.62), "")
        for slot in range(3 - place):
            _box(ax, 11.5 + 0.55 * slot, y + 0.68, 0.45, 0.45, "", "other")
        for block in range(4):
            filled = (block + place) % 3 != 0
            _box(ax, 11.5 + 0.55 * block, y + 0.08, 0.45, 0.45, "", "sky" if filled else "background")
    ax.text(11.5, 4.98, "queue (orange), cached blocks (light blue)", fontsize=8.5, va="top")
    _arrow(ax, (8.25, 3.9), (8.25, 0.9), "", bend=0.4)
    ax.text(6.7, 0.3, "keys and values move\nfrom replica to replica", ha="center", fontsize=8.5)
    return picture(
        fig,
        "A client sends a request to a router and reads one stream. The router knows the load of each of three "
        "replicas and which blocks they cache. Replica 1 is dead, and its requests go on elsewhere. Keys and "
        "values can "
        "move from replica 0 to replica 2.",
    )


def spoken_by(pieces: Sequence[str], replicas: Sequence[str], killed: Sequence[int] = ()) -> Html:
    """A text with the replica that generated each piece of it as its colour; `killed`: a death before these pieces."""
    names = list(dict.fromkeys(replicas))
    shades = dict(zip(names, ("ours", "other", "good", "prediction", "sky")))
    spans, plain, before = [], [], None
    for place, (piece, name) in enumerate(zip(pieces, replicas, strict=True)):
        if place in killed:
            spans.append(f'<b style="color:{colour("wasted")}"> ✕ </b>')
            plain.append(f" [{before} is killed] ")
        shade = f"background:{colour(shades[name])}33;border-bottom:2px solid {colour(shades[name])}"
        spans.append(f'<span style="{shade}">{html.escape(piece)}</span>')
        plain.append(piece)
        before = name
    legend = " ".join(
        f'<span style="border-bottom:2px solid {colour(shades[name])};margin-right:12px">{html.escape(name)}</span>'
        for name in names
    )
    style = "font:15px/1.9 serif;background:#fff;color:#24292f;padding:8px;max-width:46em"
    body = f'<div style="{style}">{"".join(spans)}<div style="font:12px sans-serif;margin-top:6px">{legend}</div></div>'
    return Html(body, "".join(plain) + f"\n({', '.join(names)})")


def routers(runs: Mapping[str, tuple[float, float, float]]) -> Picture:
    """Hit rate and TTFT of each router. `runs`: name -> (hit rate, P50 of TTFT, P99 of TTFT), seconds."""
    fig, (left, right) = canvas(width=9.4, height=2.6, cols=2, sharey=True)
    names = list(runs)
    hits, medians, tails = (np.array([run[i] for run in runs.values()]) for i in range(3))
    left.barh(names, 100 * hits, color=colour("ours"))
    right.barh(names, tails, color=colour("other"), label="P99")
    right.barh(names, medians, color=colour("ours"), height=0.4, label="P50")
    for place, (hit, tail) in enumerate(zip(hits, tails)):
        left.text(100 * hit + 0.5, place, f"{hit:.0%}", va="center", fontsize=8.5)
        right.text(tail * 1.05, place, f"{tail:.1f} s", va="center", fontsize=8.5)
    left.invert_yaxis()
    left.set(xlabel="prompt tokens found in a prefix cache (%)", title="Hit rate")
    right.set(xlabel="TTFT (s)", title="Time to first token", xscale="log", xlim=(min(medians) / 2, max(tails) * 3))
    right.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncol=2)  # above the bars: there it hides no number
    told = "; ".join(f"{name}: {hit:.0%}, P50 {p50:.2f} s, P99 {p99:.2f} s" for name, (hit, p50, p99) in runs.items())
    return picture(fig, f"Hit rate and time to first token by router. {told}.")


def moved_or_computed(
    tokens: Sequence[int], compute: Sequence[float], links: Mapping[str, Sequence[float]], measured: Mapping[int, tuple]
) -> Picture:
    """Seconds to have the keys and values of a prompt on another replica, over its length.

    compute: computing them again; links: name -> copying them; measured: tokens -> (compute, copy), seconds.
    """
    fig, ax = canvas(width=7.6, height=3.4)
    ax.plot(tokens, compute, color=colour("wasted"), label="compute again")
    for (name, seconds), style in zip(links.items(), ("-", "--", ":")):
        ax.plot(tokens, seconds, style, color=colour("ours"), label=f"copy, {name}")
    for marker, place, name in (("o", 0, "computed, measured"), ("s", 1, "copied, measured")):
        seconds = [pair[place] for pair in measured.values()]
        ax.plot(list(measured), seconds, marker, ms=4, color=colour("text"), label=name)
    ax.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="seconds", title="Move or compute again")
    ax.legend(fontsize=8, ncol=2)
    ratios = {name: compute[-1] / seconds[-1] for name, seconds in links.items()}
    told = "; ".join(f"over {name} copying is {ratio:.2g} times as fast" for name, ratio in ratios.items())
    return picture(fig, f"Time to have a prompt's keys and values elsewhere, at {tokens[-1]:,} tokens: {told}.")


def goodput_map(inputs: Sequence[int], outputs: Sequence[int], ratios: np.ndarray) -> Picture:
    """Goodput apart over goodput together, for each pair of lengths; above 1, prefill and decode apart win."""
    fig, ax = canvas(width=5.6, height=3.3)
    shown = np.log2(np.maximum(ratios, 1e-3))
    limit = max(1.0, float(np.abs(shown).max()))
    image = ax.imshow(shown, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto", origin="lower")
    lightness = image.to_rgba(shown)[..., :3] @ (0.299, 0.587, 0.114)  # of each cell, from 0 to 1
    ax.grid(False)
    for row, line in enumerate(ratios):
        for column, ratio in enumerate(line):
            ink = "white" if lightness[row, column] < 0.5 else colour("text")
            ax.text(column, row, f"{ratio:.2f}", ha="center", va="center", fontsize=9, color=ink)
    ax.set(xticks=range(len(outputs)), yticks=range(len(inputs)), xlabel="output tokens", ylabel="input tokens",
           title="Goodput, apart / together")  # fmt: skip
    ax.set_xticklabels(outputs), ax.set_yticklabels(inputs)
    cells = "; ".join(
        f"{isl} in, {osl} out: {ratios[row][column]:.2f}"
        for row, isl in enumerate(inputs)
        for column, osl in enumerate(outputs)
    )
    return picture(fig, f"Goodput with prefill and decode apart over goodput together. {cells}.")


def fleet_over_time(
    hours: Sequence[float], load: Sequence[float], sizes: Mapping[str, Sequence[tuple[float, int]]]
) -> Picture:
    """Requests a second over a day, and how many replicas each autoscaler had. `sizes`: name -> (hour, replicas)."""
    fig, (top, bottom) = canvas(width=8.6, height=3.4, rows=2, sharex=True)
    top.plot(hours, load, color=colour("text"))
    top.set(ylabel="requests/s", title="A day")
    for (name, steps), role in zip(sizes.items(), ("limit", "other", "ours")):
        moments, counts = zip(*steps)
        bottom.step(moments, counts, where="post", color=colour(role), label=name)
    bottom.set(xlabel="hour", ylabel="replicas")
    bottom.legend(fontsize=8)
    told = "; ".join(f"{name}: up to {max(count for _, count in steps)}" for name, steps in sizes.items())
    return picture(fig, f"The load of a day, from {min(load):.1f} to {max(load):.1f} requests/s, and replicas. {told}.")


def _box(ax, x: float, y: float, width: float, height: float, text: str, role: str) -> None:
    ax.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.1", facecolor=colour(role),
                       edgecolor=colour("limit"), linewidth=0.7, alpha=0.85)
    )  # fmt: skip
    dark = role in ("ours", "wasted")
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9,
            color="white" if dark else colour("text"))  # fmt: skip


def _arrow(ax, start: tuple[float, float], end: tuple[float, float], text: str, bend: float = 0.0) -> None:
    ax.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=colour("text"), linewidth=1.1,
                        connectionstyle=f"arc3,rad={bend}")
    )  # fmt: skip
    if text:
        ax.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.12, text, ha="center", va="bottom", fontsize=8.5)
