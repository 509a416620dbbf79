"""How many draft tokens a trained head gets accepted, on text that training never read. Built in chapter 18."""

from __future__ import annotations

from pathlib import Path

from .. import LLM, SamplingParams
from ..speculative.metrics import SpeculationMetrics
from ..zoo import corpus

TASKS = ("story", "arithmetic", "json", "recall", "chat")
NUM_TOKENS = 4  # of a draft
MAX_TOKENS = 64


def measure(head: Path, device: str = "auto", documents: int = 20) -> dict[str, SpeculationMetrics]:
    """Counts of `tinyworld` with the head in folder `head`, greedily, over held-out documents of each task."""
    config = {"method": "eagle", "model": head, "num_speculative_tokens": NUM_TOKENS}
    llm = LLM("tinyworld", device=device, speculative_config=config)
    found, params = {}, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    for task in TASKS:
        found[task] = llm.engine.speculation.metrics = SpeculationMetrics()
        held_out = corpus.held_out(task, documents)
        prompts = [one.text.split(". ")[0] if task == "story" else one.questions[0][0] for one in held_out]
        llm.generate(prompts, params, use_tqdm=False)
    return found


def lines(found: dict[str, SpeculationMetrics]) -> list[str]:
    """A line for each task: tokens per step, and acceptance by position of those that were looked at."""
    first = f"held-out text, drafts of {NUM_TOKENS}: tokens per step; acceptance at each position, given those before"
    told = []
    for task, metrics in found.items():
        reached = [metrics.num_drafts, *metrics.accepted_per_position]
        reached = [min(pair) for pair in zip(reached, metrics.drafted_per_position)]
        rates = [f"{hits / max(1, tried):.0%}" for hits, tried in zip(metrics.accepted_per_position, reached)]
        told.append(f"  {task:10} {metrics.mean_acceptance_length:.2f}; {', '.join(rates)}")
    return [first, *told]
