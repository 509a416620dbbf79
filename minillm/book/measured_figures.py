"""The plots of appendix 92 and of the README, drawn from the results that the package carries. Built in chapter 92."""

from __future__ import annotations

from minillm.book.measured import result
from minillm.book.style import Picture, canvas, colour, picture

PEERS = {"transformers": "other", "llama.cpp": "good", "vllm": "prediction"}  # a colour for each


def ladder() -> Picture:
    """Tokens per second of each rung, on a scale of powers of ten, below what memory allows one sequence."""
    figures = result("ladder")["figures"]
    names, rates = list(figures), [f["tokens_per_second"] for f in figures.values()]
    fig, ax = canvas(width=7.6, height=3.1)
    inks = [colour("other" if name.startswith("transformers") else "ours") for name in names]
    ax.barh(names, rates, color=inks, height=0.66)
    for row, (rate, f) in enumerate(zip(rates, figures.values(), strict=True)):
        ax.text(rate * 1.06, row, f"{rate:,.0f}  ({f['times_first']:.1f}×)", va="center", fontsize=9)
    ax.set(xscale="log", xlim=(50, 6 * max(rates)), ylim=(len(names) - 0.4, -0.6), xlabel="tokens per second")
    title = "One story from tinyworld on two CPU cores\nEach of the last three bars adds one idea to “own kernels”"
    ax.set_title(title, x=-0.28)
    ax.grid(visible=False, axis="y")
    told = ", ".join(f"{name} {rate:,.0f}" for name, rate in zip(names, rates, strict=True))
    return picture(fig, f"Bars on a logarithmic scale, tokens per second of each rung of the ladder: {told}.")


def over_peers(*names: str, title: str) -> Picture:
    """minillm's rate over each peer's, case by case; 1 is level."""
    cases = {case: f for name in names for case, f in result(name)["figures"]["cases"].items()}
    fig, ax = canvas(width=7.6, height=0.75 + 0.27 * len(cases))
    told = []
    for row, (case, f) in enumerate(cases.items()):
        ours = f["engines"]["minillm"]["tokens_per_second"]
        for peer, theirs in f["engines"].items():
            if peer != "minillm":
                ratio = ours / theirs["tokens_per_second"]
                label = peer if peer not in ax.get_legend_handles_labels()[1] else None
                ax.plot(ratio, row, "o", color=colour(PEERS[peer]), markersize=7, label=label)
                told.append(f"{case} {ratio:.2f} times {peer}")
    ax.axvline(1, color=colour("limit"), linewidth=1.2)
    ax.set_yticks(range(len(cases)), [case.replace("/", ", ") for case in cases])
    ax.set(
        ylim=(len(cases) - 0.4, -0.6), xlabel="tokens per second of minillm over the peer's (1 is level)", title=title
    )
    ax.set_xlim(left=0.8)
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderaxespad=0.1)
    return picture(fig, f"Dots, the rate of minillm over that of each peer: {'; '.join(told)}.")


def shares_of_limit(name: str, batch: str | None, title: str) -> Picture:
    """Bars: the rate of each engine over the limit that memory sets for the bytes it reads."""
    figures = result(name)["figures"]
    engines = figures[batch] if batch else figures
    shares = {engine: f["share_of_limit"] for engine, f in engines.items() if "share_of_limit" in f}
    fig, ax = canvas(width=7.6, height=0.7 + 0.27 * len(shares))
    peers = [next((peer for peer in PEERS if engine.startswith(peer)), None) for engine in shares]
    ax.barh(list(shares), [100 * s for s in shares.values()], height=0.66,
            color=[colour(PEERS[peer] if peer else "ours") for peer in peers])  # fmt: skip
    ax.axvline(100, color=colour("limit"), linestyle="--", linewidth=1.4)
    for row, (engine, share) in enumerate(shares.items()):
        rate = f"{engines[engine]['tokens_per_second']:,.0f} tokens/s "
        ax.text(100 * share, row, rate, va="center", ha="right", fontsize=9, color=colour("paper"))
    ax.set(xlim=(0, 106), ylim=(len(shares) - 0.4, -0.6), xlabel="% of the limit (dashed)", title=title)
    ax.grid(visible=False, axis="y")
    told = "; ".join(f"{engine} {share:.0%}" for engine, share in shares.items())
    return picture(fig, f"Bars, the share of the memory's limit that each engine reaches: {told}.")


