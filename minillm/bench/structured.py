"""What a grammar costs and what it saves: masks beside a step, forced text, valid answers. Built in chapter 19.

The cost is counted twice. Inside the engine: the same tokens with a regular expression that allows all of them and with
none. And alone: what accepting, filling and applying take for the tokens that real constraints led to,
over the seconds of a step without any.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from .. import LLM, SamplingParams, StructuredOutputsParams
from ..device import resolve_device
from ..sampling.grammar.mask import GrammarMasks
from ..zoo import corpus
from . import measure
from .record import Record

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "pony"]}, "maxItems": 3},
    },
    "required": ["name", "age", "city", "pets"],
    "additionalProperties": False,
}
REGEX = (
    r'\{"name": "[A-Z][a-z]{1,11}", "age": (0|[1-9][0-9]?), "city": "[A-Z][a-z]{1,11}", '
    r'"pets": \[("(cat|dog|pony)"(, "(cat|dog|pony)"){0,2})?\]\}'
)
CONSTRAINTS = {"regex": {"regex": REGEX}, "json": {"json": SCHEMA}}
ANYTHING = {"regex": {"regex": r"(.|\n)*"}}
MAX_TOKENS = 64
TEMPERATURES = (1.0, 2.0, 3.0)


@dataclass(frozen=True)
class Workload:
    model: str = "tinyworld"
    batches: tuple[int, ...] = (1, 16)
    documents: int = 50  # asked for JSON at each temperature
    dtype: str = "float32"
    repeats: int = 9


def num_runs(workload: Workload) -> int:
    """How often `run` says that something is done."""
    per_batch = (1 + len(ANYTHING)) * (workload.repeats + 1) + len(CONSTRAINTS) + 2 * (workload.repeats + 1)
    return 1 + len(workload.batches) * per_batch + 2 * len(TEMPERATURES)


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench structured",
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload` and return a result (see `measure.result`); `on_run` hears what has just been done."""
    where = resolve_device(device)
    record = Record(f"structured-{workload.model}", command, where, asdict(workload), keep)
    llm = LLM(workload.model, device=str(where), dtype=workload.dtype)
    on_run("model")
    for batch in workload.batches:
        with record.case(f"batch {batch}"):
            _over_batch(llm, workload, batch, record, on_run)
    with record.case("valid"):
        record.figures["valid"] = _valid(llm, workload.documents, on_run)
    return record.finish()


def _over_batch(llm: LLM, workload: Workload, batch: int, record: Record, on_run: Callable[[str], None]) -> None:
    prompts = [document.text[:60] for document in corpus.held_out("story", batch)]
    params = {"none": free(0.0)} | {name: free(0.0, any_) for name, any_ in ANYTHING.items()}
    times = record.interleave(
        {name: partial(_seconds_per_step, llm, prompts, one) for name, one in params.items()},
        workload.repeats,
        f"batch {batch}/",
        on_run,
    )
    step = times["none"].median
    inside = {
        name: {"step_seconds": time.median, "spread": time.spread, "cost": time.median / step - 1}
        for name, time in times.items()
    }
    alone = {}
    for name, constraint in CONSTRAINTS.items():
        alone[name] = _masks_alone(llm, prompts, constraint, record.device)
        alone[name]["cost"] = alone[name]["seconds_per_step"] / step
        on_run(f"{name} alone")
    jumps = {jump: free(1.0, CONSTRAINTS["json"] | {"jump_forward": jump}, seed=1) for jump in (False, True)}
    jumped = record.interleave(
        {f"jump {jump}": partial(_seconds, llm, prompts, one) for jump, one in jumps.items()},
        workload.repeats,
        f"batch {batch}/",
        on_run,
    )
    steps = {jump: _steps(llm, prompts, one) for jump, one in jumps.items()}
    record.figures[f"batch {batch}"] = {
        "inside": inside,
        "alone": alone,
        "steps": steps[False],
        "steps_with_jumps": steps[True],
        "speedup_of_jumps": jumped["jump False"].median / jumped["jump True"].median,
    }


def free(temperature: float, constraint: dict | None = None, seed: int | None = None) -> SamplingParams:
    """Up to MAX_TOKENS tokens, all of them where there is no constraint."""
    structured = constraint and StructuredOutputsParams(**constraint)
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=MAX_TOKENS,
        structured_outputs=structured,
        ignore_eos=not constraint,
    )


