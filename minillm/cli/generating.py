"""`minillm generate`: a text, streamed as it is made. Built in chapter 00."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench.console import Backend, Device, Model, PipelineParallel, TensorParallel, errors_in_one_line, log


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; with --chat, what you say.")],
    model: Model = "tinyworld",
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 means all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Over 1.0, what was said becomes less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed says the same.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given again.")] = None,
    lora: Annotated[Path | None, typer.Option(help="The folder of an adapter, as PEFT writes it.")] = None,
    tensor_parallel_size: TensorParallel = 1,
    pipeline_parallel_size: PipelineParallel = 1,
    distributed_executor_backend: Backend = "mp",
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
) -> None:
    """Say something, streamed as it is made; speed comes at the end, on stderr.

    `minillm generate "Once upon a time"`

    `minillm generate --chat --temperature 0 "What does a cow say?"`

    `minillm generate --model Qwen/Qwen3-0.6B --seed 1 --top-p 0.9 "The sea"`
    """
    with errors_in_one_line():
        import time

        from minillm import LLM, LoRARequest, SamplingParams

        shape = dict(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty
        )
        params = SamplingParams(**shape, seed=seed, stop=stop or None, max_tokens=max_tokens)
        options = dict(device=device, dtype=dtype, enable_lora=lora is not None, max_loras=1, max_lora_rank=64)
        options |= dict(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            distributed_executor_backend=distributed_executor_backend,
        )
        llm = LLM(model, **options)
        adapter = lora and LoRARequest(lora.name or "adapter", 1, lora)
        if adapter:
            llm.add_lora(adapter)
        if chat:
            ids = llm.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            request = {"prompt_token_ids": ids}
        else:
            request = prompt
            print(prompt, end="", flush=True)
        started, first, count = time.perf_counter(), None, 0
        for delta in llm.stream(request, params, lora_request=adapter):
            first = first or time.perf_counter() - started
            count += len(delta.token_ids)
            print(delta.text, end="", flush=True)
        print()
        log.print(report_speed(count, first, time.perf_counter() - started), style="dim", highlight=False)


def report_speed(count: int, first: float | None, total: float) -> str:
    """As in "64 tokens, 210.3 tokens/s after the first, first token after 4 ms"."""
    if first is None:
        return "0 tokens"
    rate = f", {(count - 1) / (total - first):,.1f} tokens/s after the first" if count > 1 and total > first else ""
    return f"{count} tokens{rate}, first token after {1e3 * first:,.0f} ms"
