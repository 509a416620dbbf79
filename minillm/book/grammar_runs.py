"""The harness of chapter 19: answers at several temperatures, what masks cost, steps under a grammar.

Built in chapter 19.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from minillm import LLM, SamplingParams


def served_at(
    llm: LLM,
    asked: Sequence[tuple[str, str]],
    temperatures: Sequence[float],
    constraints: Sequence[Mapping[str, Any]] | None = None,
) -> dict[float, list]:
    """Every question at every temperature, in one batch; under its own constraint, where there are any.

    asked: (prompt, answer) of each question. The seed of question i is i at every temperature.
    """
    fields = [{"structured_outputs": one} for one in constraints] if constraints else [{}] * len(asked)
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=80, **fields[i])
        for t in temperatures
        for i in range(len(asked))
    ]
    outs = llm.generate([prompt for _ in temperatures for prompt, _ in asked], params, use_tqdm=False)
    return {t: outs[k * len(asked) : (k + 1) * len(asked)] for k, t in enumerate(temperatures)}


def mask_costs(prompt: str, constraints: Mapping[str, Mapping[str, Any]], rows: int = 16) -> list[tuple[str, ...]]:
    """(name, run, a step in ms, its masks in µs, their share) of each constraint: medians over all steps, one thread.

    The clock counts what this thread computes, whatever else the machine does.
    """
    llm, found = LLM("tinyworld", dtype="float32", num_kv_blocks=1024), []
    llm.trace.clock = time.thread_time
    threads, _ = torch.get_num_threads(), torch.set_num_threads(1)
    for name, constraint in constraints.items():
        fields = {"structured_outputs": constraint} if constraint else {}
        params = [SamplingParams(temperature=1.0, seed=i, max_tokens=40, **fields) for i in range(rows)]
        for attempt in ("first", "again"):
            llm.trace.clear()
            llm.trace.enabled = True
            llm.generate([prompt] * rows, params, use_tqdm=False)
            step, masks = _medians(llm.trace.spans)
            found.append((name, attempt, f"{1e3 * step:.2f}", f"{1e6 * masks:.0f}", f"{masks / step:.1%}"))
    torch.set_num_threads(threads)
    return found


def _medians(spans: Sequence) -> tuple[float, float]:
    """Seconds of a step, from its first span to its last, and of making its masks."""
    ends: dict[int, list[float]] = {}
    for span in spans:
        ends.setdefault(span.step, []).extend((span.start, span.start + span.duration))
    step = float(np.median([max(times) - min(times) for times in ends.values()])) or np.nan
    return step, float(np.median([span.duration for span in spans if span.name == "masks"] or [0.0]))


def steps_of(
    llm: LLM, asked: Sequence[tuple[str, str]], judge_all: Callable[[list], Mapping[str, int]],
    constraints: Sequence[Mapping[str, Any]], **more: Any,
) -> tuple[list[str], tuple[int, int, int]]:  # fmt: skip
    """All answers at temperature 0 under their constraints: the texts, and (tokens, steps of the model, right)."""
    [outs] = served_at(llm, asked, (0.0,), [{**one, **more} for one in constraints]).values()
    tokens = sum(len(out.outputs[0].token_ids) for out in outs)
    steps = sum(len(set(out.metrics.token_times)) for out in outs)  # tokens of one step come at one time
    return [out.outputs[0].text for out in outs], (tokens, steps, judge_all(outs)["right"])
