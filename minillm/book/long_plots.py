"""The charts of chapter 17, each from the numbers that its cell has just computed. Built in chapter 17."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from minillm.book.style import Picture, canvas, colour, picture


def cache_over_weights(
    contexts: Sequence[int], weights: float, read: Callable[[int, int, float], float], scaled: float, title: str
) -> Picture:
    """Bytes of cache read in a step over the context, for batches of 32 and 1, in 16 bits and in a share `scaled` of
    that; the dots are where the cache overtakes the weights.

    read: (batch, context, share of the 16-bit bytes) -> bytes.
    """
    fig, ax = canvas(width=7.4, height=3.9)
    ax.axhline(weights / 1e9, color=colour("limit"), ls="--")
    ax.text(16_000, weights / 1e9 * 1.15, "weights, 16 bits", fontsize=9)
    told = []
    for batch, role in ((32, "orange"), (1, "blue")):
        for share, style, bits in ((1, "-", "16 bits"), (scaled, ":", "8 bits and a scale")):
            bytes_read = [read(batch, n, share) / 1e9 for n in contexts]
            ax.plot(contexts, bytes_read, style, color=colour(role), label=f"cache, batch {batch}, {bits}")
            x, y = weights / read(batch, 1, share), weights / 1e9
            ax.plot(x, y, "o", color=colour(role), ms=5)
            side = {"xytext": (-4, 6), "ha": "right"} if style == "-" else {"xytext": (3, -14)}
            ax.annotate(f"{x:,.0f}", (x, y), textcoords="offset points", fontsize=9, **side)
            told.append(f"{x:,.0f} tokens at batch {batch} with {bits}")
    ax.set(xscale="log", yscale="log", xlim=(900, 560_000), ylim=(1, 2500), title=title)
    ax.set(xlabel="context (tokens)", ylabel="GB read in a step")
    ax.set_xticks(contexts[::2], [f"{n:,}" for n in contexts[::2]])
    ax.minorticks_off()
    ax.legend(loc="upper left")
    return picture(
        fig,
        f"Bytes read in a step by context: the weights are a flat line of {weights / 1e9:.0f} GB; the cache overtakes "
        f"them at {'; at '.join(told)}.",
    )


def columns_of_keys(grids: Mapping[str, object]) -> Picture:
    """The size of keys and values by token and dimension, one panel for each [tokens, dimensions] array."""
    fig, axes = canvas(width=9.4, height=3.0, cols=len(grids), sharey=True)
    for ax, (name, grid) in zip(axes, grids.items()):
        image = ax.pcolormesh(grid, cmap="Blues", vmin=0, vmax=40)
        ax.set(title=name, xlabel="dimension of the head")
        ax.grid(visible=False)
    axes[0].set_ylabel("token")
    fig.colorbar(image, ax=axes, label="size", shrink=0.9)
    return picture(
        fig,
        "Size of keys and values by token and dimension: keys have columns, mild ones of their own and two dark ones "
        "where the outlier pair was put in; values have none.",
    )


def perplexity_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float], str]],
    marks: Mapping[str, float],
    alt: str,
    chance: float | None = None,
) -> Picture:
    """Perplexity by position: (positions, values, colour role) by name, and vertical lines at the named positions."""
    fig, ax = canvas(width=7.4, height=3.6)
    for (name, (x, y, role)), style in zip(curves.items(), ("-", "-.")):
        ax.plot(x, y, style, color=colour(role), label=name)
    for name, at in marks.items():
        ax.axvline(at, color=colour("limit"), ls="--", lw=1)
        ax.text(at, 1.01, name, transform=ax.get_xaxis_transform(), fontsize=9, ha="center", va="bottom")
    if chance is not None:
        ax.axhline(chance, color=colour("limit"), lw=1, ls=":")
        ax.text(8, chance * 1.15, "uniform", fontsize=9, va="bottom")
    ax.set(yscale="log", ylim=(1, 1.4e4), xlabel="position in the text (tokens)", ylabel="perplexity")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=3)
    return picture(fig, alt)


def blocks_over_time(watched: Mapping[str, Sequence[int]], first: int) -> Picture:
    """Blocks that a request owns while it generates; `first` is the length of its text at the first count."""
    fig, ax = canvas(width=7.0, height=3.0)
    for (name, owned), role in zip(watched.items(), ("other", "ours")):
        x = range(first, first + len(owned))
        ax.step(x, owned, color=colour(role))
        ax.text(x[-1] + 6, owned[-1], f"{name}", va="center", fontsize=9)
    ax.set(xlabel="tokens of text", ylabel="blocks of 16 owned", ylim=(0, None), xlim=(0, 520))
    told = "; ".join(f"{name} reaches {max(owned)}" for name, owned in watched.items())
    return picture(fig, f"Blocks owned while {len(owned)} tokens are generated: {told}.")


def needle_grids(
    recall: Callable[[str, int, float, float], float], policies: Sequence[str], budgets: Sequence[int], alt: str
) -> Picture:
    """Needles found by budget and by the quarter of the text in which the fact stood, one panel for each policy."""
    fig, axes = canvas(width=9.6, height=3.1, cols=len(policies), sharey=True)
    for ax, policy in zip(axes, policies):
        grid = [[recall(policy, budget, low, low + 0.25) for low in (0, 0.25, 0.5, 0.75)] for budget in budgets]
        ax.imshow(grid, cmap="Blues", vmin=0, vmax=1.2, aspect="auto", origin="lower")
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                ink = "white" if value > 0.7 else colour("text")
                ax.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=9, color=ink)
        ax.set(title=policy, xlabel="depth of the fact", xticks=range(4), yticks=range(len(budgets)))
        ax.set(xticklabels=["1st", "2nd", "3rd", "last"], yticklabels=budgets)
        ax.grid(visible=False)
    axes[0].set_ylabel("budget (tokens)")
    return picture(fig, alt)
