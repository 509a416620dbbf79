"""The drawings of chapter 19: automata, masks, what a mask strikes out, and what its experiments found.

Built in chapter 19.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from minillm.book import primers
from minillm.book.charts import token_bars
from minillm.book.chips import Html, token_strip
from minillm.book.prediction import Prediction
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


def net_picture(net, order: Sequence[int], name: str) -> Picture:
    """A net of places in a row, in this order; an arrow without a letter reads nothing."""
    wires = {(a, b): bytes(read or ()).decode() for a, row in enumerate(net.moves) for read, b in row}
    told = "; ".join(f"{a} to {b} by {read or 'nothing'}" for (a, b), read in wires.items())
    where = {place: (1.3 * x, 0.0) for x, place in enumerate(order)}
    alt = f"The net of {name}: from {told}. The text may end in {net.end}."
    return primers.automaton(where, wires, [net.end], alt)


def states_picture(moves: Sequence[Mapping[int, int]], may_end: set[int], name: str) -> Picture:
    """An automaton's states in a row, with the characters between them, runs of more than two as a range."""
    arrows = {}
    for source, row in enumerate(moves):
        for target in set(row.values()):
            text = "".join(chr(byte) for byte in row if row[byte] == target)
            is_run = len(text) > 2 and ord(text[-1]) - ord(text[0]) == len(text) - 1
            arrows[source, target] = f"{text[0]}-{text[-1]}" if is_run else text
    told = "; ".join(f"from {a} to {b} by {label}" for (a, b), label in arrows.items())
    where = {state: (1.3 * state, 0.0) for state in range(len(moves))}
    return primers.automaton(where, arrows, sorted(may_end), f"{name}: {told}. It may end in {sorted(may_end)}.")


def allowed_tokens(moves: Sequence[Mapping[int, int]], may_end: set[int], masks: Sequence[Sequence[bool]]) -> Picture:
    """For each state how many tokens its mask allows; states that only one character can follow in another colour."""
    counts = [sum(mask) for mask in masks]
    forced = [len(row) == 1 and state not in may_end for state, row in enumerate(moves)]
    fig, ax = canvas(width=9.6, height=2.9)
    ax.bar(range(len(moves)), counts, color=[colour("other" if one else "ours") for one in forced])
    ax.axhline(len(masks[0]), color=colour("limit"), ls=":")
    ax.set(yscale="log", ylim=(0.7, 2000), ylabel="tokens allowed", xlabel="last character read")
    ax.set_title("Orange: only one character may follow. Dotted: the whole vocabulary")
    labels = [letter.replace(" ", "␣") or "start" for letter in _last_read(moves)]
    ax.set_xticks(range(len(moves)), labels, family="monospace")
    return picture(
        fig,
        f"Allowed tokens in {len(moves)} states: {counts}; in {sum(forced)} only one character may follow.",
    )


def _last_read(moves: Sequence[Mapping[int, int]]) -> list[str]:
    """For each state the last character of the shortest text that leads to it."""
    seen, queue = {0: ""}, [0]
    for state in queue:  # grows while it is read
        for byte, target in moves[state].items():
            if target not in seen:
                seen[target] = chr(byte)
                queue.append(target)
    return [seen[state] for state in range(len(moves))]


def masked_step(steps: Sequence[tuple], forced: Sequence[bool], vocabulary: Sequence[bytes | None], step: int) -> list:
    """Step `step` of one answer, counted from 1: the model's best tokens as bars, and the answer so far as a strip."""
    _, p, mask, _ = steps[step - 1]
    fig, ax = canvas(width=7.5, height=2.7)
    title = f"step {step}: {float(p[mask].sum()):.1%} of the probability is allowed"
    told = struck_bars(ax, *_best_tokens(steps[step - 1], vocabulary), title)
    strip = answer_strip(steps[:step], forced, vocabulary, caption=f"after step {step}")
    return [picture(fig, f"Step {step}: {told}"), strip]


def answer_strip(steps: Sequence[tuple], forced: Sequence[bool], vocabulary: Sequence[bytes | None], **shown) -> Html:
    """The tokens of an answer; forced ones orange."""
    marks = {k: "other" if forced[k] else "ours" for k in range(len(steps))}
    return token_strip([_name(vocabulary[token]) for *_, token in steps], marks=marks, **shown)


def _best_tokens(step: tuple, vocabulary: Sequence[bytes | None], count: int = 7) -> tuple:
    """(names, probabilities, allowed, row of the taken token) of the model's best tokens and the taken one."""
    _, p, mask, token = step
    best = p.topk(count).indices.tolist()
    best[-1:] = best[-1:] if token in best else [token]
    return [_name(vocabulary[i]) for i in best], p[best], [bool(mask[i]) for i in best], best.index(token)


