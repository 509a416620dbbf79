"""What the engine's steps ask of a GPU, counted on a real one: launches, operations, waits, specialisations, memory.
Built in chapter 14.

The tests rehearse the engine on a GPU that is only pretended, and assert these counts. Here the same numbers are taken
where there is one (the bundled model, a scenario each), to see that the pretence is true. `launches_a_step` are kernels
that ran, replayed ones too; `operations_a_step` what torch's dispatcher was asked for; `specialisations` are kernels
that Triton has built in this process since it started; `cache_bytes` and `weight_bytes` are
what the engine counts, `allocated_bytes` what torch held at most, from before the engine was made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch

from .. import LLM, SamplingParams
from ..device import resolve_device
from .kernel_times import KernelTime, profiled
from .record import Record, release
from .step import CountOperations

TOKENS = 12
SCENARIOS: dict[str, tuple[dict, dict]] = {  # name -> settings of the LLM, of the requests
    "plain": ({}, {}),
    "eager": ({"enforce_eager": True}, {}),
    "seeded": ({}, {"temperature": 0.8, "seed": 1}),
    "top-k, top-p": ({}, {"temperature": 0.8, "top_k": 20, "top_p": 0.95}),
    "penalties": ({}, {"repetition_penalty": 1.1}),
    "logprobs": ({}, {"logprobs": 3}),
    "prompt log-probabilities": ({}, {"prompt_logprobs": 1}),
    "quantized head": ({"quantization": {"name": "int4", "lm_head": "int4"}}, {}),
    "8-bit cache": ({"kv_cache_dtype": "int8"}, {}),
    "windows and sinks": ({"kv_retention": {"sinks": 4, "window": 64}}, {}),
    "n-gram": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, {}),
    "draft": (
        {"speculative_config": {"method": "draft_model", "model": "tinyworld-draft", "num_speculative_tokens": 3}},
        {},
    ),
    "grammar": ({}, {"structured_outputs": {"regex": r"[a-z ]{20,40}"}}),
}


def run(
    device: str = "auto",
    command: str = "minillm bench rehearsal",
    scenarios: dict[str, tuple[dict, dict]] = SCENARIOS,
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Every scenario counted; a result for `measure.save`."""
    where = resolve_device(device)
    record = Record("rehearsal", command, where, {"model": "tinyworld", "requests": 3, "tokens": TOKENS}, keep)
    for name, (settings, wishes) in scenarios.items():
        with record.case(name):
            record.figures[name] = count(where, settings, wishes)
        on_run(name)
    return record.finish()


def count(device: torch.device, settings: dict, wishes: dict) -> dict:
    on_gpu = device.type == "cuda"
    release(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    llm = LLM("tinyworld", device=str(device), max_num_seqs=8, num_kv_blocks=512, **settings)

    def generate(tokens: int) -> int:
        params = SamplingParams(
            **{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": "structured_outputs" not in wishes} | wishes
        )
        started = llm.engine.num_steps
        llm.generate(["Once upon a time", "Mia has 3 apples", "The fox"], params, use_tqdm=False)
        return llm.engine.num_steps - started

    generate(TOKENS)  # compiles what start did not
    after_warm_up = num_specialisations()
    with CountOperations() as operations, Waits() as waits:
        steps = generate(TOKENS)
    launched: list[KernelTime] = profiled(lambda: generate(TOKENS)) if on_gpu else []
    cache = llm.engine.runner.cache
    found = {
        "steps": steps,
        "operations_a_step": operations.total() / steps,
        "waits_a_step": waits.count / steps,
        "launches_a_step": sum(kernel.count for kernel in launched) / steps,
        "kernels": {kernel.name[:80]: kernel.count for kernel in launched},
        "specialisations": num_specialisations(),
        "specialisations_while_serving": num_specialisations() - after_warm_up,
        "cache_bytes": cache.bytes_per_block * 512,
        "weight_bytes": llm.model.config.num_parameters() * llm.model.dtype.itemsize,
    }
    if on_gpu:
        found["allocated_bytes"] = torch.cuda.max_memory_allocated(device) - before
        found["beside_weights_and_cache_bytes"] = (
            found["allocated_bytes"] - found["cache_bytes"] - found["weight_bytes"]
        )
    return found


class Waits:
    """Counts what makes the host wait for a GPU: torch warns of each while it is told to."""

    count = 0

    def __enter__(self) -> Self:
        import warnings

        self.caught = warnings.catch_warnings(record=True)
        self.warnings = self.caught.__enter__()
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *exception) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        self.count = sum("called a synchronizing" in str(warning.message) for warning in self.warnings)
        self.caught.__exit__(*exception)


def num_specialisations() -> int:
    """Kernels that Triton has built, or loaded from its disk, in this process."""
    import gc

    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return 0
    functions = [one for one in gc.get_objects() if type(one) is JITFunction]
    return sum(len(caches[0]) for function in functions for caches in getattr(function, "device_caches", {}).values())


def tables(measured: dict) -> list:
    """A line for each scenario (rich renderables)."""
    from rich.table import Table

    table = Table(
        "scenario",
        "steps",
        "launches a step",
        "torch operations a step",
        "waits a step",
        "built",
        "while serving",
        "MB beside",
        title=f"tinyworld, 3 requests, {measured['hardware']['name']}",
    )
    for name, f in measured["figures"].items():
        table.add_row(
            name,
            str(f["steps"]),
            f"{f['launches_a_step']:.1f}",
            f"{f['operations_a_step']:.1f}",
            f"{f['waits_a_step']:.2f}",
            str(f["specialisations"]),
            str(f["specialisations_while_serving"]),
            f"{f.get('beside_weights_and_cache_bytes', 0) / 1e6:.0f}",
        )
    return [table]
