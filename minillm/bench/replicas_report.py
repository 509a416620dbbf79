"""The tables of `minillm bench fleet`. Built in chapter 22."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Column = tuple[str, Callable[[dict], str]]

NAMES = {
    "process_of_its_own_seconds": "a replica in a process of its own, s",
    "first_replica_seconds": "the first replica that the zygote makes, s",
    "of_which_zygote": "the zygote's part of it, s",
    "next_replica_seconds": "the next replica, s",
    "replica_memory_mib": "memory of a replica, MiB",
    "ttft_seconds_768_tokens": "time to first token of 768 tokens, s",
    "kills": "replicas killed while they stream",
    "failovers": "requests that went on elsewhere",
    "streams": "streams",
    "tokens_checked": "tokens checked",
    "tokens_lost_or_doubled": "tokens lost or doubled",
    "pause_seconds": "pause of a stream, s",
    "token_interval_seconds": "interval between tokens, s",
}
MOVES: Sequence[Column] = (
    ("pause, ms", lambda one: f"{one['pause_seconds'] * 1e3:.1f}"),
    ("in token intervals", lambda one: f"{one['pause_in_token_intervals']:.1f}"),
    ("most steps of the destination", lambda one: f"{one['destination_steps_most']:,}"),
    ("moved with keys and values", lambda one: f"{one['took_in']:,} of {one['moves']:,}"),
    ("KiB moved", lambda one: f"{one['bytes'] / 1024:,.0f}"),
)
ROUTES: Sequence[Column] = (
    ("prompt tokens found", lambda one: f"{one['hit_rate']:.0%}"),
    ("TTFT P50, ms", lambda one: f"{one['ttft_seconds_median'] * 1e3:.1f}"),
    ("TTFT P99, ms", lambda one: f"{one['ttft_seconds_p99'] * 1e3:.1f}"),
)
CASES = {"migration": ("transport and context", MOVES), "routing": ("router", ROUTES)}


def tables(measured: dict) -> list:
    """One table a part (rich renderables)."""
    from rich.table import Table

    made = []
    for part, figures in measured["figures"].items():
        title = f"{part}, {measured['workload']['model']}, {measured['hardware']['name']}"
        first, columns = CASES.get(part, ("figure", (("value", _told),)))
        table = Table(first, *(name for name, _ in columns), title=title)
        for name, value in figures.items():
            table.add_row(NAMES.get(name, name.replace("_", " ")), *(tell(value) for _, tell in columns))
        made.append(table)
    return made


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_told(one)}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