def _name(data: bytes | None) -> str:
    return (data or b"(end)").decode(errors="replace")


def valid_and_right(
    free: Mapping[float, Mapping[str, int]], masked: Mapping[float, Mapping[str, int]], guess: Prediction, at: float
) -> Picture:
    """Percent of valid and of right answers at each temperature, free and under the mask; the prediction at one."""
    total, temperatures, lines = sum(next(iter(free.values())).values()), tuple(free), {}
    for verdicts, name in ((free, "free"), (masked, "under the mask")):
        for what, kinds in (("valid", ("right", "valid, wrong")), ("right", ("right",))):
            lines[f"{what}, {name}"] = [100 * sum(verdicts[t][kind] for kind in kinds) / total for t in temperatures]
    fig, ax = canvas(width=8.5, height=3.2)
    for (name, line), style in zip(lines.items(), ("s--", "o-") * 2, strict=True):
        ax.plot(temperatures, line, style, color=colour("wasted" if "free" in name else "ours"), label=name)
    ax.plot([at], [100 * guess.guess / total], "x", ms=10, mew=2, color=colour("prediction"), label=guess.whose)
    ax.set(xlabel="temperature", ylabel=f"of {total} answers (%)", ylim=(-3, 105))
    ax.set_title("Valid is not the same as right")
    ax.legend(loc="lower left")
    return picture(fig, f"Percent of {total} answers at the temperatures {temperatures}: {lines}.")


def nesting(depths: Sequence[int], states: Mapping[str, Sequence[int]], text: str) -> Picture:
    """States of automata that nest ever deeper beside the entries of a stack; and the stack while a text is read."""
    fig, (left_ax, right_ax) = canvas(width=10, height=3.1, cols=2, width_ratios=[1, 1.5])
    for (name, counts), role in zip(states.items(), ("ours", "wasted"), strict=True):
        left_ax.plot(depths, counts, "o-", color=colour(role), label=f"automaton, {name}")
    left_ax.plot(depths, depths, "--", color=colour("good"), label="entries of a stack")
    left_ax.set(yscale="log", xlabel="depth", ylabel="states, or entries", title="To nest deeper")
    left_ax.legend(fontsize=8)
    stack: list[str] = []
    for x, letter in enumerate(text):
        stack += [letter] * (letter in "[{")
        for y, opening in enumerate(stack):
            right_ax.bar(x, 0.86, bottom=y, width=1.0, color=colour("ours" if opening == "{" else "other"), alpha=0.75)
        stack = stack[:-1] if letter in "]}" else stack
    right_ax.set(ylim=(0, 4.4), yticks=range(5), ylabel="open brackets")
    right_ax.set_title("A stack (blue {, orange [)")
    right_ax.set_xticks(range(len(text)), list(text), family="monospace")
    right_ax.grid(visible=False)
    return picture(
        fig,
        f"States for nesting to depth {depths[0]} to {depths[-1]}: {dict(states)}. Beside it the open brackets while "
        f"{text} is read: a stack that grows at each opening bracket and shrinks at each closing one.",
    )


def choice_scores(choices: Sequence[str], scores: Sequence[Sequence[float]]) -> Picture:
    """The log-probability of each choice against its number of tokens, by the sum over its tokens and by the mean."""
    lengths = np.array([len(row) for row in scores])
    fig, axes = canvas(width=9.5, height=3.2, cols=2)
    told = []
    for ax, rule in zip(axes, (np.sum, np.mean), strict=True):
        name, value = rule.__name__, np.array([rule(row) for row in scores])
        r = np.corrcoef(lengths, value)[0, 1]
        ax.plot(lengths, value, "o", color=colour("ours"), ms=5)
        for place, dy in ((int(value.argmax()), 6), (int(value.argmin()), -12)):
            ax.annotate(
                choices[place].split()[0], (lengths[place], value[place]), xytext=(0, dy),
                textcoords="offset points", ha="center",
            )  # fmt: skip
        ax.set(xlabel="tokens of the choice", ylabel=f"log-probability, {name}", title=f"{name}: r = {r:+.2f}")
        ax.margins(0.12)
        best = choices[int(value.argmax())]
        told.append(f"by the {name} the best is '{best}', its correlation with the number of tokens {r:+.2f}")
    return picture(fig, f"Log-probability of {len(choices)} choices: {'; '.join(told)}.")


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
