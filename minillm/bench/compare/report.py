"""The comparison as tables and as one plot. Built in chapter 14."""

from __future__ import annotations

import json
from pathlib import Path

# Okabe and Ito's colours, told apart under every common kind of colour blindness.
COLOURS = {"transformers": "#E69F00", "llama.cpp": "#009E73", "vllm": "#CC79A7", "vllm-eager": "#56B4E9"}
TITLE = "Tokens decoded (decode, int8, int4), of the prompt (prompt) or generated (offline) a second"
INK, GREY = "#24292F", "#7A8088"


def tables(measured: dict) -> list:
    """The limits first, then each case, then what was checked (rich renderables)."""
    from rich.table import Table

    ceilings, found = measured["ceilings"], measured["figures"]
    limit = Table("ceiling", "measured", title=measured["hardware"]["name"])
    limit.add_row("read", f"{ceilings['read_bytes_per_second'] / 1e9:.1f} GB/s")
    limit.add_row("copy, read + written", f"{ceilings['copy_bytes_per_second'] / 1e9:.1f} GB/s")
    for dtype, rate in ceilings["matmul_flops_per_second"].items():
        limit.add_row(f"matrix product, {dtype}", f"{rate / 1e9:.0f} GFLOP/s")
    speed = Table(title=TITLE)
    for column in ("case", "* best peer", "tokens/s", "± half range", "of limit", "minillm over it"):
        speed.add_column(column, no_wrap=column in ("case", "* best peer"))
    for name, case in found["cases"].items():
        ours = case["engines"]["minillm"]["tokens_per_second"]
        for engine, f in case["engines"].items():
            ratio = "" if engine == "minillm" else f"{ours / f['tokens_per_second']:.2f}×"
            speed.add_row(
                name if engine == "minillm" else "",
                f"{'*' if engine == case.get('best_peer') else ' '} {engine}",
                f"{f['tokens_per_second']:,.1f}",
                f"{f['spread'] / 2:.0%}",
                f"{f['share_of_limit']:.0%}",
                ratio,
                end_section=engine == list(case["engines"])[-1],
            )
    checks = Table("outputs checked", "engine", "largest gap", "allowed", "equal to minillm's")
    for dtype, engines in found["checks"].items():
        for engine, f in engines.items():
            equal = f"{f['equal_to_minillm']:.0%}" if "equal_to_minillm" in f else "–"
            checks.add_row(dtype, engine, f"{f['largest_gap']:.3g}", f"{f['tolerance']:g}", equal)
    left = Table("left out", "why")
    for name, why in found["left_out"].items():
        left.add_row(name, why)
    phases = _phases(found["cases"])
    shown = (limit, speed, phases, checks, left)
    return [table for table in shown if table.row_count]


def _phases(cases: dict[str, dict]):
    """Where minillm's time goes; results from before 2026-11-28 do not say."""
    from rich.table import Table

    from .phases import PHASES, REST

    table = Table("of minillm's time", *PHASES, REST, "products, GFLOP/s", "of limit", "weights, GB/s", "of limit")
    for name, case in cases.items():
        if not (phases := case.get("phases")):
            continue
        total = sum(phases["seconds"].values())
        row = [f"{seconds / total:.0%}" for seconds in phases["seconds"].values()]
        row += [f"{phases['product_flops_per_second'] / 1e9:,.0f}", f"{phases['product_share_of_flops']:.0%}"]
        if "weight_bytes_per_second" in phases:
            row += [f"{phases['weight_bytes_per_second'] / 1e9:.1f}", f"{phases['weight_share_of_bandwidth']:.0%}"]
        table.add_row(name, *row)
    return table


def plot(path: Path) -> Path:
    """Draw the ratios of the result in `path` into a PNG beside it: a bar for each case, minillm over the best peer.

    Raises ValueError for a file that is not a result of this command, or has no case with a peer.
    """
    try:
        measured = json.loads(path.read_text())
        cases = {name: case for name, case in measured["figures"]["cases"].items() if "ratio_to_best_peer" in case}
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no result of `minillm bench compare`; make one with --save FOLDER") from None
    if not cases:
        raise ValueError(f"{path} has no case that was compared with a peer; run `minillm bench compare` to its end")
    figure = draw(cases, measured)
    figure.savefig(target := path.with_suffix(".png"), dpi=160)
    return target


def draw(cases: dict[str, dict], measured: dict):
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8.0, 1.3 + 0.28 * len(cases)), layout="constrained")
    axes = figure.subplots()
    names, ratios = list(cases), [case["ratio_to_best_peer"] for case in cases.values()]
    best = [case["best_peer"] for case in cases.values()]
    axes.barh(names, ratios, color=[COLOURS[peer] for peer in best])
    for name, case in cases.items():  # from the least to the largest ratio of the turns
        ours, theirs = (measured["samples_seconds"][f"{name}/{engine}"] for engine in ("minillm", case["best_peer"]))
        in_turns = [their_time / our_time for our_time, their_time in zip(ours, theirs)]
        axes.plot([min(in_turns), max(in_turns)], [name, name], color=INK, linewidth=0.8)
    axes.set_xlim(0, 1.2 * max(1.0, *ratios))  # a turn that the machine delayed may lie beyond
    for name, ratio in zip(names, ratios):
        at = axes.get_yaxis_transform()
        axes.text(0.99, name, f"{ratio:.2f}×", transform=at, ha="right", va="center", color=INK, fontsize=8)
    axes.axvline(1.0, color=GREY, linewidth=1.2)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s of minillm over those of the best peer")
    axes.set_title(f"{measured['workload']['shape']}, {measured['hardware']['name']}", loc="left", fontsize=10)
    axes.legend(
        handles=[Patch(color=COLOURS[peer], label=peer) for peer in COLOURS if peer in best],
        title="the best peer",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8,
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure
