"""The drawings of chapter 23: the threads of a server, adapters beside a weight matrix. Built in chapter 23."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from minillm.book.style import Picture, canvas, colour, picture

ADAPTERS = ("other", "good", "purple")


def service_map() -> Picture:
    """Clients, the event loop, the engine thread and the text thread, with the messages between them."""
    fig, ax = canvas(width=9.4, height=3.3)
    ax.set(xlim=(-0.1, 12.2), ylim=(0, 4.2))
    ax.axis("off")
    for place, name in enumerate(("client A", "client B", "client C")):
        _box(ax, 0.0, 2.95 - 1.1 * place, 1.5, 0.7, name, "background")
        _arrow(ax, (1.55, 3.4 - 1.1 * place), (3.05, 3.4 - 1.1 * place))
        _arrow(ax, (3.05, 3.2 - 1.1 * place), (1.55, 3.2 - 1.1 * place), "ours")
        _box(ax, 3.25, 2.95 - 1.1 * place, 1.7, 0.7, f"coroutine {name[-1]}", "paper")
    ax.text(2.3, 3.5, "request", ha="center", va="bottom", fontsize=8)
    ax.text(2.3, 3.1, "events", ha="center", va="top", fontsize=8, color=colour("ours"))
    _frame(ax, 3.1, 0.45, 2.0, 3.6, "event loop (one thread)", "other")
    _frame(ax, 7.9, 2.35, 4.2, 1.7, "engine thread", "ours")
    _box(ax, 8.1, 2.6, 1.1, 0.9, "read all\nmessages", "paper")
    _box(ax, 9.5, 2.6, 1.0, 0.9, "one\nstep", "paper")
    _box(ax, 10.8, 2.6, 1.1, 0.9, "hand on\ntokens", "paper")
    _arrow(ax, (9.22, 3.05), (9.48, 3.05))
    _arrow(ax, (10.52, 3.05), (10.78, 3.05))
    ax.add_patch(_curve((11.35, 2.58), (8.65, 2.58), -0.12))
    _frame(ax, 7.9, 0.45, 4.2, 1.3, "text thread", "good")
    ax.text(10.0, 1.0, "tokens become text, stop strings are found", ha="center", va="center", fontsize=8.5)
    _arrow(ax, (5.15, 3.05), (7.85, 3.05))
    ax.text(6.5, 3.15, "inbox: submit, abort", ha="center", va="bottom", fontsize=8.5)
    _arrow(ax, (7.85, 1.1), (5.15, 1.1), "ours")
    ax.text(6.5, 1.2, "pieces of text", ha="center", va="bottom", fontsize=8.5, color=colour("ours"))
    ax.text(6.5, 1.0, "call_soon_threadsafe", ha="center", va="top", fontsize=7.5, family="monospace")
    _arrow(ax, (11.35, 2.3), (11.35, 1.8), "ours")
    return picture(
        fig,
        "Three clients are connected to one event loop, which runs a coroutine for each. The coroutines put messages "
        "(submit, abort) into the inbox of the engine thread. It repeats: read all messages, take one step, hand on "
        "the tokens. A text thread turns tokens into text and gives the pieces back to the event loop.",
    )


def lora_map() -> Picture:
    """A batch of tokens with three adapters and without one: one product with W, a thin pair for each adapter."""
    fig, ax = canvas(width=9.4, height=3.4)
    ax.set(xlim=(0, 12.2), ylim=(-0.4, 4.3))
    ax.axis("off")
    rows = ("other", "other", "good", "limit", "purple", "purple", "purple", "limit")
    for place, role in enumerate(rows):
        for left in (0.3, 10.4):
            ax.add_patch(Rectangle((left, 3.4 - 0.42 * place), 1.3, 0.34, facecolor=colour(role), alpha=0.55))
    ax.text(0.95, 3.95, "x: the batch", ha="center", fontsize=9)
    ax.text(11.05, 3.95, "y", ha="center", fontsize=9)
    ax.text(
        0.95,
        -0.35,
        "one row per token,\none colour per adapter",
        ha="center",
        va="bottom",
        fontsize=8,
        color=colour("limit"),
    )
    _box(ax, 3.9, 2.25, 3.6, 1.75, "W   [out, in]\nread once for all tokens", "background")
    for place, role in enumerate(ADAPTERS):
        x = 2.9 + 2.1 * place
        ax.add_patch(Rectangle((x, 0.75), 0.28, 1.0, facecolor=colour(role), alpha=0.8))
        ax.add_patch(Rectangle((x + 0.55, 1.1), 1.0, 0.28, facecolor=colour(role), alpha=0.8))
        ax.text(x + 0.14, 0.62, "A", ha="center", va="top", fontsize=9)
        ax.text(x + 1.05, 0.97, "B", ha="center", va="top", fontsize=9)
    ax.text(5.7, 0.1, "a thin pair for each adapter, read for its own tokens only", ha="center", fontsize=8.5)
    _arrow(ax, (1.7, 3.1), (3.85, 3.1))
    _arrow(ax, (7.55, 3.1), (10.3, 3.1))
    _arrow(ax, (1.7, 1.6), (2.8, 1.3))
    _arrow(ax, (8.85, 1.3), (10.3, 1.9))
    ax.text(9.45, 2.4, "+", ha="center", va="center", fontsize=18, color=colour("text"))
    return picture(
        fig,
        "A batch of eight tokens: two with a first adapter, one with a second, three with a third, two without. All go "
        "through the shared matrix W. Beside it each adapter has a thin pair of matrices, A and B, through which only "
        "its own tokens go. Both results are added.",
    )


def blocks_of_clients_that_leave(ignored: Sequence[int], aborted: Sequence[int], predicted: int) -> Picture:
    """Blocks in use after each step, with clients that have left and without; and where the second should end."""
    fig, ax = canvas(width=8.6, height=2.9)
    ax.plot(ignored, color=colour("wasted"), label="the engine goes on for clients that have left")
    ax.plot(aborted, color=colour("ours"), label="their requests are aborted")
    ax.axvline(predicted, color=colour("prediction"), ls="--", lw=1.2, label=f"predicted end: {predicted} steps")
    ax.set(xlabel="step", ylabel="blocks in use", ylim=(0, 1.45 * max(ignored)), title="Eight clients leave")
    ax.legend(loc="upper center", ncols=3, columnspacing=1.2)
    return picture(
        fig,
        f"Blocks in use against steps. Where clients that have left are ignored, there are three rounds over "
        f"{len(ignored)} steps. Where they are aborted, the first round ends early, and all is done after "
        f"{len(aborted)} steps, as predicted.",
    )


def cost_per_token(microseconds: Mapping[str, float], predicted: float, whose: str = "your prediction") -> Picture:
    """A bar for each way to ask, the first of them without HTTP; `predicted` is what the others add to it."""
    fig, ax = canvas(width=8.6, height=2.3)
    bars = ax.barh(list(microseconds), list(microseconds.values()), color=colour("ours"), height=0.6)
    ax.bar_label(bars, [f" {value:.0f} µs" for value in microseconds.values()])
    first, *_ = microseconds.values()
    ax.axvline(first + predicted, color=colour("prediction"), ls="--", lw=1.4, label=whose)
    ax.set(xlabel="time per token (µs)", ylim=(len(microseconds) - 0.4, -0.6), title="One stream of tinyworld")
    ax.set_xlim(0, 1.15 * max(first + predicted, *microseconds.values()))
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0))
    told = "; ".join(f"{name}: {value:.0f} µs" for name, value in microseconds.items())
    return picture(fig, f"Bars, the time per token of one stream. {told}. Predicted: {first + predicted:.0f} µs.")


def overload_curves(
    rates: Sequence[float],
    all_admitted: Sequence[float],
    gate: Sequence[float],
    seconds: float,
    mu: float,
    bound: float,
) -> Picture:
    """P99 TTFT (s) against requests per second, measured and predicted; `mu` requests per second are the capacity."""
    fig, ax = canvas(width=8.6, height=3.3)
    ax.plot(rates, all_admitted, "o-", color=colour("wasted"), label="all are admitted")
    ax.plot(rates, gate, "o-", color=colour("ours"), label="with a gate")
    over = [rate for rate in rates if rate > mu]
    waits = [seconds * (rate / mu - 1) for rate in over]
    ax.plot(over, waits, ls="--", color=colour("prediction"), label="predicted waits")
    ax.plot(over, [bound] * len(over), ls="--", color=colour("prediction"))
    ax.axvline(mu, color=colour("limit"), lw=1)
    ax.text(mu, min(gate), f" capacity: {mu:.1f} per second", color=colour("limit"), fontsize=9, va="bottom")
    ax.set(xlabel="requests per second", ylabel="P99 TTFT (s)", yscale="log", title=f"{seconds:g} seconds of overload")
    ax.legend(loc="upper left")
    return picture(
        fig,
        f"P99 TTFT against requests per second, on a logarithmic axis. With all requests admitted it rises to "
        f"{all_admitted[-1]:.0f} s, along the prediction. With a gate it stays at {gate[-1]:.1f} s, near the predicted "
        f"wait of {bound:.2f} s.",
    )


def _box(ax, x: float, y: float, width: float, height: float, text: str, role: str) -> None:
    style = "round,pad=0.02,rounding_size=0.08"
    edge = colour("limit")
    ax.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour(role), edgecolor=edge, linewidth=1)
    )
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5, linespacing=1.3)


def _frame(ax, x: float, y: float, width: float, height: float, title: str, role: str) -> None:
    ax.add_patch(Rectangle((x, y), width, height, facecolor="none", edgecolor=colour(role), linewidth=1.8))
    ax.text(x + width / 2, y - 0.08, title, ha="center", va="top", fontsize=9, weight="bold", color=colour(role))


def _arrow(ax, start: tuple[float, float], end: tuple[float, float], role: str = "limit") -> None:
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=10, color=colour(role), linewidth=1.2, shrinkA=0, shrinkB=0
        )
    )


def _curve(start: tuple[float, float], end: tuple[float, float], bend: float) -> FancyArrowPatch:
    style = f"arc3,rad={bend}"
    return FancyArrowPatch(
        start, end, connectionstyle=style, arrowstyle="-|>", mutation_scale=9, color=colour("limit"), linewidth=1
    )
