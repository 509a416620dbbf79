"""`minillm bench ...`: one command a measurement. Built in chapter 00."""

from __future__ import annotations

from typing import Annotated

import typer

from . import commands_compare, commands_engine, commands_gpu, commands_moe, commands_serve, commands_server
from .console import (
    Backend,
    Device,
    Model,
    PipelineParallel,
    Save,
    TensorParallel,
    command_line,
    errors_in_one_line,
    keep_in,
    log,
    progress,
    show,
)

# torch and transformers take seconds to import: every command imports what it needs itself, so that help is instant.

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure this machine: the limit first, then the figure with its share of it.\n\n"
    "Results are JSON files with hardware, versions and raw samples; `--save FOLDER` says where.",
)


@bench.callback()
def warn_when_busy() -> None:
    import os

    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load > cores / 2:
        log.print(
            f"This machine is busy: {load:.1f} of {cores} cores were at work over the last minute. "
            "Times will be too long, and unevenly so.",
            style="yellow",
            highlight=False,
        )


@bench.command("decode")
def bench_decode(
    shape: Annotated[str, typer.Option(help="smollm2-135m or tinyworld; the weights are random.")] = "smollm2-135m",
    dtype: Annotated[
        list[str] | None, typer.Option(help="May be given again; float32 and bfloat16 by default.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    output_tokens: Annotated[int, typer.Option(min=3)] = 64,
    repeats: Annotated[int, typer.Option(help="Of each engine, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Decode at batch 1: minillm, transformers, llama.cpp where it is installed; and where the rest of a step goes."""
    with errors_in_one_line():
        from . import decode, llama_cpp

        workload = decode.Workload(shape, tuple(dtype or decode.Workload.dtypes), prompt_tokens, output_tokens, repeats)
        rounds = len(workload.dtypes) * ((2 + llama_cpp.installed()) * (repeats + 1) + 1) + 1
        with progress("measuring", rounds) as advance:
            measured = decode.run(workload, device, command_line(), on_run=advance, keep=keep_in(save))
        show(decode.tables, measured, save)


@bench.command("bits")
def bench_bits(
    shape: Annotated[str, typer.Option(help="smollm2-135m or tinyworld; the weights are random.")] = "smollm2-135m",
    quantization: Annotated[
        list[str] | None, typer.Option(help="May be given again; int8, int4 and fp8 by default.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=2, help="May be given again; 2, 4, 8, 16 and 32 by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of the activations.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Of each engine, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Decode with low-bit weights: against our own bf16, transformers, llama.cpp, and over the batch sizes."""
    with errors_in_one_line():
        from . import few_bits

        default = few_bits.Workload()
        workload = few_bits.Workload(
            shape,
            dtype,
            tuple(quantization or default.quantizations),
            batches=tuple(batch or default.batches),
            repeats=repeats,
        )
        with progress("measuring", few_bits.num_runs(workload)) as advance:
            measured = few_bits.run(workload, device, command_line(), on_run=advance, keep=keep_in(save))
        show(few_bits.tables, measured, save)


@bench.command("kv")
def bench_kv(
    shape: Annotated[
        str, typer.Option(help="smollm2-135m or another of `bench decode`; the weights are random.")
    ] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, of the weights.")] = "bfloat16",
    context: Annotated[
        list[int] | None, typer.Option(min=16, help="Tokens; may be given again; 2048, 4096 and 8192 by default.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    repeats: Annotated[int, typer.Option(help="Of each cache, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Decode far into a text with the KV cache in 8 bits: bytes, tokens/s, and how far the logits move."""
    with errors_in_one_line():
        from . import kv_cache

        default = kv_cache.Workload()
        workload = kv_cache.Workload(shape, dtype, tuple(context or default.contexts), batch, repeats=repeats)
        with progress("measuring", kv_cache.num_runs(workload)) as advance:
            measured = kv_cache.run(workload, device, command_line(), on_run=advance, keep=keep_in(save))
        show(kv_cache.tables, measured, save)


@bench.command("speculation")
def bench_speculation(
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="May be given again; 1, 2, 4, 8, 16 and 32 by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    ngram_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens in a step, by n-grams.")] = 6,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens in a step, by the draft model.")] = 3,
    repeats: Annotated[int, typer.Option(help="Of each way, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Speculation against plain decoding: copying, JSON, stories; over the batch sizes; beside the formula."""
    with errors_in_one_line():
        from . import speculation

        default = speculation.Workload()
        workload = speculation.Workload(
            num_ngram_tokens=ngram_tokens,
            num_draft_tokens=draft_tokens,
            dtype=dtype,
            batches=tuple(batch or default.batches),
            repeats=repeats,
        )
        with progress("measuring", speculation.num_runs(workload)) as advance:
            measured = speculation.run(workload, device, command_line(), on_run=advance, keep=keep_in(save))
        show(speculation.tables, measured, save)


@bench.command("structured")
def bench_structured(
    model: Annotated[str, typer.Option(help="A bundled name or a folder.")] = "tinyworld",
    batch: Annotated[list[int] | None, typer.Option(min=1, help="May be given again; 1 and 16 by default.")] = None,
    documents: Annotated[int, typer.Option(min=1, help="Of the JSON task, at each temperature.")] = 50,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    repeats: Annotated[int, typer.Option(help="Of each, in turns; at least 5.")] = 9,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Grammars: what masks cost beside a step, what jumping over forced text saves, how many answers are valid."""
    with errors_in_one_line():
        from . import structured

        default = structured.Workload()
        workload = structured.Workload(model, tuple(batch or default.batches), documents, dtype, repeats)
        with progress("measuring", structured.num_runs(workload)) as advance:
            measured = structured.run(workload, device, command_line(), on_run=advance, keep=keep_in(save))
        show(structured.tables, measured, save)


@bench.command("offload")
def bench_offload(
    shape: Annotated[
        str, typer.Option(help="smollm2-135m or another of `bench decode`; the weights are random.")
    ] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of the layers, kept on the host and streamed.")] = 0.5,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    repeats: Annotated[int, typer.Option(help="Of each engine, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Weights streamed from host memory at every step, beside what the bus allows."""
    with errors_in_one_line():
        from . import offload

        workload = offload.Workload(shape, dtype, share, batch, repeats=repeats)
        with progress("measuring", 3 * (repeats + 1)) as advance:
            measured = offload.run(workload, device, command_line(), on_run=advance, keep=keep_in(save))
        show(lambda measured: [offload.table(measured)], measured, save)


@bench.command("tasks")
def bench_tasks(
    model: Model = "tinyworld",
    documents: Annotated[int, typer.Option(min=1, help="Of each task.")] = 200,
    task: Annotated[list[str] | None, typer.Option(help="May be given again; all by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of the held-out text; not 0, which training reads.")] = 1,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """How many answers a model gets exactly right, on fresh text of the corpus."""
    with errors_in_one_line():
        from .. import LLM
        from ..device import resolve_device
        from ..zoo import corpus
        from . import tasks

        chosen = tuple(task or corpus.WRITERS)
        llm = LLM(model, device=device)
        with progress("asking", documents * len(chosen)) as advance:
            scores = tasks.evaluate(llm, documents, chosen, advance, seed)
        measured = tasks.result(scores, model, documents, seed, command_line(), resolve_device(device))
        show(tasks.tables, measured, save)


@bench.command("quality")
def bench_quality(
    model: Model = "tinyworld",
    documents: Annotated[int, typer.Option(min=1, help="Of each task and seed, for perplexity.")] = 20,
    asked: Annotated[int, typer.Option(min=0, help="Documents of each task whose questions are asked.")] = 20,
    seeds: Annotated[int, typer.Option(min=1, max=8, help="Of calibration and of fresh text, where they matter.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help="Candidates whose names begin so; may be given again.")] = None,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """What fewer bits cost: perplexity and right answers for every format and method, with outliers and without."""
    with errors_in_one_line():
        from . import quality

        workload = quality.Workload(model, documents, asked, seeds, only=tuple(only or ()))
        with progress("measuring", quality.num_runs(workload)) as advance:
            measured = quality.run(workload, device, command_line(), on_run=advance)
        show(quality.tables, measured, save)


@bench.command("ladder")
def bench_ladder(
    model: Model = "tinyworld",
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    repeats: Annotated[int, typer.Option(help="Of each rung, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Every rung of `minillm tour`, measured: in turns, outputs checked first."""
    with errors_in_one_line():
        from . import tour as ladder_tour
        from .ladder import RUNGS

        with progress("climbing", len(RUNGS) * (repeats + 1)) as advance:
            measured = ladder_tour.bench(model, device, max_tokens, repeats, command_line(), on_run=advance)
        show(lambda measured: [ladder_tour.bench_table(measured)], measured, save)


@bench.command("throughput")
def bench_throughput(
    shape: Annotated[
        str,
        typer.Option(
            help="tinyworld (the bundled model), or with random weights smollm2-135m, qwen3-0.6b, "
            "qwen2-0.5b, llama-3.1-8b."
        ),
    ] = "tinyworld",
    requests: Annotated[int, typer.Option(min=1)] = 16,
    shortest: Annotated[int, typer.Option(min=1, help="Prompts and outputs have this many tokens at least.")] = 16,
    longest: Annotated[int, typer.Option(min=16, help="And at most this many.")] = 256,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    tensor_parallel_size: TensorParallel = 1,
    pipeline_parallel_size: PipelineParallel = 1,
    distributed_executor_backend: Backend = "mp",
    beside: Annotated[
        int | None,
        typer.Option(min=1, help="Busy processes: minillm beside so many of them against minillm alone, in turns."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of each engine, in turns; at least 5.")] = 5,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Many requests at once: minillm against the best that transformers.generate reaches, and what scheduling costs;
    or minillm on a loaded machine."""
    with errors_in_one_line():
        from ..device import resolve_device
        from . import beside as loaded, throughput

        split = (tensor_parallel_size, pipeline_parallel_size, distributed_executor_backend)
        workload = throughput.Workload(shape, requests, shortest, longest, dtype, repeats, 0, *split)
        if beside is not None:
            with progress("measuring", loaded.num_rounds(workload)) as advance:
                measured = loaded.run(workload, beside, device, command_line(), on_run=advance, keep=keep_in(save))
            show(loaded.tables, measured, save)
            return
        with progress("measuring", throughput.num_rounds(workload, resolve_device(device))) as advance:
            measured = throughput.run(workload, device, command_line(), on_run=advance, keep=keep_in(save))
        show(throughput.tables, measured, save)


commands_engine.add_to(bench)
commands_compare.add_to(bench)
commands_gpu.add_to(bench)
commands_moe.add_to(bench)
commands_serve.add_to(bench)
commands_server.add_to(bench)
