"""The drawings of chapter 21: a layer of experts, what each token uses, experts touched, loads of ranks.
Built in chapter 21."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from minillm.book.chips import Html
from minillm.book.style import COLOURS, Picture, canvas, colour, picture

SHADES = ("blue", "orange", "green", "red", "purple", "sky", "yellow", "grey")  # of experts 0 to 7


def layer_map() -> Picture:
    """Four tokens, a router, four experts of which each token uses two; rows sorted by expert, and back."""
    fig, ax = canvas(width=9.4, height=3.6)
    ax.set(xlim=(0, 12.4), ylim=(-0.3, 4.5))
    ax.axis("off")
    chosen = ((0, 2), (2, 3), (0, 3), (2, 0))
    for token, pair in enumerate(chosen):
        y = 3.4 - 0.95 * token
        _box(ax, 0.2, y, 1.1, 0.6, f"token {'abcd'[token]}", "pale")
        for place, expert in enumerate(pair):
            ax.add_patch(Rectangle((2.5 + 0.4 * place, y + 0.12), 0.34, 0.34, facecolor=COLOURS[SHADES[expert]]))
        _arrow(ax, (1.35, y + 0.3), (2.4, y + 0.3))
    ax.text(1.9, 4.2, "router", ha="center", fontsize=9)
    ax.text(2.87, 4.2, "choices", ha="center", fontsize=9)
    rows = sorted((expert, token) for token, pair in enumerate(chosen) for expert in pair)
    for place, (expert, token) in enumerate(rows):
        y = 3.55 - 0.47 * place
        ax.add_patch(Rectangle((4.6, y), 1.0, 0.42, facecolor=COLOURS[SHADES[expert]], alpha=0.55))
        ax.text(5.1, y + 0.2, "abcd"[token], ha="center", va="center", fontsize=9)
    ax.text(5.1, 4.2, "rows, sorted", ha="center", fontsize=9)
    _arrow(ax, (3.4, 2.1), (4.5, 2.1))
    first = 0
    for expert in range(4):
        count = sum(e == expert for e, _ in rows)
        used = count > 0
        y = 3.55 - 0.47 * (first + (count - 1) / 2) - 0.05 if used else -0.25
        x = 6.9 if used else 9.2
        _box(ax, x, y, 1.6, 0.5, f"expert {expert}", SHADES[expert] if used else "paper", alpha=0.55 if used else 1.0)
        if used:
            _arrow(ax, (5.7, y + 0.25), (6.8, y + 0.25))
            _arrow(ax, (8.6, y + 0.25), (10.2, 2.1))
        else:
            ax.text(
                x + 0.8, y - 0.12, "not read in this step", ha="center", va="top", fontsize=8, color=colour("limit")
            )
        first += count
    for token in range(4):
        _box(ax, 11.0, 3.4 - 0.95 * token, 1.1, 0.6, f"token {'abcd'[token]}", "pale")
    ax.text(10.55, 4.2, "weighted sums", ha="center", fontsize=9)
    return picture(
        fig,
        "Four tokens a, b, c, d. A router gives each two of four experts. The eight rows are sorted by expert: three "
        "for expert 0, none for expert 1, three for expert 2, two for expert 3. Each expert that has rows multiplies "
        "all of them at once; expert 1 is not read. The results go back into the order of the tokens, two to each, and "
        "are summed with their weights.",
    )


def expert_text(tokens: Sequence[str], experts: Sequence[int], title: str) -> Html:
    """A text whose tokens have the colour of an expert, with the numbers in plain text."""
    spans = [
        f'<span style="background:{COLOURS[SHADES[expert % len(SHADES)]]}55;border-radius:3px" '
        f'title="expert {expert}">{html.escape(token).replace(chr(10), "⏎<br>")}</span>'
        for token, expert in zip(tokens, experts, strict=True)
    ]
    style = "font:15px/1.7 sans-serif;color:#24292f;background:#fff;padding:6px 10px"
    plain = f"{title}: " + " ".join(f"{token.strip()}/{expert}" for token, expert in zip(tokens, experts))
    return Html(f'<div style="{style}"><b>{html.escape(title)}</b><br>{"".join(spans)}</div>', plain)


def usage_heatmap(shares: Mapping[str, Sequence[float]], layer: int) -> Picture:
    """The share of a task's tokens that goes to each expert of a layer, a row for each task."""
    names = list(shares)
    fig, ax = canvas(width=7.5, height=0.55 * len(names) + 1.1)
    most = max(max(row) for row in shares.values())
    for y, name in enumerate(names):
        for expert, share in enumerate(shares[name]):
            ax.add_patch(Rectangle((expert, y), 0.96, 0.92, facecolor=colour("ours"), alpha=0.08 + 0.92 * share / most))
            ax.text(expert + 0.48, y + 0.46, f"{share:.0%}", ha="center", va="center", fontsize=8.5,
                    color="white" if share > 0.55 * most else colour("text"))  # fmt: skip
    count = len(shares[names[0]])
    ax.set(xlim=(0, count), ylim=(len(names), 0), xlabel="expert")
    ax.set_xticks([expert + 0.48 for expert in range(count)], range(count))
    ax.set_yticks([y + 0.46 for y in range(len(names))], names)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.set_title(f"Layer {layer}: where the tokens of each task go", fontsize=10)
    rows = "; ".join(
        f"{name}: expert {max(range(count), key=lambda e: shares[name][e])} takes {max(shares[name]):.0%}"
        for name in names
    )
    return picture(fig, f"A table of tasks and experts, darker where more tokens of a task go. {rows}.")


def touched_curve(
    batches: Sequence[int], counted: Sequence[float], predicted: Sequence[float], num_experts: int, independent: str
) -> Picture:
    """Experts that a step reads in a layer against the number of its tokens, over the prediction."""
    fig, ax = canvas(width=7.0, height=3.1)
    ax.plot(batches, predicted, "--", color=colour("prediction"), label="predicted: E (1 − (1 − k/E)ⁿ)")
    ax.plot(batches, counted, "o-", color=colour("ours"), label="counted")
    ax.axhline(num_experts, color=colour("limit"), linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(batches), [str(batch) for batch in batches])
    ax.set(xlabel="tokens in a step", ylabel="experts read in a layer", ylim=(0, num_experts * 1.1))
    ax.legend(loc="lower right")
    told = ", ".join(f"{n}: {c:.1f} ({p:.1f})" for n, c, p in zip(batches, counted, predicted))
    return picture(
        fig,
        f"Experts read in a layer against the tokens in a step, counted (predicted): {told}. {independent}",
    )


def rank_loads(loads: Mapping[str, Sequence[float]]) -> Picture:
    """The load of each rank, for several placements, each beside its mean."""
    names = list(loads)
    fig, axes = canvas(width=8.6, height=2.6, cols=len(names), sharey=True)
    for ax, name in zip(axes, names):
        values = loads[name]
        mean = sum(values) / len(values)
        shades = [colour("wasted") if value == max(values) else colour("ours") for value in values]
        ax.bar(range(len(values)), values, color=shades, width=0.7)
        ax.axhline(mean, color=colour("limit"), linewidth=1.2)
        ax.set_title(f"{name}: {max(values) / mean:.2f}", fontsize=10)
        ax.set_xticks(range(len(values)), [f"rank {rank}" for rank in range(len(values))], fontsize=8)
    axes[0].set_ylabel("tokens")
    told = "; ".join(f"{name}: {max(v) / (sum(v) / len(v)):.2f}" for name, v in loads.items())
    return picture(fig, f"Tokens that each rank computes, with the mean as a line. Largest over mean: {told}.")


def _box(ax, x: float, y: float, width: float, height: float, text: str, shade: str, alpha: float = 1.0) -> None:
    style = "round,pad=0.02,rounding_size=0.08"
    ax.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=COLOURS[shade], alpha=alpha, linewidth=0.8,
                       edgecolor=colour("limit"))
    )  # fmt: skip
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=colour("limit"), linewidth=1, shrinkA=0,
                        shrinkB=0)
    )  # fmt: skip
