"""The parts of a decode step, timed: kernels on a GPU, methods on a CPU. Built in chapter 00."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from .. import LLM, SamplingParams
from ..model.decoder import Decoder
from ..model.layers import Linear, RMSNorm, Rotary
from . import kernel_times, measure
from .record import release

PARTS = {
    "decoder": (Decoder, "forward"),
    "matrix products": (Linear, "forward"),
    "norms": (RMSNorm, "forward"),
    "rotary tables": (Rotary, "forward"),
}


def take_apart(path: Path, dtype: str, device: torch.device, prompt: list[int], output_tokens: int) -> dict:
    """Seconds a token spent in each part of our decode step, as `parts`, and `parts_by`, how that was measured.

    On a GPU they are the times of its kernels (`minillm.bench.kernel_times`), for a replayed step calls no method.
    Where the profiler sees no kernel, and on a CPU, the methods in PARTS are timed.
    """
    llm = LLM(str(path), device=str(device), dtype=dtype, **measure.room_for(1, len(prompt) + output_tokens))
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    if device.type == "cuda":
        generate = partial(llm.generate, {"prompt_token_ids": prompt}, params, use_tqdm=False)
        generate()
        wall, kernels = kernel_times.wall_and_kernels(generate)
        if kernels:
            return {
                "parts": kernel_times.by_part(kernels, wall, output_tokens),
                "parts_by": "kernels, of the profiler; the prompt is among them",
            }
        del llm, generate
        release(device)
        llm = LLM(
            str(path),
            device=str(device),
            dtype=dtype,
            enforce_eager=True,
            **measure.room_for(1, len(prompt) + output_tokens),
        )
    how = "methods, in an eager step of its own" if device.type == "cuda" else "methods"
    return {"parts": methods_timed(llm, device, prompt, params), "parts_by": how}


def methods_timed(llm: LLM, device: torch.device, prompt: list[int], params: SamplingParams) -> dict[str, float]:
    """Seconds a token in each part, by timing the methods in PARTS while the engine runs.

    A layer that would run as a whole is run in pieces for this, so the pieces add up to more than `compare` measures.
    What is left of the decoder is element-wise work (rotation, SiLU, residual sums); what is left of the step is
    sampling, turning ids into text, and Python. On a GPU each part is waited for, so the parts add up to more than
    an undisturbed step takes.
    """
    for layer in llm.model.layers:
        layer.whole = None  # run in pieces, so that there is something to time
    steps = llm.stream({"prompt_token_ids": prompt}, params)
    next(steps)  # the prompt is not decoding
    parts = PARTS | {"attention": (type(llm.engine.runner.attention), "attend")}
    with timed_methods(parts, device) as seconds:
        started = time.perf_counter()
        count = sum(len(delta.token_ids) for delta in steps)
        total = time.perf_counter() - started
    decoder = seconds.pop("decoder")
    parts = seconds | {"element-wise": decoder - sum(seconds.values()), "sampling, text, Python": total - decoder}
    return {part: spent / count for part, spent in parts.items()}


@contextmanager
def timed_methods(methods: dict[str, tuple[type, str]], device: torch.device) -> Iterator[dict[str, float]]:
    """While it lasts, add up the time spent in each method: `{name: seconds}`."""
    seconds = dict.fromkeys(methods, 0.0)
    originals = {name: getattr(owner, method) for name, (owner, method) in methods.items()}

    def timed(name: str):
        def call(*args, **kwargs):
            measure.synchronize(device)
            started = time.perf_counter()
            out = originals[name](*args, **kwargs)
            measure.synchronize(device)
            seconds[name] += time.perf_counter() - started
            return out

        return call

    try:
        for name, (owner, method) in methods.items():
            setattr(owner, method, timed(name))
        yield seconds
    finally:
        for name, (owner, method) in methods.items():
            setattr(owner, method, originals[name])
