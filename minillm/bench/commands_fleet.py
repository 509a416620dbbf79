"""`minillm bench fleet-sim`. Built in chapter 22."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import Save, command_line, errors_in_one_line, keep_in, progress, show


def add_to(bench: typer.Typer) -> None:
    bench.command("fleet-sim")(bench_fleet_sim)


def bench_fleet_sim(
    requests: Annotated[int, typer.Option(min=1, help="Of the large run.")] = 1_000_000,
    replicas: Annotated[int, typer.Option(min=1, help="Of the large run.")] = 1_000,
    rate: Annotated[float, typer.Option(help="Requests/s for each replica, in the large run.")] = 0.6,
    kind: Annotated[
        str, typer.Option(help="conversation, toolagent or synthetic: Mooncake's traces.")
    ] = "conversation",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Routers of the large run; may be given again; power_of_two and prefix_aware by default."),
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="PART,...", help="scale, check, papers; all by default.")] = None,
    paper: Annotated[
        list[str] | None, typer.Option(help="distserve, llumnix, mooncake, preble; may be given again; all by default.")
    ] = None,
    save: Save = None,
) -> None:
    """A fleet on the virtual clock: a thousand replicas and a million requests, the coarse model beside the real
    scheduler, and what four papers report about routing, migration and disaggregation."""
    with errors_in_one_line():
        from .fleet.run import Workload, num_cases, run, tables

        default = Workload()
        parts = tuple(name.strip() for name in only.split(",")) if only else default.parts
        workload = Workload(
            requests, replicas, rate, kind, tuple(policy or default.policies), parts, tuple(paper or default.papers)
        )
        with progress("simulating", num_cases(workload)) as advance:
            measured = run(workload, command_line(), on_run=advance, keep=keep_in(save))
        show(tables, measured, save)
