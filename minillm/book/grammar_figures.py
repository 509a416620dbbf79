"""The drawings of chapter 19: one constrained step, and what a mask strikes out. Built in chapter 19."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from minillm.book.charts import token_bars
from minillm.book.style import COLOURS, Picture, canvas, colour, picture

TEXT = (' {"', "age", '":', " ", "1")
WANTED = ((",", 0.5, False), ("5", 0.35, True), ("}", 0.1, True), ("years", 0.05, False))


def constrained_step() -> Picture:
    """One step: the automaton's state gives a mask, the mask strikes tokens out, the sampled token moves the state."""
    fig, ax = canvas(width=7.0, height=5.0)
    ax.set(xlim=(-0.2, 7.3), ylim=(-0.6, 5.1))
    ax.axis("off")
    ax.text(-0.1, 4.7, "1  state", fontsize=13, weight="bold")
    ax.text(1.6, 4.7, "where the text stands in the pattern", fontsize=12, color=colour("limit"))
    for place, token in enumerate(TEXT):
        _box(ax, 0.72 * place, 3.75, token.replace(" ", "␣"), "pale")
    _arrow(ax, (3.65, 4.02), (4.45, 4.02))
    _state(ax, 4.85, 4.02, "24")
    ax.text(-0.1, 3.05, "2  mask", fontsize=13, weight="bold")
    ax.text(1.6, 3.05, "a digit or a brace may follow", fontsize=12, color=colour("limit"))
    _arrow(ax, (4.85, 3.6), (4.85, 2.75))
    for row, (token, share, allowed) in enumerate(WANTED):
        y = 2.45 - 0.42 * row
        ax.text(1.1, y, token, ha="right", va="center", fontsize=13, family="monospace")
        ax.barh(y, 5.0 * share, left=1.3, height=0.28, color=colour("ours" if allowed else "background"))
        told = "allowed" if allowed else "forbidden"
        ax.text(1.45 + 5.0 * share, y, told, va="center", fontsize=11.5, color=colour("ours" if allowed else "wasted"))
        if not allowed:
            ax.plot([1.05 - 0.115 * len(token), 1.15], [y, y], color=colour("wasted"), lw=2)
    ax.text(-0.1, 0.4, "3  draw", fontsize=13, weight="bold")
    ax.text(1.6, 0.4, "from the allowed tokens; the state moves", fontsize=12, color=colour("limit"))
    _box(ax, 0.0, -0.4, "5", "orange")
    _arrow(ax, (0.75, -0.13), (4.45, -0.13))
    _state(ax, 4.85, -0.13, "24")
    ax.add_patch(
        FancyArrowPatch((5.25, -0.13), (5.25, 4.02), connectionstyle="arc3,rad=0.55", arrowstyle="-|>",
                        mutation_scale=14, color=colour("limit"), linewidth=1.4)
    )  # fmt: skip
    ax.text(6.75, 2.4, "next\nstep", ha="center", va="center", fontsize=12, color=colour("limit"))
    return picture(
        fig,
        'A constrained step in three rows. State: after the text {"age": 1 the automaton is in state 24. Mask: a digit '
        "or a brace may follow, so the model's favourite, a comma, and the word years are forbidden; 5 and } are "
        "allowed. Draw: the step samples 5 from the allowed tokens, and the automaton moves, here to state 24 again, "
        "where the next step begins.",
    )


def struck_bars(ax, names: Sequence[str], probabilities: Sequence[float], allowed: Sequence[bool], taken: int,
                title: str) -> str:  # fmt: skip
    """The model's best tokens as bars: forbidden ones struck out, the taken one named. Returns it in words."""
    token_bars(ax, names, probabilities, kept=allowed, chosen=taken, limit=1.0, title=title)
    ax.figure.canvas.draw()  # only then is it known how wide the labels are
    for row, label in enumerate(ax.get_yticklabels()):
        if row == taken:
            label.set(color=colour("wasted"), weight="bold")
            ax.text(0.12, row, "taken", color=colour("wasted"), weight="bold", va="center")
        elif not allowed[row]:
            box = label.get_window_extent().transformed(ax.transAxes.inverted())
            [strike] = ax.plot([box.x0, box.x1], [row, row], transform=ax.get_yaxis_transform(), clip_on=False,
                               color=colour("wasted"), lw=1.6)  # fmt: skip
            strike.set_in_layout(False)
    told = ["taken" if row == taken else "allowed" if ok else "struck out" for row, ok in enumerate(allowed)]
    return ", ".join(f"{name!r} {verdict}" for name, verdict in zip(names, told, strict=True))


def _box(ax, x: float, y: float, text: str, shade: str) -> None:
    ax.add_patch(
        FancyBboxPatch((x, y), 0.62, 0.55, boxstyle="round,pad=0.02,rounding_size=0.08", facecolor=COLOURS[shade],
                       alpha=0.6, linewidth=0.8, edgecolor=colour("limit"))
    )  # fmt: skip
    ax.text(x + 0.31, y + 0.27, text, ha="center", va="center", fontsize=13, family="monospace")


def _state(ax, x: float, y: float, name: str) -> None:
    ax.add_patch(Circle((x, y), 0.36, facecolor="white", edgecolor=colour("ours"), linewidth=2))
    ax.text(x, y, name, ha="center", va="center", fontsize=13)


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=colour("limit"), linewidth=1.4,
                        shrinkA=0, shrinkB=0)
    )  # fmt: skip
