"""`minillm bench server` as tables. Built in chapter 24."""

from __future__ import annotations

from collections.abc import Sequence


def tables(measured: dict) -> list:
    """Goals and figures, then each server beside the others (rich renderables)."""
    from rich.table import Table

    f, w = measured["figures"], measured["workload"]
    title = f"{w['shape']}, {w['dtype']}, {measured['hardware']['name']}"
    goals = Table("what", "measured", "goal", title=title)
    for row in _rows(f, w):
        goals.add_row(*row)
    found = [goals] if goals.row_count else []
    for at_once, servers in f.get("peers", {}).items():
        table = Table(
            "server",
            "tokens/s",
            "± half range",
            "TTFT p50, ms",
            "minillm over it",
            "95% interval",
            title=f"{at_once} at once",
        )
        for name, one in servers.items():
            cells = [f"{one['tokens_per_second']:,.1f}", f"{one['spread'] / 2:.0%}"]
            ratio = "" if name == "minillm" else f"{one['minillm_over_it']:.2f}×"
            bounds = "" if name == "minillm" else _bounds(one.get("minillm_over_it_interval"), ".2f", "×")
            table.add_row(name, *cells, f"{1e3 * one['ttft_p50_seconds']:.1f}", ratio, bounds)
        found.append(table)
    return found


def _rows(f: dict, w: dict):
    goals = f["goals"]
    if "http" in f:
        rates = f["http"]["tokens_per_second"]
        told = f"{f['http']['http_cost']:.1%} ({rates['offline']:,.0f} → {rates['http']:,.0f} tokens/s)"
        yield f"HTTP's cost at {w['requests']} at once", told, f"≤ {goals['http_cost']:.0%}"
        yield from _interval(f["http"].get("http_cost_interval"), ".1%")
    if "ttft" in f:
        one = f["ttft"]
        p50, p95 = ({name: 1e3 * s for name, s in one[f"{p}_seconds"].items()} for p in ("p50", "p95"))
        told = f"{1e3 * one['ttft_difference_seconds']:.2f} ms ({p50['offline']:.1f} → {p50['http']:.1f} ms)"
        yield "TTFT at 1, p50: HTTP adds", told, f"≤ {1e3 * goals['ttft_difference_seconds']:.0f} ms"
        yield from _interval([1e3 * seconds for seconds in one["ttft_difference_interval"]], ".2f", " ms")
        told = f"{p95['http'] - p95['offline']:.1f} ms ({p95['offline']:.1f} → {p95['http']:.1f} ms)"
        yield "the same, p95", told, "–"
    if "streams" in f:
        lag = 1e3 * f["streams"]["loop_lag_p99_seconds"]
        what = f"event loop's lag (p99), {w['streams']} streams"
        yield what, f"at most {lag:.1f} ms", f"< {1e3 * goals['loop_lag_p99_seconds']:.0f} ms"
    if "overload" in f:
        one = f["overload"]
        loads = ("uncongested", "overloaded")
        p99 = one.get("p99_seconds") or {name: one[name]["e2e_seconds"]["p99"][0] for name in loads}
        told = f"{one['overload_times_slower']:.2f}× ({p99['uncongested']:.2f} → {p99['overloaded']:.2f} s)"
        yield f"{w['overload']:g}× overload: p99 of the admitted", told, f"≤ {goals['overload_times_slower']:g}×"
        yield from _interval(one.get("overload_interval"), ".2f", "×")
        told = f"{one['num_admitted']:,} / {one['num_refused']:,} / {one['num_lost']}"
        yield "admitted / refused with 429 / lost", told, "– / – / 0"


def _interval(bounds: Sequence[float] | None, form: str, unit: str = ""):
    """A row for the bounds, where there are any."""
    if bounds:
        yield "95% interval of it", _bounds(bounds, form, unit), "–"


def _bounds(bounds: Sequence[float] | None, form: str, unit: str = "") -> str:
    """Results that were measured before 2026-11-28 have none."""
    return " to ".join(f"{bound:{form}}" for bound in bounds) + unit if bounds else "–"
