"""Speculation against plain decoding, in one run: copying, JSON and stories; over the batch sizes; beside the formula.
Built in chapter 18.

The text is the bundled model's, so drafts are as good as they really are; a step costs what a model of 131 million
parameters costs (`minillm.bench.enlarged`), so that reading weights is what takes the time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from .. import LLM, SamplingParams
from ..device import resolve_device, resolve_dtype
from ..engine.drafting import measure_steps
from ..model.checkpoint import load_config, resolve_model
from ..speculative.adaptive import StepCost
from ..speculative.eagle_config import resolve_head
from ..zoo import corpus
from . import measure
from .enlarged import write_enlarged, write_enlarged_head
from .record import Record

TARGET_LAYERS, DRAFT_LAYERS = 11, 8  # 131 and 13 million parameters
EXAMPLES = 4  # of a task in front of its question
SEARCHED = 2_000  # documents, for such as ask for the same fields
MAX_TOKENS = 48
BLOCKS_EACH = 64  # of the cache for each request: 1,024 tokens
TASKS = ("copying", "json", "story")


@dataclass(frozen=True)
class Workload:
    prompts: int = 8
    num_ngram_tokens: int = 6
    num_draft_tokens: int = 3
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    dtype: str = "bfloat16"
    repeats: int = measure.MIN_REPEATS


def num_runs(workload: Workload) -> int:
    """How often `run` says that something is done."""
    return 2 + 4 * len(TASKS) * (workload.repeats + 2) + 4 * len(workload.batches) * (workload.repeats + 1)


def run(
    workload: Workload = Workload(),
    device: str = "auto",
    command: str = "minillm bench speculation",
    on_run: Callable[[str], None] = lambda what: None,
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Measure `workload` and return a result (see `measure.result`); `on_run` hears what has just been done.

    Raises RuntimeError if speculation says another token than plain decoding, in float32; in bfloat16 they are counted.
    """
    where = resolve_device(device)
    dtype = resolve_dtype(workload.dtype, where)
    record = Record("speculation", command, where, asdict(workload), keep)
    with tempfile.TemporaryDirectory() as folder:
        target = write_enlarged(resolve_model("tinyworld"), Path(folder) / "target", TARGET_LAYERS)
        draft = write_enlarged(resolve_model("tinyworld-draft"), Path(folder) / "draft", DRAFT_LAYERS)
        head = write_enlarged_head(resolve_head("tinyworld-eagle"), Path(folder) / "head")
        weight_bytes = load_config(target).num_parameters() * dtype.itemsize
        record.ceilings = measure.measure_ceilings(where, (dtype,), measure.megabytes_to_read(weight_bytes, where))
        on_run("ceilings")
        # Engines side by side: each takes the blocks of its requests, not 90% of a GPU.
        at_once = max(workload.batches, default=1)
        make = partial(
            LLM,
            str(target),
            device=str(where),
            dtype=workload.dtype,
            max_num_seqs=at_once,
            num_kv_blocks=at_once * BLOCKS_EACH,
        )
        drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": workload.num_draft_tokens}
        llms = {
            "plain": make(),
            "ngram": make(speculative_config={"method": "ngram", "num_speculative_tokens": workload.num_ngram_tokens}),
            "draft model": make(speculative_config=drafting),
            "eagle": make(speculative_config=drafting | {"method": "eagle", "model": str(head)}),
        }
        steps = measure_steps(llms["plain"].engine.runner, 64)
        for task in TASKS:
            with record.case(task):
                record.figures[task] = _over_methods(llms, task, workload, record, steps, on_run)
        del llms["ngram"]
        llms["adaptive"] = make(
            speculative_config=drafting | {"num_speculative_tokens": 2 * workload.num_draft_tokens, "adaptive": True}
        )
        on_run("step costs")
        for batch in workload.batches:
            with record.case(f"batch {batch}"):
                record.figures[f"batch {batch}"] = _over_batch(llms, batch, workload, record, on_run)
    return record.finish()


