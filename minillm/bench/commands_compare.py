"""`minillm bench compare`. Built in chapter 14."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import Save, command_line, errors_in_one_line, keep_in, log, progress, show


def add_to(bench: typer.Typer) -> None:
    bench.command("compare")(bench_compare)


def bench_compare(
    vllm: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="The interpreter of an environment with vLLM, whose pins differ."),
    ] = None,
    shape: Annotated[str, typer.Option(help="smollm2-135m or tinyworld; the weights are random.")] = "smollm2-135m",
    dtype: Annotated[
        list[str] | None, typer.Option(help="May be given again; bfloat16 and float32 by default.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="decode, prompt, offline, int8, int4, or one of a group, such as decode-8 or prompt-1024.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="transformers, llama.cpp, vllm, vllm-eager; may be given again; all by default."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of each engine, in turns; at least 5.")] = 5,
    quick: Annotated[bool, typer.Option(help="Fewer and shorter cases: a try, not a measurement.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Measure nothing; draw this result into a PNG beside it.")
    ] = None,
    save: Save = None,
) -> None:
    """minillm, transformers, llama.cpp and vLLM on the same weights and requests, in turns, outputs checked first."""
    with errors_in_one_line():
        from .compare import report

        if plot is not None:
            log.print(f"drawn into {report.plot(plot)}", highlight=False)
            return
        from .compare import run
        from .compare.workloads import DEFAULT, Workload

        workload = Workload(
            shape,
            tuple(dtype or DEFAULT.dtypes),
            only=tuple(name.strip() for name in only.split(",")) if only else (),
            peers=tuple(peer or ()),
            repeats=repeats,
        )
        workload = workload.quick() if quick else workload
        with progress("comparing", run.num_runs(workload, vllm)) as advance:
            measured = run.run(workload, vllm, command_line(), on_run=advance, keep=keep_in(save))
        show(report.tables, measured, save)
        if save:
            from .measure import path_of

            log.print(f"drawn into {report.plot(path_of(measured, save))}", highlight=False)
