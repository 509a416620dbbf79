"""What fewer bits cost: perplexity and right answers for every format and method. Built in chapter 16.

Every candidate reads the same fresh text of the corpus, some documents of each task, and is compared with the original
on it: what is reported is by how much its perplexity is larger. Where calibration or chance could matter, several seeds
give other calibration text and other fresh text, and the spread between them is kept. Answers are those of
`minillm.bench.tasks`, greedy, on the first seed's text.

    normal      bf16, int8, fp8; int4, int3, int2 by rtn, gptq and awq, in groups and whole rows; 8-bit activations
    outliers    the same model, its function kept, four channels of its activations made 256 times larger
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import LLM
from ..device import resolve_device
from ..model.calibration import encode_document, perplexity
from ..quantizing import bits_per_weight, write_outlier_model
from ..zoo import corpus
from . import measure, tasks

CALIBRATION_SEEDS = (0, 2, 3, 4, 5, 6, 7, 8)  # never one that is measured on
FRESH_SEEDS = (1, 101, 102, 103, 104, 105, 106, 107)
GROUP_SIZE = 64
Quantization = dict[str, Any] | None


@dataclass(frozen=True)
class Candidate:
    """One way to write the model. `every_seed` measures it on all of them, otherwise on the first alone."""

    quantization: Quantization = None
    dtype: str = "float32"
    outliers: bool = False  # the outlier version of the model
    every_seed: bool = False


@dataclass(frozen=True)
class Workload:
    """How much to measure: `documents` of each task of a seed for perplexity,
    `asked` of each task for answers (0: none)."""

    model: str = "tinyworld"
    documents: int = 20
    asked: int = 20
    seeds: int = 5
    calibration_documents: int = 64
    only: tuple[str, ...] = field(default=())  # beginnings of candidates' names; empty is all of them

    def __post_init__(self):
        if not 1 <= self.seeds <= len(FRESH_SEEDS):
            raise ValueError(f"seeds={self.seeds} is not allowed; allowed: 1 to {len(FRESH_SEEDS)}")

    @property
    def candidates(self) -> dict[str, Candidate]:
        """By name, the originals first: everything else is compared with one of them."""
        chosen = {name: one for name, one in all_candidates().items() if not self.only or name.startswith(self.only)}
        if not chosen:
            raise ValueError(
                f"no candidate begins with {' or '.join(self.only)}; there are {', '.join(all_candidates())}"
            )
        originals = {base_of(one): Candidate(outliers=one.outliers, every_seed=True) for one in chosen.values()}
        return originals | {name: one for name, one in chosen.items() if name not in originals}

    def seeds_of(self, candidate: Candidate) -> range:
        return range(self.seeds if candidate.every_seed else 1)


def all_candidates() -> dict[str, Candidate]:
    found = {
        "original": Candidate(every_seed=True),
        "bf16": Candidate(dtype="bfloat16"),
        "int8": Candidate({"name": "int8"}, every_seed=True),
        "fp8": Candidate({"name": "fp8"}, every_seed=True),
        "fp4": Candidate({"name": "fp4"}),
    }
    for bits in (4, 3, 2):
        for group_size in (GROUP_SIZE, None):
            for method in ("rtn", "gptq", "awq"):
                grid = {"method": method, "weights": f"int{bits}", "group_size": group_size, "symmetric": False}
                found[f"int{bits} {method} {group_size or 'row'}"] = Candidate(grid, every_seed=bits == 3)
    w8a8 = {
        "W8A8": {"name": "int8", "activations": "int8"},
        "W8A8 static": {"name": "int8", "activations": "int8", "activation_scales": "static"},
        "fp8 W8A8": {"name": "fp8", "activations": "fp8"},
        "smoothquant": {"name": "smoothquant"},
        "smoothquant static": {"name": "smoothquant", "activation_scales": "static"},
        "llm_int8": {"name": "llm_int8"},
    }
    found |= {name: Candidate(quantization) for name, quantization in w8a8.items()}
    found["outliers: original"] = Candidate(outliers=True, every_seed=True)
    for name in ("int8", "int3 rtn 64", "int3 gptq 64", "int3 awq 64"):
        found[f"outliers: {name}"] = replace(found[name], outliers=True, every_seed=False)
    return found | {f"outliers: {name}": Candidate(one, outliers=True, every_seed=True) for name, one in w8a8.items()}


def base_of(candidate: Candidate) -> str:
    return "outliers: original" if candidate.outliers else "original"


def run(
    workload: Workload, device: str = "auto", command: str = "", on_run: Callable[[str], None] = lambda name: None
) -> dict:
    """Measure every candidate; `on_run` hears of each candidate and seed that is done. See `measure.result`."""
    where = resolve_device(device)
    figures: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, candidate in workload.candidates.items():
            model = workload.model
            if candidate.outliers:
                model = Path(folder) / "outliers"
                if not model.exists():
                    write_outlier_model(workload.model, model)
            figures[name] = measure_one(candidate, workload, model, device, partial(on_run, name))
    for name, candidate in workload.candidates.items():
        before = figures[base_of(candidate)]["perplexities"]
        rise = [after / b - 1 for after, b in zip(figures[name]["perplexities"], before)]
        figures[name] |= {"increases": rise, "increase": statistics.median(rise), "spread": max(rise) - min(rise)}
    return measure.result(f"quality-{Path(workload.model).name}", command, where, asdict(workload), None, figures, {})


def measure_one(
    candidate: Candidate, workload: Workload, model: str | Path, device: str, on_seed: Callable[[], None]
) -> dict:
    """Perplexity on each seed's text, and the answers to the first seed's questions."""
    figures: dict[str, Any] = {"perplexities": []}
    for seed in workload.seeds_of(candidate):
        quantization = candidate.quantization
        if quantization is not None:
            quantization = quantization | {
                "seed": CALIBRATION_SEEDS[seed],
                "num_documents": workload.calibration_documents,
            }
        llm = LLM(model, dtype=candidate.dtype, device=device, quantization=quantization)
        texts = fresh_text(llm.get_tokenizer(), workload.documents, FRESH_SEEDS[seed])
        figures["perplexities"].append(perplexity(llm.model, texts))
        if seed == 0:
            figures["bits_per_weight"] = bits_per_weight(llm.model) if quantization else 8.0 * llm.model.dtype.itemsize
            figures["right"] = share_right(llm, workload.asked, FRESH_SEEDS[0]) if workload.asked else {}
        on_seed()
    return figures


def fresh_text(tokenizer, documents: int, seed: int) -> list[list[int]]:
    """Token ids of `documents` documents of every task."""
    return [
        encode_document(tokenizer, corpus.document(task, seed, index))
        for task in corpus.WRITERS
        for index in range(documents)
    ]


def share_right(llm: LLM, asked: int, seed: int) -> dict[str, float]:
    """Of the questions of `asked` documents of each task that has right answers, the share that `llm` answers right."""
    shares = {}
    for task in tasks.GOALS:
        documents = [corpus.document(task, seed, index) for index in range(asked)]
        batch = [question for document in documents for question in tasks.questions(document, llm.get_tokenizer())]
        said = tasks.answers(llm, batch)
        shares[task] = sum(tasks.is_right(task, text, question.answer) for question, text in zip(batch, said)) / len(
            batch
        )
    return shares


def num_runs(workload: Workload) -> int:
    return sum(len(workload.seeds_of(candidate)) for candidate in workload.candidates.values())


def tables(measured: dict) -> list:
    """The result for a terminal or a notebook (rich tables): perplexity, and right answers where any were asked for."""
    name, figures = measured["workload"]["model"], measured["figures"]
    rows = {}
    for candidate, one in figures.items():
        spread = share(one["spread"]).lstrip("+") if len(one["increases"]) > 1 else "–"
        rows[candidate] = (
            f"{one['bits_per_weight']:.2f}",
            f"{one['perplexities'][0]:.4g}",
            share(one["increase"]),
            spread,
        )
    found = [
        _table(
            f"{name}: fresh text, against the original on the same", ("bits", "perplexity", "increase", "spread"), rows
        )
    ]
    rows = {
        candidate: [f"{one['right'][task]:.0%}" for task in tasks.GOALS]
        for candidate, one in figures.items()
        if one["right"]
    }
    return found + ([_table(f"{name}: right answers", tuple(tasks.GOALS), rows)] if rows else [])


def _table(title: str, columns: tuple[str, ...], rows: dict):
    from rich.table import Table

    table = Table("candidate", title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def share(increase: float) -> str:
    """+0.25%; and where a model babbles, how many times."""
    return f"{increase:+.2%}" if increase < 10 else f"×{increase + 1:.3g}"
