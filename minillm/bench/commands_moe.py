"""`minillm bench moe`. Built in chapter 21."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import Save, command_line, errors_in_one_line, keep_in, progress, show


def add_to(bench: typer.Typer) -> None:
    bench.command("moe")(bench_moe)


def bench_moe(
    shape: Annotated[str, typer.Option(help="qwen3-moe-1b or toy; the weights are random.")] = "qwen3-moe-1b",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences at once. May be given again; 1 and 16 by default.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 16,
    output_tokens: Annotated[int, typer.Option(min=3)] = 16,
    quantization: Annotated[
        str | None, typer.Option(help="Of minillm's models, such as int4; the others stay as they are.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of each engine, in turns; at least 5.")] = 5,
    save: Save = None,
) -> None:
    """Decode with a mixture of experts: minillm, a dense model of equal active size, transformers, and llama.cpp where
    it is installed."""
    with errors_in_one_line():
        from . import moe

        batches = tuple(batch or moe.Workload.batches)
        workload = moe.Workload(shape, dtype, batches, prompt_tokens, output_tokens, quantization, repeats)
        with progress("measuring", moe.num_runs(workload)) as advance:
            measured = moe.run(workload, "cpu", command_line(), on_run=advance, keep=keep_in(save))
        show(moe.tables, measured, save)