def _seconds(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def _steps(llm: LLM, prompts: list[str], params: SamplingParams) -> int:
    before = llm.engine.num_steps
    llm.generate(prompts, params, use_tqdm=False)
    return llm.engine.num_steps - before


def _seconds_per_step(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    """Of the steps after the first, in which prompts are read."""
    started, before = time.perf_counter(), llm.engine.num_steps
    outputs = llm.generate(prompts, params, use_tqdm=False)
    first = max(output.metrics.first_token_time for output in outputs)
    last = max(output.metrics.token_times[-1] for output in outputs)
    return (last - first) / (llm.engine.num_steps - before - 1) if last > first else time.perf_counter() - started


def _masks_alone(llm: LLM, prompts: list[str], constraint: dict, device: torch.device) -> dict:
    """Replay what a constraint led to, on the grammars alone:
    the median of some times, when every state has been seen."""
    params = free(1.0, constraint, seed=0)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    said = [output.outputs[0].token_ids for output in outputs]
    length = max(map(len, said))
    masks = GrammarMasks(llm.model.config.vocab_size, device)
    logits = torch.randn(len(prompts), llm.model.config.vocab_size, device=device)
    compiled, replays = llm.inputs.compile(params), []
    for _ in range(1 + measure.MIN_REPEATS):
        grammars, seconds, steps = [compiled.start() for _ in prompts], 0.0, 0
        for place in range(length):
            rows = [(grammar, ()) for grammar, tokens in zip(grammars, said) if place < len(tokens)]
            part = logits[: len(rows)]
            measure.synchronize(device)
            started = time.perf_counter()
            masks.fill(rows).apply(part)
            for grammar, tokens in zip(grammars, said):
                if place < len(tokens):
                    grammar.accept(tokens[place])
            measure.synchronize(device)
            seconds, steps = seconds + time.perf_counter() - started, steps + 1
        replays.append(seconds / steps)
    return {"seconds_per_step": statistics.median(replays[1:]), "tokens": sum(map(len, said))}


def _valid(llm: LLM, num_documents: int, on_run) -> dict:
    """Of answers to the JSON task, how many are JSON with the wanted fields, and how many are right:
    free and constrained."""
    asked = [
        (question, json.loads(answer))
        for document in corpus.held_out("json", num_documents)
        for question, answer in document.questions
    ]
    found = {}
    for temperature in TEMPERATURES:
        for constrained in (False, True):
            params = [
                SamplingParams(
                    temperature=temperature,
                    seed=0,
                    max_tokens=MAX_TOKENS,
                    structured_outputs={"json": schema_of(answer)} if constrained else None,
                )
                for _, answer in asked
            ]
            outputs = llm.generate([question for question, _ in asked], params, use_tqdm=False)
            said = [parsed(output.outputs[0].text) for output in outputs]
            name = f"{'constrained' if constrained else 'free'}, temperature {temperature}"
            found[name] = {
                "valid": sum(one is not None and one.keys() == answer.keys() for one, (_, answer) in zip(said, asked))
                / len(asked),
                "right": sum(one == answer for one, (_, answer) in zip(said, asked)) / len(asked),
                "cut_off": sum(output.outputs[0].finish_reason == "length" for output in outputs) / len(asked),
            }
            on_run(name)
    return found


def schema_of(answer: dict) -> dict:
    """An object with the fields of `answer`, in any words and numbers."""
    kinds = {
        str: {"type": "string", "minLength": 1, "maxLength": 20},
        int: {"type": "integer", "minimum": 0, "maximum": 10_000},
    }
    return {
        "type": "object",
        "properties": {name: kinds[type(value)] for name, value in answer.items()},
        "required": list(answer),
        "additionalProperties": False,
    }


def parsed(text: str) -> dict | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def tables(measured: dict) -> list:
    """The cost, the jumps, the answers (rich renderables)."""
    from rich.table import Table

    figures = measured["figures"]
    cost = Table(
        "batch",
        "constraint",
        "step, µs",
        "± half range",
        "in the engine",
        "masks alone, µs",
        "of a step",
        title="What masks cost",
    )
    jumps = Table("batch", "steps", "with jumps", "× faster", title="Text that is forced, jumped over (json)")
    for batch in measured["workload"]["batches"]:
        f = figures[f"batch {batch}"]
        for name in dict.fromkeys([*f["inside"], *f["alone"]]):
            inside, alone = f["inside"].get(name), f["alone"].get(name)
            step = (
                [f"{inside['step_seconds'] * 1e6:,.0f}", f"{inside['spread'] / 2:.0%}", f"{inside['cost']:+.1%}"]
                if inside
                else [""] * 3
            )
            more = [f"{alone['seconds_per_step'] * 1e6:,.1f}", f"{alone['cost']:.1%}"] if alone else [""] * 2
            cost.add_row(str(batch), name, *step, *more)
        jumps.add_row(str(batch), str(f["steps"]), str(f["steps_with_jumps"]), f"{f['speedup_of_jumps']:.2f}")
    answers = Table("JSON task", "valid", "right", "cut off", title=f"{measured['workload']['documents']} documents")
    for name, f in figures["valid"].items():
        answers.add_row(name, *(f"{f[key]:.0%}" for key in ("valid", "right", "cut_off")))
    return [cost, jumps, answers]
