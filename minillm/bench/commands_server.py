"""`minillm bench server`. Built in chapter 24."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import Save, command_line, errors_in_one_line, keep_in, progress, show


def add_to(bench: typer.Typer) -> None:
    bench.command("server")(bench_server)


def bench_server(
    shape: Annotated[str, typer.Option(help="smollm2-135m or tinyworld; the weights are random.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    only: Annotated[
        str | None, typer.Option(metavar="PART,...", help="http, ttft, streams, overload, peers; all by default.")
    ] = None,
    transformers: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="An interpreter with transformers[serving]: `transformers serve` too."),
    ] = None,
    llama_server: Annotated[
        str | None, typer.Option(metavar="PROGRAM", help="llama.cpp's llama-server, built for this machine: it too.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this one: transformers, 'transformers, continuous batching', llama.cpp. May be repeated.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=16, help="At once.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    output_tokens: Annotated[int, typer.Option(min=2)] = 64,
    overload_seconds: Annotated[float, typer.Option(min=1.0)] = 20.0,
    repeats: Annotated[int, typer.Option(help="Of each, in turns; at least 5.")] = 5,
    save: Save = None,
) -> None:
    """What HTTP costs beside `LLM.generate`, the server under 256 streams and ten times its capacity, and other
    servers on the same weights.

    `minillm bench server --only peers --transformers PYTHON --llama-server PROGRAM`
    """
    with errors_in_one_line():
        from .server import report
        from .server.peers import Programs
        from .server.run import HTTP_ROUNDS, PARTS, Workload, run

        parts = tuple(name.strip() for name in only.split(",")) if only else PARTS
        workload = Workload(
            shape,
            dtype,
            requests,
            prompt_tokens,
            output_tokens,
            overload_seconds=overload_seconds,
            repeats=repeats,
            parts=parts,
        )
        programs = Programs(transformers, llama_server, tuple(peer or ()))
        rounds = {"http": 2 * HTTP_ROUNDS * repeats + 2, "ttft": repeats + 1, "streams": 1, "overload": 2 * repeats + 1}
        rounds["peers"] = 2 * (repeats + 1) * (1 + len(programs.peers)) if programs.peers else 0
        with progress("measuring", sum(rounds[part] for part in workload.parts)) as advance:
            measured = run(workload, programs, command_line(), on_run=advance, keep=keep_in(save))
        show(report.tables, measured, save)
