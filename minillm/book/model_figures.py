"""The pictures of chapter 02: the residual stream, turning pairs, heads, shares, KV bytes. Built in chapter 02."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.patches import Circle, Wedge

from minillm.book.sketch import arrow, box, path, sheet
from minillm.book.style import Picture, canvas, colour, picture

_PARTS = {
    "embedding": "green", "logits": "green", "attention": "orange", "attention weights": "orange",
    "attention scores": "red", "MLP": "blue", "norms": "grey",
}  # fmt: skip


def residual_stream(layers: int) -> Picture:
    """The stream from the embedding to the logits; attention and MLP read it and add to it."""
    fig, ax = sheet(6.4, 2.9, 10, 4.5)
    ax.plot([1.1, 8.6], [1.4, 1.4], color=colour("sky"), lw=6, solid_capstyle="butt", zorder=0)
    for x, name, what in ((1.75, "attention", "reads earlier tokens"), (4.75, "MLP", "reads this token only")):
        path(ax, [(x, 1.4), (x, 3.2), (x + 2.3, 3.2), (x + 2.3, 1.72)])
        box(ax, x, 2.3, 0.95, 0.5, "norm", size=9.5)
        box(ax, x + 1.25, 3.2, 1.6, 0.65, name, "ours", 10.5)
        ax.text(x + 1.25, 3.75, what, ha="center", va="center", fontsize=9)
        box(ax, x + 2.3, 1.4, 0.5, 0.5, "+", "paper", 12)
    box(ax, 0.75, 1.4, 1.4, 0.95, "embedding:\na look-up", "other", 9)
    box(ax, 7.95, 1.4, 0.95, 0.5, "norm", size=9.5)
    arrow(ax, (8.4, 1.4), (8.65, 1.4))
    box(ax, 9.3, 1.4, 1.3, 0.95, "embedding\nagain:\nlogits", "other", 9)
    ax.plot([1.55, 1.55, 7.35, 7.35], [0.72, 0.6, 0.6, 0.72], color=colour("limit"), lw=1)
    ax.text(4.45, 0.27, f"one layer; the model has {layers} of them", ha="center", va="center", fontsize=9.5)
    return picture(
        fig,
        f"The residual stream from the embedding to the logits: in each of {layers} layers attention, which reads "
        "earlier tokens, and then the MLP, which reads this token only, read a normed copy of the stream and add their "
        "result to it. The logits come from a last norm and the embedding matrix.",
    )


def dials(
    query, key, frequencies, slide: int, distance: int, moved: Mapping[str, Sequence[float]], pairs=(0, 2, 4, 6)
) -> Picture:
    """Pairs of a query and a key as hands that turn with the position; beside them q · k against the slide.

    query, key: [head_dim], before any rotation. moved: name -> q · k at slide 0, 1, ...; the last one is the subject.
    """
    fig, axes = canvas(width=9.6, height=2.9, cols=len(pairs) + 1, width_ratios=[1] * len(pairs) + [2.6])
    for ax, pair in zip(axes[:-1], pairs, strict=True):
        _dial(ax, query, key, pair, float(frequencies[pair]), slide, distance)
    ax, (subject, values) = axes[-1], list(moved.items())[-1]
    for name, line in moved.items():
        mine = name == subject
        ax.plot(line, color=colour("ours" if mine else "limit"), lw=3 if mine else 1.3, label=name)
    ax.plot(slide, values[slide], "o", color=colour("other"), markersize=9, zorder=4)
    ax.set(xlabel="slide (tokens)", ylabel="q · k", title=f"slide {slide}: q · k = {values[slide]:.4f}")
    ax.margins(y=0.1)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=9)
    return picture(
        fig,
        f"Query and key {distance} tokens apart, slid by {slide} tokens: the hands of {len(pairs)} pairs have turned, "
        "the angles between them have not changed, and the dot product is a flat line.",
    )


def _dial(ax, query, key, pair: int, frequency: float, slide: int, distance: int) -> None:
    def angle(vector, position):
        return math.atan2(vector[pair + len(vector) // 2], vector[pair]) + position * frequency

    ax.set(xlim=(-1.35, 1.35), ylim=(-2.0, 1.35), aspect="equal")
    ax.axis("off")
    ax.add_patch(Circle((0, 0), 1, fill=False, ec=colour("background"), lw=1.2))
    for where, style in ((0, dict(lw=1.2, ls=(0, (2, 2)), alpha=0.5)), (slide, dict(lw=3.0))):
        turns = angle(query, where + distance), angle(key, where)
        for turn, role, name in zip(turns, ("ours", "other"), "qk", strict=True):
            ax.plot([0, math.cos(turn)], [0, math.sin(turn)], color=colour(role), **style)
            if where == slide:
                ax.text(1.18 * math.cos(turn), 1.18 * math.sin(turn), name, ha="center", va="center", fontsize=9)
    between = math.degrees(math.remainder(turns[0] - turns[1], math.tau))  # from the key to the query
    ends = sorted((math.degrees(turns[1]), math.degrees(turns[1]) + between))
    ax.add_patch(Wedge((0, 0), 0.45, *ends, color=colour("good"), alpha=0.6))
    label = f"pair {pair}: {frequency:.2g} rad a token\nangle {abs(between):.0f}°"
    ax.text(0, -1.35, label, ha="center", va="top", fontsize=8.5, linespacing=1.4)


def heads(layer: int, weights, group: int) -> Picture:
    """Attention weights of each query head of a layer, [num_heads, queries, keys]; a column is one KV head."""
    columns = len(weights) // group
    fig, axes = canvas(width=9.4, height=5.1, rows=group, cols=columns, sharex=True, sharey=True)
    for h, shown in enumerate(weights):
        ax = axes[h % group, h // group]
        ax.imshow(shown.sqrt(), cmap="Blues", vmin=0, vmax=1)
        ax.set_title(f"query head {h}, KV head {h // group}", fontsize=9.5)
        ax.grid(visible=False)
    fig.supxlabel("key (position); darker: more of the weight", fontsize=9.5)
    fig.supylabel("query (position)", fontsize=9.5)
    return picture(
        fig,
        f"Attention weights of the {len(weights)} query heads of layer {layer}, a column for each KV head: query heads "
        "that share a KV head look at different tokens.",
    )


def shares(
    parameters: Mapping[str, Mapping[str, int]], flops: Mapping[str, Mapping[str, int]], context: int
) -> Picture:
    """Where the parameters and the FLOPs of one token are: a bar for each model. Both: model -> part -> count."""
    fig, (left, right) = canvas(width=10, height=3.4, cols=2, sharey=True)
    _stack(left, list(parameters.values()), "M", 1e6)
    _stack(right, list(flops.values()), "GFLOP", 1e9)
    left.set_yticks(range(len(parameters)), list(parameters))
    left.set_title("parameters")
    right.set_title(f"FLOPs of one token, context {context:,}")
    return picture(
        fig,
        "Shares of embedding, attention and MLP in the parameters of four models, and in the FLOPs of one token with "
        f"a context of {context:,} tokens.",
    )


def _stack(ax, counted: Sequence[Mapping[str, int]], unit: str, scale: float) -> None:
    for row, parts in enumerate(counted):
        left, total = 0.0, sum(parts.values())
        for name, count in parts.items():
            wide, label = 100 * count / total, name if row == 0 else None
            ax.barh(row, wide, left=left, color=colour(_PARTS[name]), height=0.62, label=label, edgecolor="white", lw=1)
            if wide > 4:
                ink = "text" if _PARTS[name] == "orange" else "paper"
                ax.text(left + wide / 2, row, f"{wide:.0f}", ha="center", va="center", color=colour(ink), fontsize=9)
            left += wide
        ax.text(101, row, f"{total / scale:,.4g} {unit}", va="center", fontsize=9)
    ax.set(xlim=(0, 132), ylim=(len(counted) - 0.5, -0.5), xticks=range(0, 101, 25), xlabel="share (%)")
    ax.grid(visible=False)
    ax.legend(loc="upper center", bbox_to_anchor=(0.42, -0.22), ncols=4, fontsize=9, handlelength=1, columnspacing=1)


def kv_range(models: Mapping[str, tuple[str, int, int, int]]) -> Picture:
    """KV bytes per token of each model between MQA and MHA. models: name -> (kind, with MQA, with MHA, as it is)."""
    fig, ax = canvas(width=8.6, height=4.1)
    for row, (kind, low, high, shipped) in enumerate(models.values()):
        ax.plot([low, high], [row, row], color=colour("background"), lw=5, solid_capstyle="round", zorder=1)
        ax.plot([low, high], [row, row], "|", color=colour("limit"), markersize=11, zorder=2)
        mla = kind == "MLA"
        ax.plot(shipped, row, "D" if mla else "o", color=colour("other" if mla else "ours"), markersize=9, zorder=3)
        ax.text(shipped, row - 0.3, f"{shipped / 1024:,.4g} KiB, {kind}", ha="center", va="bottom", fontsize=9)
    ax.set_yticks(range(len(models)), list(models))
    ax.set(xscale="log", xlabel="KV bytes per token in bfloat16 (log scale)", ylim=(len(models) - 0.5, -0.8))
    ax.set_xticks([2**e for e in (10, 13, 16, 19, 22)], ["1 KiB", "8 KiB", "64 KiB", "512 KiB", "4 MiB"])
    ax.minorticks_off()
    ax.set_title("Each bar: from MQA (left end) to MHA (right end); the mark is the model")
    told = "; ".join(f"{name} {shipped / 1024:,.4g} KiB ({kind})" for name, (kind, _, _, shipped) in models.items())
    return picture(fig, f"KV bytes per token, each between what MQA and what MHA would take: {told}.")


def latent() -> Picture:
    """What MLA stores of a token, and what attention uses."""
    fig, ax = sheet(7.6, 3.2, 11.6, 4.4)
    for y, text in ((3.0, "latent c:\n512 numbers"), (1.1, "rotary key r:\n64 numbers")):
        arrow(ax, (1.4, 2.1), (2.55, y))
        box(ax, 3.85, y, 2.5, 0.8, text, "sky", 9.5)
    for y, text, start in ((3.6, "key part K c: 128 numbers\nfor each head", 3.0),
                           (2.4, "value V c: 128 numbers\nfor each head", 3.0),
                           (1.1, "key part r: 64 numbers,\nthe same for all heads", 1.1)):  # fmt: skip
        arrow(ax, (5.15, start), (6.85, y))
        box(ax, 9.1, y, 4.3, 0.85, text, size=9.5)
    box(ax, 0.75, 2.1, 1.2, 0.6, "token x", size=9.5)
    ax.text(3.85, 0.25, "stored: 576 numbers per layer", ha="center", fontsize=9.5)
    ax.text(9.1, 0.25, "used by attention: 128 heads", ha="center", fontsize=9.5)
    return picture(
        fig,
        "A token becomes a latent of 512 numbers and a rotary key of 64, which are stored; from the latent come a key "
        "part and a value for each of 128 heads, and the rotary key is the second part of the key of every head.",
    )


def last_row(seconds: Mapping[str, float], limit: float, flops: float) -> Picture:
    """Seconds for the last row of logits of 128 tokens, ours last, over the time of the necessary `flops` alone."""
    fig, ax = canvas(height=2.4)
    shades = [colour("other")] * (len(seconds) - 1) + [colour("ours")]
    bars = ax.barh(list(seconds), [1e3 * taken for taken in seconds.values()], color=shades, height=0.6)
    ax.bar_label(bars, fmt="%.0f ms", padding=4)
    label = f"limit: {flops / 1e9:.1f} GFLOP at this machine's best rate, {1e3 * limit:.0f} ms"
    ax.axvline(1e3 * limit, color=colour("limit"), ls="--", label=label)
    ax.set(xlabel="milliseconds (median of 5)", title="The last row of logits of 128 tokens, SmolLM2-135M shape")
    ax.set(ylim=(len(seconds) - 0.4, -0.6), xlim=(0, 1.2e3 * max(limit, *seconds.values())))
    ax.legend(loc="upper right", bbox_to_anchor=(1, -0.22))
    return picture(
        fig,
        "Milliseconds for the last row of logits of 128 tokens, against the time its arithmetic takes at full rate",
    )