def prompts_of(task: str, count: int) -> list[str]:
    """The prompt of a kind: "json" shows some texts with their JSON and asks for one more with the same fields;
    "copying" asks for the first of them again; a "story" is to be continued."""
    if task == "story":
        return [document.text[:80] for document in corpus.held_out("story", count)]
    by_fields: dict[str, list[tuple[str, str]]] = {}
    for document in corpus.held_out("json", SEARCHED):
        for question, answer in document.questions:
            by_fields.setdefault(question[question.index("Fields:") :], []).append((question, answer))
    alike = sorted(by_fields.values(), key=len, reverse=True)[:count]
    prompts = []
    for questions in alike:
        shown = [question + answer for question, answer in questions[:EXAMPLES]]
        prompts.append("\n\n".join([*shown, questions[0 if task == "copying" else EXAMPLES][0]]))
    return prompts


def _over_methods(llms: dict[str, LLM], task: str, workload: Workload, record: Record, steps: StepCost, on_run) -> dict:
    """Each way of drafting at batch 1: tokens a second, the speed-up, what was accepted, and what the formula says."""
    prompts, params = prompts_of(task, workload.prompts), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    counted, said = {}, {}
    for name, llm in llms.items():
        said[name], counted[name] = _counted(llm, prompts, params)
        on_run(f"{name}, counted")
    times = record.interleave(
        {name: partial(_seconds_per_token, llm, prompts, params) for name, llm in llms.items()},
        workload.repeats,
        f"{task}/",
        on_run,
    )
    plain, figures = times["plain"].median, {}
    for name, time in times.items():
        agreeing = sum(a == b for one, other in zip(said[name], said["plain"]) for a, b in zip(one, other))
        if workload.dtype == "float32" and said[name] != said["plain"]:
            raise RuntimeError(f"{name} says other float32 tokens than plain decoding: no point in timing")
        figures[name] = {
            "tokens_per_second": 1 / time.median,
            "spread": time.spread,
            "speedup": plain / time.median,
            "agreeing_tokens": agreeing,
            "tokens": sum(map(len, said["plain"])),
            **counted[name],
        }
        if name != "plain":
            figures[name] |= _beside_the_formula(figures[name], plain, steps)
    return figures


def _beside_the_formula(figure: dict, plain_seconds: float, steps: StepCost) -> dict:
    """Leviathan et al.'s expected speed-up at the measured acceptance and cost per draft token, and the share reached.

    It counts draft tokens after the end of a text, and assumes that verifying a draft takes as long as generating one
    token. `counted` is the same with the tokens that were generated and the time that verifying takes here.
    """
    alpha, gamma, cost = figure["alpha"], figure["mean_draft_length"], figure["seconds_per_guess"] / plain_seconds
    check = float(steps(gamma + 1) / steps(1))
    tokens = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    drafted = figure["steps_with_draft"]  # the others are plain ones
    formula = (drafted * tokens + 1 - drafted) / (drafted * (gamma * cost + 1) + 1 - drafted)
    counted = figure["tokens_per_step"] / (drafted * (gamma * cost + check) + 1 - drafted)
    return {
        "cost_ratio": cost,
        "check_ratio": check,
        "formula": formula,
        "share_of_formula": figure["speedup"] / formula,
        "counted": counted,
        "share_of_counted": figure["speedup"] / counted,
    }


