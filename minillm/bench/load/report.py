"""A measurement as a result, as tables and as one plot. Built in chapter 24."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .run import Run
from .search import Found, pareto_front

# Okabe and Ito's colours, told apart under every common kind of colour blindness.
BLUE, ORANGE, GREY, INK = "#0072B2", "#E69F00", "#7A8088", "#24292F"
ROWS = {"ttft": "first token", "itl": "token gap", "tpot": "per token", "e2e": "whole answer"}


def result(name: str, command: str, workload: dict, runs: Sequence[Run], found: Found | None = None) -> dict:
    """One measurement for `measure.save`: figures by point, the best trade-offs, every request of every run."""
    import torch

    from .. import measure

    figures: dict = {
        "runs": {_key(place, run): run.figures for place, run in enumerate(runs)},
        "pareto_front": front_of(runs),
        "warnings": {_key(place, run): run.warnings for place, run in enumerate(runs) if run.warnings},
    }
    if found is not None:
        figures |= {"largest_rate": found.rate, "probes": [list(probe) for probe in found.probes]}
    measured = measure.result(name, command, torch.device("cpu"), workload, None, figures, {})
    return measured | {"runs": [run.to_json() for run in runs]}


def _key(place: int, run: Run) -> str:
    return f"{place + 1}: {run.point}"


def front_of(runs: Sequence[Run]) -> list[str]:
    """The points that no other one beats in output tokens/s and in p99 of the time to first token."""
    points = {
        _key(place, run): (run.figures["output_throughput"], run.figures["ttft_seconds"]["p99"][0])
        for place, run in enumerate(runs)
        if run.figures["ttft_seconds"]
    }
    return pareto_front(points)


def tables(measured: dict) -> list:
    """A row a point, and for a single point every latency with its error (rich renderables)."""
    from rich.table import Table

    figures = measured["figures"]
    runs, front = figures["runs"], figures["pareto_front"]
    with_slo = any("attainment" in f for f in runs.values())
    columns = ["load", "requests/s", "tokens/s", "TTFT, ms", "ITL, ms", "failed"]
    every = Table(*columns, *(["in SLO", "goodput/s"] if with_slo else []), title=measured["workload"]["title"])
    every.caption = "latencies are p50 / p99"
    for key, f in runs.items():
        many = len(runs) > 1 and len(front) > 1
        cells = [f"{'* ' if many and key in front else ''}{key.partition(': ')[2]}", f"{f['request_throughput']:.2f}"]
        cells += [f"{f['output_throughput']:,.1f}", _two(f["ttft_seconds"]), _two(f["itl_seconds"])]
        cells.append(str(sum(f["failures"].values())))
        every.add_row(*cells, *([f"{f['attainment']:.0%}", f"{f['goodput']:.2f}"] if with_slo else []))
    if len(runs) > 1 and len(front) > 1:
        every.caption += "; * no other point has more tokens/s and a shorter TTFT (p99)"
    if "largest_rate" in figures:
        rate = figures["largest_rate"]
        told = f"the largest rate that holds: {rate:.3g} requests/s" if rate else "no rate that was tried holds"
        every.caption += f"; {told}, in {len(figures['probes'])} probes"
    return [every] if len(runs) > 1 else [every, _latencies(next(iter(runs.values())))]


def _latencies(figures: dict):
    from rich.table import Table

    table = Table("latency, ms", "mean", "p50", "p90", "p99", title="percentiles with their 95% intervals")
    for name, what in ROWS.items():
        if (f := figures[f"{name}_seconds"]) is not None:
            table.add_row(what, f"{1e3 * f['mean']:.2f}", *(_with_error(*f[f"p{q}"]) for q in (50, 90, 99)))
    return table


def _two(f: dict | None) -> str:
    return f"{1e3 * f['p50'][0]:.1f} / {1e3 * f['p99'][0]:.1f}" if f else "–"


def _with_error(value: float, low: float | None, high: float | None) -> str:
    bounds = ["?" if bound is None else f"{1e3 * bound:.1f}" for bound in (low, high)]
    return f"{1e3 * value:.1f} ({bounds[0]}–{bounds[1]})"


def plot(measured: dict, path: Path) -> Path:
    """Draw a measurement into a PNG: throughput against latency over the points; for a single one, its latencies."""
    figure = draw(measured)
    figure.savefig(path, dpi=160)
    return path


def draw(measured: dict):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    if len(measured["runs"]) > 1:
        draw_trade_off(left, measured, "ttft", "time to first token, ms")
        draw_trade_off(right, measured, "itl", "time between tokens, ms")
    else:
        draw_cumulated(left, measured["runs"][0]["outcomes"])
        draw_timeline(right, measured["runs"][0]["outcomes"])
    figure.suptitle(measured["workload"]["title"], x=0.01, ha="left", fontsize=10)
    return figure


def draw_trade_off(axes, measured: dict, name: str, label: str) -> None:
    """p50 and p99 of one latency against throughput: a point to the right and below is better."""
    ran = [run for run in measured["runs"] if run["figures"][f"{name}_seconds"]]
    ran.sort(key=lambda run: run["figures"]["output_throughput"])
    x = [run["figures"]["output_throughput"] for run in ran]
    for quantile, colour, marker in (("p50", BLUE, "o"), ("p99", ORANGE, "s")):
        values = [[1e3 * (v or 0) for v in run["figures"][f"{name}_seconds"][quantile]] for run in ran]
        axes.plot(x, [value for value, _, _ in values], color=colour, marker=marker, label=quantile)
        for at, (_, low, high) in zip(x, values):
            if low and high:
                axes.plot([at, at], [low, high], color=colour, linewidth=1)
    for at, run in zip(x, ran):
        value = run["point"]["concurrency"] if run["point"]["rate"] is None else f"{run['point']['rate']:.3g}/s"
        y = 1e3 * run["figures"][f"{name}_seconds"]["p99"][0]
        axes.annotate(str(value), (at, y), textcoords="offset points", xytext=(3, 4), fontsize=7, color=INK)
    scale = "log" if all(value > 0 for line in axes.lines for value in line.get_ydata()) else "linear"
    axes.set(xlabel="output tokens/s", ylabel=label, yscale=scale, xlim=(0, None))
    axes.legend(frameon=False, fontsize=8)


def draw_cumulated(axes, outcomes: Sequence[dict]) -> None:
    """The share of requests answered within a time: from the intended send time, and from the actual one."""
    complete = [one for one in outcomes if one["token_times"] and one["status"] == 200 and not one["error"]]
    for begins, colour, style in (("intended", BLUE, "-"), ("sent", ORANGE, "--")):
        values = sorted(1e3 * (one["token_times"][0] - one[begins]) for one in complete)
        shares = [(rank + 1) / len(values) for rank in range(len(values))]
        axes.step(values, shares, where="post", color=colour, linestyle=style, label=f"from {begins} time")
    axes.set(xlabel="time to first token, ms", ylabel="share of requests", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=8)


def draw_timeline(axes, outcomes: Sequence[dict]) -> None:
    """Each request in order: its wait for the first token, then its tokens."""
    for row, one in enumerate(outcomes):
        first = one["token_times"][0] if one["token_times"] else one["ended"]
        axes.plot([one["intended"], first], [row, row], color=GREY, linewidth=0.8)
        axes.plot([first, one["ended"]], [row, row], color=BLUE, linewidth=1.2)
    axes.plot([], [], color=GREY, label="waits for the first token")
    axes.plot([], [], color=BLUE, label="its tokens come")
    axes.set(xlabel="seconds since the run began", ylabel="request")
    axes.legend(frameon=False, fontsize=8)
