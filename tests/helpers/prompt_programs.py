"""Engines for programs of prompts, and what they did."""

from __future__ import annotations

from pathlib import Path

from minillm import LLM, SamplingParams

TEXT = "the cat sat on the mat, then the naïve cat ate 10 crêpes"
BLOCK = 4


def make_llm(folder: Path | str, **settings) -> LLM:
    llm = LLM(str(folder), **{"device": "cpu", "block_size": BLOCK, "num_kv_blocks": 500} | settings)
    llm.trace.enabled = True
    return llm


def say(llm: LLM, prompt, **params):
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def rows_of(llm: LLM) -> list[int]:
    """How many rows each step had."""
    steps = [event.step for event in llm.trace.events if event.name == "tokens"]
    return [steps.count(step) for step in sorted(set(steps))]


def prefill_of(llm: LLM) -> int:
    """How many tokens of prompts were computed."""
    rows = [
        (event.args["start"], event.value, event.args["prompt"]) for event in llm.trace.events if event.name == "tokens"
    ]
    return int(sum(max(0, min(start + count, prompt) - start) for start, count, prompt in rows))


def is_clean(llm: LLM) -> bool:
    llm.engine.scheduler.check_integrity()
    left = (llm.engine.has_unfinished, llm.outputs.sinks, llm.engine.kv_cache.records)
    return not any(left)
