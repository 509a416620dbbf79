"""`minillm bench gpu`, and what belongs to it: `predict`, `rehearsal` and `multi-gpu`. Built in chapter 14."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import console
from .console import Device, Save, command_line, errors_in_one_line, keep_in, progress, show


def add_to(bench: typer.Typer) -> None:
    bench.command("gpu")(bench_gpu)
    bench.command("predict")(bench_predict)
    bench.command("rehearsal")(bench_rehearsal)
    bench.command("multi-gpu")(bench_multi_gpu)


def bench_gpu(
    out: Annotated[Path, typer.Option(help="Folder for results, logs and the summary.")],
    part: Annotated[
        list[str] | None, typer.Option(help="Parts whose names begin so; may be given again. All by default.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="No part runs beyond so many minutes from now.")
    ] = None,
    archive: Annotated[
        Path | None, typer.Option(help="A .tar.gz of the folder, written anew after every part.")
    ] = None,
    list_parts: Annotated[bool, typer.Option("--list", help="Only say which parts there are, in order.")] = False,
    toy: Annotated[bool, typer.Option(help="A few small parts, on any machine: does the command itself work?")] = False,
    device: Device = "cuda",
) -> None:
    """All that needs a GPU: the checks, then every measurement, each a process of its own."""
    with errors_in_one_line():
        from ..device import resolve_device
        from . import gpu

        chosen = [p for p in gpu.parts_of(out, toy, device) if not part or p.name.startswith(tuple(part))]
        if list_parts:
            console.out.print(gpu.list_table(chosen))
            return
        resolve_device(device)
        with progress("running", len(chosen)) as advance:
            summary = gpu.run(out, toy, device, tuple(part or ()), advance, minutes, archive)
        for table in gpu.tables(summary):
            console.out.print(table)
        if any(summary["parts"][p.name]["ended"] != "passed" for p in chosen):
            raise typer.Exit(1)


def bench_predict(
    gpu: Annotated[
        str, typer.Option(help="A GPU whose data sheet is in minillm/kernels/gpus.py: A100, L4, H100, H200.")
    ] = "H200",
    save: Save = None,
) -> None:
    """What `bench gpu` will measure on a GPU, from its data sheet; to be written down before the run."""
    with errors_in_one_line():
        from . import predictions

        show(lambda measured: [predictions.table(measured)], predictions.result(gpu, command_line()), save)


def bench_rehearsal(device: Device = "auto", save: Save = None) -> None:
    """Launches, operations, waits, specialisations and memory of the engine's steps:
    counted, to be compared with the rehearsal's."""
    with errors_in_one_line():
        from . import rehearsal

        with progress("counting", len(rehearsal.SCENARIOS)) as advance:
            measured = rehearsal.run(device, command_line(), on_run=advance, keep=keep_in(save))
        show(rehearsal.tables, measured, save)


def bench_multi_gpu(
    out: Annotated[Path, typer.Option(help="Folder for the JSON result, written anew after every split.")],
    shape: Annotated[
        str | None, typer.Option(help="A shape of `bench decode` with random weights, or a model by name.")
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Ranks of a stage x stages, as in 4x2; may be given again. All by default.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Of the offline throughput.")] = None,
    toy: Annotated[bool, typer.Option(help="Small, on any machine, with gloo: does the command itself work?")] = False,
    device: Device = "auto",
) -> None:
    """Tensor and pipeline parallel on several GPUs: tokens as on one, decode, prompts, throughput, all-reduce."""
    with errors_in_one_line():
        from dataclasses import replace

        from . import multi_gpu

        given = {"shape": shape, "splits": split and tuple(split), "dtype": dtype, "requests": requests}
        workload = multi_gpu.TOY if toy else multi_gpu.Workload()
        workload = replace(workload, **{name: value for name, value in given.items() if value is not None})
        with progress("measuring", len(workload.splits) or 1) as advance:
            measured = multi_gpu.run(workload, device, command_line(), on_run=advance, keep=keep_in(out))
        show(lambda measured: [multi_gpu.table(measured)], measured, out)
