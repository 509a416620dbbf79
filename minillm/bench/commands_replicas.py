"""`minillm bench fleet`. Built in chapter 22."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import Save, command_line, errors_in_one_line, keep_in, progress, show


def add_to(bench: typer.Typer) -> None:
    bench.command("fleet")(bench_fleet)


def bench_fleet(
    model: Annotated[str, typer.Option(help="A bundled name or a folder.")] = "tinyworld",
    only: Annotated[
        str | None, typer.Option(metavar="PART,...", help="cold start, failover, migration, routing; all by default.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=2, help="While replicas are killed.")] = 2,
    kills: Annotated[int, typer.Option(min=1, help="Replicas that are killed while they stream.")] = 20,
    moves: Annotated[int, typer.Option(min=1, help="Migrations of each kind and context length.")] = 10,
    requests: Annotated[int, typer.Option(min=8, help="Of each router policy.")] = 96,
    save: Save = None,
) -> None:
    """Replicas that are killed, moved from and routed to: pauses, bytes, hit rates, and what a cold start takes.

    `minillm bench fleet --only failover --kills 200`
    """
    with errors_in_one_line():
        from .replicas import PARTS, Workload, run
        from .replicas_report import tables

        parts = tuple(name.strip() for name in only.split(",")) if only else PARTS
        workload = Workload(model, replicas, kills, moves=moves, requests=requests, parts=parts)
        with progress("measuring", len(parts)) as advance:
            measured = run(workload, command_line(), on_run=advance, keep=keep_in(save))
        show(tables, measured, save)
