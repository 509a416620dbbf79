"""The corpus: an endless, seeded stream of documents, each with its task and its right answer. Built in chapter 00.

Document `i` of a seed is always the same text, so a split is a seed: training reads seed 0, and any other seed
is fresh text that the model has never seen. Nothing is stored, nothing is fetched.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import tasks
from .stories import story

TRAIN_SEED, HELD_OUT_SEED = 0, 1
MIXTURE = {"story": 0.20, "arithmetic": 0.34, "recall": 0.18, "json": 0.20, "chat": 0.08}  # share of documents

WRITERS: dict[str, Callable[[random.Random], tasks.Segments]] = {
    "story": lambda rng: [(story(rng), False)],
    "arithmetic": tasks.arithmetic,
    "recall": tasks.recall,
    "json": tasks.to_json,
    "chat": tasks.chat,
}


@dataclass(frozen=True)
class Document:
    """One document: its task and its text in segments `(text, is_answer)`."""

    task: str
    segments: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)

    @property
    def questions(self) -> list[tuple[str, str]]:
        """`(prompt, answer)` for every answer in the document; a story has none."""
        pairs, prompt = [], ""
        for text, is_answer in self.segments:
            if is_answer:
                pairs.append((prompt, text.removesuffix("<|end|>")))
            prompt += text
        return pairs


def document(task: str, seed: int, index: int, **options) -> Document:
    """Document number `index` of `task` under `seed`. `options` go to the task's writer (recall: `num_facts`, ...).

    Raises ValueError for a task that does not exist.
    """
    if task not in WRITERS:
        raise ValueError(f"task={task!r} is unknown; choose one of {', '.join(WRITERS)}")
    rng = random.Random(f"tinyworld/{task}/{seed}/{index}")
    return Document(task, tuple(WRITERS[task](rng, **options)))


def documents(seed: int, start: int = 0, mixture: dict[str, float] | None = None) -> Iterator[Document]:
    """The endless mixed stream under `seed`, from document `start` on."""
    mixture = mixture or MIXTURE
    names, weights = zip(*mixture.items())
    index = start
    while True:
        task = random.Random(f"tinyworld/mixture/{seed}/{index}").choices(names, weights)[0]
        yield document(task, seed, index)
        index += 1


def held_out(task: str, count: int, **options) -> list[Document]:
    """`count` documents of `task` that training never reads."""
    return [document(task, HELD_OUT_SEED, i, **options) for i in range(count)]
