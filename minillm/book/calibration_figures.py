"""The drawings of chapter 16: the map of its methods, inputs by channel, level sets, results. Built in chapter 16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from minillm.book.style import Picture, canvas, colour, picture

INK = {"rtn": "wasted", "awq": "other", "gptq": "ours"}
MARK = {"rtn": "s", "awq": "^", "gptq": "o"}


def calibration_map() -> Picture:
    """Four ways to use what calibration has seen of the inputs, each as bars of eight inputs or columns."""
    fig, axes = canvas(width=7.0, height=5.6, rows=2, cols=2)
    inputs = np.array([1.0, 1.3, 0.8, 1.1, 6.0, 0.9, 1.2, 1.0])
    for ax in axes.flat:
        ax.set(xlim=(-0.7, 7.7), ylim=(-0.2, 9.6), xticks=[], yticks=[])
        ax.grid(visible=False)
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
    smooth, passed, finer, turned = axes.flat
    _bars(smooth, inputs, "inputs", base=4.6, scale=0.6)
    _bars(smooth, np.where(inputs > 2, 2.4, 1.0), "columns of W", base=0.6)
    smooth.annotate("", (4, 3.1), (4, 4.5), arrowprops={"arrowstyle": "-|>", "color": colour("text"), "lw": 2})
    smooth.set_title("SmoothQuant: move the size", fontsize=12)
    _bars(passed, np.full(8, 2.0), "columns of W, one by one", base=2.6, below=True)
    for column in range(5, 8):
        arrow = {"arrowstyle": "-|>", "color": colour("text"), "lw": 1.5, "connectionstyle": "arc3,rad=-0.8"}
        passed.annotate("", (column, 4.7), (4, 4.7), arrowprops=arrow)
    passed.set_title("GPTQ: pass the error on", fontsize=12)
    for column in range(8):
        steps = 9 if column == 4 else 4
        finer.plot([column] * steps, np.linspace(1, 6.6, steps), "_", ms=15, mew=2.4,
                   color=colour("wasted" if column == 4 else "ours"))  # fmt: skip
    finer.text(3.5, 8.2, "marks of each column", ha="center", fontsize=12)
    finer.set_title("AWQ: round it more finely", fontsize=12)
    _bars(turned, inputs, "inputs", base=4.6, scale=0.6)
    level = np.sqrt((inputs**2).mean())
    turned.bar(range(8), np.full(8, level), bottom=0.4, width=0.75, color=colour("ours"))
    turned.annotate("", (3.5, 2.9), (3.5, 4.5), arrowprops={"arrowstyle": "-|>", "color": colour("text"), "lw": 2})
    turned.set_title("Rotation: mix the channels", fontsize=12)
    return picture(
        fig,
        "Four panels, each with eight inputs or columns of which one, in red, is large. SmoothQuant divides the large "
        "input and multiplies its column of the weights. GPTQ rounds one column after the other and passes each error "
        "on to the columns on its right. AWQ gives the column of the large input finer marks. A rotation mixes all "
        "inputs, and none is large any more.",
    )


def error_shares(shares: Mapping[str, Sequence[float]], title: str) -> Picture:
    """Cumulative shares of an error over the columns, the worst first."""
    fig, ax = canvas(width=7.2, height=3.2)
    told = []
    for (name, share), ink in zip(shares.items(), ("other", "ours")):
        share = np.asarray(share)
        ax.plot(np.arange(1, len(share) + 1) / len(share), share, color=colour(ink), label=name)
        told.append(f"{float(share[len(share) // 10]):.0%} {name}")
    ax.axvline(0.1, color=colour("limit"), ls="--", lw=1)
    ax.text(0.12, 0.03, "a tenth of the columns:\n" + "\n".join(told), fontsize=9)
    ax.set(xlabel="share of the columns of W, worst first", ylabel="share of the error", ylim=(0, 1.02), title=title)
    ax.legend(loc="center right")
    return picture(fig, f"Share of the error by share of the columns, worst first: a tenth of them holds "
                        f"{' and '.join(told)}.")  # fmt: skip


def channels(panels: Mapping[str, Sequence[float]], large: Sequence[int], bottom: float, ylabel: str = "") -> Picture:
    """The size of each channel in several panels, the large channels in red with a dot."""
    fig, axes = canvas(width=8.2, height=2.8, cols=len(panels), sharey=True)
    told = []
    for ax, (title, sizes) in zip(axes, panels.items()):
        sizes, large = np.asarray(sizes), np.asarray(large)
        ax.vlines(np.arange(len(sizes)), bottom, sizes, color=colour("ours"), lw=1)
        ax.vlines(large, bottom, sizes[large], color=colour("wasted"), lw=2)
        ax.plot(large, sizes[large], "o", ms=4, color=colour("wasted"))
        ax.set(yscale="log", xlabel="channel", title=title, ylim=(bottom, 3000))
        told.append(f"{title}: largest {sizes.max():.3g}, {sizes.max() / np.median(sizes):,.0f} times the median")
    axes[0].set_ylabel(ylabel)
    return picture(fig, f"Sizes by channel. {'; '.join(told)}.")


def level_sets(cases: Sequence[Mapping], cost, marks: Sequence[tuple[int, int]], correlation: float) -> Picture:
    """Ellipses of equal error for two weights; a case has `w`, `nearest`, `passed_on`, `best` and `second`."""
    fig, axes = canvas(width=8.2, height=5.9, cols=2, sharey=True)
    u, v = np.meshgrid(np.linspace(-1.4, 2.4, 300), np.linspace(-1.4, 2.4, 300))
    told = []
    for ax, case in zip(axes, cases):
        w, second = case["w"], case["second"]
        errors = {name: f"{cost(case[name], correlation, w):.3f}" for name in ("best", "nearest", "passed_on")}
        ax.contour(u, v, cost((u, v), correlation, w), [0.02, 0.1, 0.3, 0.7, 1.3, 2.2], colors=[colour("limit")],
                   linewidths=0.9)  # fmt: skip
        ax.plot(*zip(*marks), "o", color=colour("background"), mec=colour("limit"))
        ax.plot(*case["best"], "o", ms=18, mfc="none", mec=colour("good"), label=f"best of all: error {errors['best']}")
        ax.plot(*w, "*", ms=14, color=colour("text"), label="the weights")
        ax.plot(*case["nearest"], "s", ms=10, color=colour("wasted"), label=f"nearest: error {errors['nearest']}")
        ax.plot([w[0], case["passed_on"][0]], [w[1], second], "--", lw=1.2, color=colour("ours"))
        ax.plot(case["passed_on"][0], second, "D", ms=8, mfc="none", mec=colour("ours"),
                label=f"second weight moved to {second:.2f}")  # fmt: skip
        ax.plot(*case["passed_on"], "D", ms=8, color=colour("ours"),
                label=f"and rounded: error {errors['passed_on']}")  # fmt: skip
        ax.set(xlabel="first weight", aspect="equal", title=f"from {w[0]}, {w[1]}", xlim=(-1.4, 2.4), ylim=(-1.4, 2.4))
        ax.legend(fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.15), markerscale=0.7)
        ax.grid(visible=False)
        told.append(
            f"from {w} nearest costs {errors['nearest']}, passing on {errors['passed_on']}, the best {errors['best']}"
        )
    axes[0].set_ylabel("second weight")
    return picture(fig, f"Ellipses of equal error, correlation {correlation:g}: {'; '.join(told)}.")


def scaled_columns(factors: Sequence[float], parts: Sequence[Sequence[float]]) -> Picture:
    """Squared error by the factor on the salient columns: `parts` has theirs, all columns' and the output's."""
    salient, every, output = (np.array(column) for column in zip(*parts))
    mine, others, both = salient / every[0], (every - salient) / every[0], output / output[0]
    fig, ax = canvas(width=7.4, height=3.4)
    ax.plot(factors, mine, "o-", color=colour("ours"), label="of the 7 salient columns")
    ax.plot(
        factors, mine[0] / np.array(factors) ** 2, "--", color=colour("prediction"), label="their prediction, 1 / s²"
    )
    ax.plot(factors, others, "s-", color=colour("wasted"), label="of the 697 others")
    ax.plot(factors, both, "^-", color=colour("text"), label="of the output, all together")
    ax.set(xlabel="factor s", ylabel="squared error (1: output at s = 1)", ylim=(0, 2.3))
    ax.set_title("down of layer 3, 3 bits, a scale per row")
    ax.legend(fontsize=9)
    return picture(
        fig,
        f"Squared error by the factor on the seven salient columns: their own falls from {mine[0]:.0%} to "
        f"{mine[-1]:.0%}, that of all others grows from {others[0]:.0%} to {others[-1]:.0%}; together it is least near "
        f"{factors[int(both.argmin())]:g}.",
    )


def one_token(sides: Mapping[str, Sequence[float]]) -> Picture:
    """The inputs of one token, as they are and rotated."""
    fig, axes = canvas(width=8.2, height=2.8, cols=len(sides))
    told = []
    for ax, (name, side), ink in zip(axes, sides.items(), ("wasted", "ours")):
        side = np.asarray(side)
        largest, rms = np.abs(side).max(), np.sqrt((side**2).mean())
        ax.vlines(np.arange(len(side)), 0, side, color=colour(ink), lw=1.2)
        ax.set(title=f"{name}: largest / rms {largest / rms:.1f}", xlabel="channel", ylabel="input")
        told.append(f"{name}: largest {largest:.0f}, rms {rms:.0f}")
    return picture(fig, f"{len(side)} inputs of gate and up for one token. {', '.join(told)}.")


def differences(rows: Sequence[tuple[str, str, float, float]]) -> Picture:
    """Paired differences with two standard errors; a row has a label, the method that loses or wins, mean, margin."""
    fig, ax = canvas(width=7.6, height=3.0)
    for y, (_, method, mean, margin) in enumerate(rows):
        ink = colour(INK.get(method, "text"))
        ax.errorbar(mean, y, xerr=margin, fmt=MARK.get(method, "D"), capsize=3, color=ink)
        ax.text(0.03, y, f"{mean:.4f} ± {margin:.4f}", va="center", fontsize=9)
    ax.axvline(0, color=colour("limit"), ls="--", lw=1)
    ax.set(xlabel="nats per token, ± two standard errors; dashed: no difference")
    ax.set(xlim=(-0.015, 0.042), ylim=(len(rows) - 0.5, -0.5))
    ax.set_xticks([-0.01, 0, 0.01, 0.02])
    ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
    told = "; ".join(f"{name} {mean:.4f} ± {margin:.4f}" for name, _, mean, margin in rows)
    return picture(fig, f"Differences in nats per token, ± two standard errors: {told}.")


def by_bits(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> Picture:
    """Increase of the perplexity by bits a weight: a panel for each size of group, a curve for each method."""
    fig, axes = canvas(width=8.2, height=3.6, cols=len(panels), sharey=True)
    told = []
    for ax, (title, curves) in zip(axes, panels.items()):
        for method, points in curves.items():
            ax.plot(*zip(*points), f"{MARK[method]}-", color=colour(INK[method]), label=method)
            told.append(f"{method}, {title}: " + ", ".join(f"{bits:.2f} bits {rise:+.2%}" for bits, rise in points))
        ax.set(yscale="log", xlabel="bits a weight, scales included", title=title)
        ax.legend()
    axes[0].set_ylabel("increase of the perplexity (1: +100%)")
    return picture(fig, f"Increase of the perplexity by bits a weight, committed. {'; '.join(told)}.")


def _bars(ax, sizes: np.ndarray, title: str, *, base: float, scale: float = 1.0, below: bool = False) -> None:
    inks = [colour("wasted" if i == 4 else "ours") for i in range(len(sizes))]
    ax.bar(range(len(sizes)), scale * sizes, bottom=base, width=0.75, color=inks)
    ax.text(-0.4, base - 0.8 if below else base + scale * np.median(sizes) + 0.4, title, fontsize=12)