def step_rungs() -> Picture:
    """Milliseconds of a decode step with one more optimisation on each rung, in both number types."""
    results = {dtype: result(f"step-smollm2-135m-{dtype}-batch-1")["figures"] for dtype in ("float32", "bfloat16")}
    fig, axes = canvas(width=9.2, height=2.5, cols=2, sharey=True)
    told = []
    for ax, (dtype, figures) in zip(axes, results.items(), strict=True):
        times = {name: 1e3 * f["step_seconds"] for name, f in figures["rungs"].items()}
        limit = 1e3 * figures["limit_step_seconds"]
        ax.barh(list(times), list(times.values()), color=colour("ours"), height=0.66)
        ax.axvline(limit, color=colour("limit"), linestyle="--", linewidth=1.4)
        for row, (name, time) in enumerate(times.items()):
            ax.text(time, row, f" {time:.1f}", va="center", fontsize=9)
            told.append(f"{dtype}, {name}: {time:.1f} ms")
        ax.set(xlabel="ms per step (dashed: the weights read once)", title=dtype, ylim=(len(times) - 0.4, -0.6))
        ax.set_xlim(0, 1.15 * max(times.values()))
        ax.grid(visible=False, axis="y")
    return picture(fig, f"Bars, a decode step with one more optimisation on each rung. {'; '.join(told)}.")


def over_batches(name: str, title: str, first: str | None = None) -> Picture:
    """Speed over the batch size, as a multiple of the first candidate's; 1 is no gain."""
    figures = result(name)["figures"]
    rows = {int(key.split()[1]): f for key, f in figures.items() if key.startswith("batch ")}
    fig, ax = canvas(width=7.0, height=3.0)
    curves: dict[str, dict[int, float]] = {}
    for batch, row in rows.items():
        base = row.get(first or next(iter(row)))
        for engine, f in row.items():
            if base is not None:
                curves.setdefault(engine, {})[batch] = f["tokens_per_second"] / base["tokens_per_second"]
    curves = {engine: curve for engine, curve in curves.items() if len(curve) > 1}
    for engine, curve in curves.items():
        ax.plot(list(curve), list(curve.values()), "o-", label=engine)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted(rows), [str(batch) for batch in sorted(rows)])
    ax.set(xlabel="sequences in the batch", ylabel=f"× {first or next(iter(curves))}", title=title, ylim=(0, None))
    ax.legend(loc="lower left", ncols=2)
    told = "; ".join(
        f"{engine} {next(iter(c.values())):.2f} to {[*c.values()][-1]:.2f}" for engine, c in curves.items()
    )
    return picture(fig, f"Lines over the batch size, as multiples of the first: {told}.")


def perplexities() -> Picture:
    """The increase of perplexity by bits per weight, for each method of rounding, on a logarithmic scale."""
    figures = result("quality")["figures"]
    groups = {"rtn": "rounded to nearest", "gptq": "GPTQ", "awq": "AWQ"}
    fig, ax = canvas(width=7.0, height=3.2)
    told = []
    for (key, label), marker in zip(groups.items(), "osD", strict=True):
        points = sorted(
            (f["bits_per_weight"], 100 * f["increase"])
            for name, f in figures.items()
            if name.startswith("int") and name.endswith(f" {key} 64")
        )
        ax.plot(*zip(*points, strict=True), f"{marker}-", label=f"{label}, groups of 64")
        told.append(f"{label}: " + ", ".join(f"{y:.2f}% at {x:.2f} bits" for x, y in points))
    ax.set(yscale="log", xlabel="bits per weight, scales included", ylabel="increase of perplexity, %")
    ax.set_title("tinyworld, fresh text")
    ax.legend()
    return picture(
        fig, f"Lines on a logarithmic scale, the increase of perplexity by bits per weight. {'; '.join(told)}."
    )
