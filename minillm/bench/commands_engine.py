"""`minillm bench prefix` and others that look at one thing: the scheduler, a step, each kernel. Built in chapter 09."""

from __future__ import annotations

from typing import Annotated

import typer

from . import commands_fleet, commands_replicas
from .console import Device, Model, Save, command_line, errors_in_one_line, keep_in, progress, show


def add_to(bench: typer.Typer) -> None:
    bench.command("prefix")(bench_prefix)
    bench.command("scheduler")(bench_scheduler)
    bench.command("host")(bench_host)
    bench.command("simulator")(bench_simulator)
    bench.command("step")(bench_step)
    bench.command("kernels")(bench_kernels)
    bench.command("lora")(bench_lora)
    commands_fleet.add_to(bench)
    commands_replicas.add_to(bench)


def bench_prefix(
    prompt_tokens: Annotated[int, typer.Option(min=32, help="Shared by all requests.")] = 512,
    model: Model = "tinyworld",
    repeats: Annotated[int, typer.Option(help="Cold and warm, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Time to the first token after a shared prompt, with its blocks in the prefix cache and without."""
    with errors_in_one_line():
        from . import serving

        with progress("measuring", 2 * (repeats + 1)) as advance:
            measured = serving.run_prefix(model, prompt_tokens, repeats, device, command_line(), on_run=advance)
        show(lambda measured: [serving.prefix_table(measured)], measured, save)


def bench_scheduler(
    repeats: Annotated[int, typer.Option(help="Of each queue length, in turns; at least 5.")] = 5, save: Save = None
) -> None:
    """What a step costs the scheduler, by how many requests wait and how many have finished; no model runs."""
    with errors_in_one_line():
        from . import serving

        with progress("measuring", len(serving.QUEUES) * (repeats + 1)) as advance:
            measured = serving.run_scheduler(repeats, command_line(), on_run=advance)
        show(lambda measured: [serving.scheduler_table(measured)], measured, save)


def bench_host(
    model: Model = "tinyworld-draft",
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests that decode; may be given again; 1, 16, 64 and 256 by default."),
    ] = None,
    arrivals: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Running requests of which some end and others join in each step; "
            "may be given again; 64 and 256 by default.",
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    steps: Annotated[int, typer.Option(min=1, help="In each run.")] = 128,
    clock: Annotated[
        str, typer.Option(help="wall, or cpu: for a busy machine, the time that the process was on a core.")
    ] = "wall",
    repeats: Annotated[int, typer.Option(help="Of each batch size, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """The host's work of a step on one core (schedule, build, update), by how many requests run, and with arrivals."""
    with errors_in_one_line():
        from . import host

        default = host.Workload()
        workload = host.Workload(
            model,
            tuple(batch or default.batches),
            tuple(arrivals or default.arrivals),
            prompt_tokens,
            steps=steps,
            clock=clock,
            repeats=repeats,
        )
        with progress("measuring", host.num_runs(workload)) as advance:
            measured = host.run(workload, device, command_line(), on_run=advance, keep=keep_in(save))
        show(host.tables, measured, save)


def bench_simulator(
    model: Model = "tinyworld",
    repeats: Annotated[int, typer.Option(help="At least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """The simulator's time for a trace against the engine's own, its cost model fitted on another trace."""
    with errors_in_one_line():
        from . import serving

        with progress("measuring", 2 * (repeats + 1)) as advance:
            measured = serving.run_simulator(model, repeats, device, command_line(), on_run=advance)
        show(lambda measured: [serving.simulator_table(measured)], measured, save)


def bench_step(
    shape: Annotated[
        str, typer.Option(help="A shape with random weights: smollm2-135m, tinyworld, qwen3-0.6b, qwen2-0.5b.")
    ] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    output_tokens: Annotated[int, typer.Option(min=3)] = 64,
    rung: Annotated[
        list[str] | None, typer.Option(help="Only these rungs, by their names; may be given again.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of each rung, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """The ablation ladder: the same step with one more optimisation on each rung."""
    with errors_in_one_line():
        from ..device import resolve_device
        from . import step

        workload = step.Workload(shape, dtype, batch, output_tokens=output_tokens, repeats=repeats)
        rungs = step.rungs_for(resolve_device(device), tuple(rung or ()))
        with progress("climbing", len(rungs) * (repeats + 2)) as advance:
            measured = step.run(workload, device, command_line(), rungs=rungs, on_run=advance, keep=keep_in(save))
        show(step.tables, measured, save)


def bench_kernels(
    family: Annotated[
        list[str] | None,
        typer.Option(
            help="elementwise, matmul, prefill, decode (GPU); linear, c-decode (CPU). "
            "May be given again; those of the device by default."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    scale: Annotated[int, typer.Option(min=1, help="Shrinks every case, for the interpreter: 64.")] = 1,
    repeats: Annotated[int, typer.Option(help="Of each candidate, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Every kernel alone, against torch's own and against the limit; outputs checked first."""
    with errors_in_one_line():
        from ..device import resolve_device, resolve_dtype
        from . import kernels

        workload, where = kernels.Workload(tuple(family or ()), dtype, scale, repeats), resolve_device(device)
        count = len(kernels.cases_of(workload.families, scale, where, resolve_dtype(dtype, where)))
        with progress("measuring", count) as advance:
            measured = kernels.run(workload, device, command_line(), on_run=advance, keep=keep_in(save))
        show(kernels.tables, measured, save)


def bench_lora(
    shape: Annotated[
        str, typer.Option(help="A shape with random weights (smollm2-135m, qwen3-0.6b, qwen2-0.5b), or tinyworld.")
    ] = "smollm2-135m",
    adapters: Annotated[int, typer.Option(min=1, help="With random weights.")] = 8,
    rank: Annotated[int, typer.Option(min=1, max=64, help="Of every adapter.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Handed over at once; the adapters take turns.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    output_tokens: Annotated[int, typer.Option(min=2)] = 32,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "float32",
    repeats: Annotated[int, typer.Option(help="Of each case, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Requests with different LoRA adapters in one batch, against one adapter at a time; outputs checked first."""
    with errors_in_one_line():
        from . import lora

        workload = lora.Workload(shape, adapters, rank, requests, prompt_tokens, output_tokens, dtype, repeats)
        with progress("measuring", lora.num_runs(workload)) as advance:
            measured = lora.run(workload, device, command_line(), on_run=advance, keep=keep_in(save))
        show(lora.tables, measured, save)