def _counted(llm: LLM, prompts: list[str], params: SamplingParams) -> tuple[list[list[int]], dict]:
    """The generated tokens, and counts of drafts. Also the warm-up: prompts are in the prefix cache afterwards."""
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    said = [output.outputs[0].token_ids for output in outputs]
    if llm.engine.speculation is None:
        return said, {}
    before, steps = asdict(llm.engine.speculation.metrics), llm.engine.num_steps
    llm.trace.clear()
    llm.trace.enabled = True
    for prompt in prompts:
        llm.generate(prompt, params, use_tqdm=False)
    llm.trace.enabled = False
    after, steps = asdict(llm.engine.speculation.metrics), llm.engine.num_steps - steps - len(prompts)
    new = {
        name: after[name] - before[name]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_misses")
    }
    drafted = max(1, new["num_draft_tokens"])
    tried = new["num_accepted_tokens"] + new["num_misses"]
    return said, {
        "alpha": new["num_accepted_tokens"] / max(1, tried),
        "acceptance_rate": new["num_accepted_tokens"] / drafted,
        "mean_draft_length": new["num_draft_tokens"] / max(1, new["num_drafts"]),
        "steps_with_draft": new["num_drafts"] / max(1, steps),
        "tokens_per_step": (sum(map(len, said)) - len(said)) / max(1, steps),
        "seconds_per_guess": sum(llm.trace.seconds("draft").values()) / drafted,
    }


def _seconds_per_token(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    """Of the tokens after the first, one prompt after another."""
    seconds = tokens = 0
    for prompt in prompts:
        [output] = llm.generate(prompt, params, use_tqdm=False)
        times = output.metrics.token_times
        seconds, tokens = seconds + times[-1] - times[0], tokens + len(times) - 1
    return seconds / tokens


def _over_batch(llms: dict[str, LLM], batch: int, workload: Workload, record: Record, on_run) -> dict:
    """Stories, `batch` at once."""
    prompts = prompts_of("story", batch)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    times = record.interleave(
        {name: partial(_seconds_of_batch, llm, prompts, params) for name, llm in llms.items()},
        workload.repeats,
        f"batch {batch}/",
        on_run,
    )
    tokens = batch * MAX_TOKENS
    return {
        name: {
            "tokens_per_second": tokens / time.median,
            "spread": time.spread,
            "speedup": times["plain"].median / time.median,
        }
        for name, time in times.items()
    }


def _seconds_of_batch(llm: LLM, prompts: list[str], params: SamplingParams) -> None:
    llm.generate(prompts, params, use_tqdm=False)


def tables(measured: dict) -> list:
    """One request at a time, beside the formula, then many (rich renderables)."""
    from rich.table import Table

    workload, figures = measured["workload"], measured["figures"]
    alone = Table(
        "task",
        "drafter",
        "tokens/s",
        "± half range",
        "× plain",
        "tokens per step",
        "α",
        title=f"One request at a time, {workload['dtype']}, 131 M parameters",
    )
    formula = Table(
        "task",
        "drafter",
        "a draft token",
        "a verification",
        "formula",
        "of it",
        "counted",
        "of it",
        title="Costs in steps, and beside the formula",
    )
    for task in TASKS:
        for name, f in figures[task].items():
            speed = [f"{f['tokens_per_second']:,.0f}", f"{f['spread'] / 2:.0%}", f"{f['speedup']:.2f}"]
            alone.add_row(
                task,
                name,
                *speed,
                *([f"{f['tokens_per_step']:.2f}", f"{f['alpha']:.2f}"] if name != "plain" else ["", ""]),
            )
            if name != "plain":
                formula.add_row(
                    task,
                    name,
                    f"{f['cost_ratio']:.3f}",
                    f"{f['check_ratio']:.2f}",
                    f"{f['formula']:.2f}",
                    f"{f['share_of_formula']:.0%}",
                    f"{f['counted']:.2f}",
                    f"{f['share_of_counted']:.0%}",
                )
    drafters = list(figures[f"batch {workload['batches'][0]}"])
    together = Table("batch", *drafters, title="Stories at once, tokens/s, and × plain")
    for batch in workload["batches"]:
        row = figures[f"batch {batch}"]
        together.add_row(
            str(batch),
            *(f"{f['tokens_per_second']:,.0f} ± {f['spread'] / 2:.0%} ({f['speedup']:.2f}×)" for f in row.values()),
        )
    return [alone, formula, together]
