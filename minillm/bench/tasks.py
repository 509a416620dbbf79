"""How good a model is at the corpus' tasks, exactly, on text that training never read. Built in chapter 00.

The corpus is a program, so every document comes with its right answer and there is always a fresh one: no data
set, no judge. Answers are decoded greedily. What is counted:

* recall and JSON: the whole answer, character for character;
* arithmetic: the number after "The answer is", however the working before it reads;
* story: continued from its first sentence, is every word one that the corpus knows?
* perplexity: exp of the mean negative log-likelihood of a document's tokens, for every task.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .. import LLM, SamplingParams
from ..zoo import corpus
from . import measure

GOALS = {"recall": "≥ 95%", "json": "≥ 90%", "arithmetic": "60–98%", "story": "≥ 95%"}
MAX_TOKENS = {"recall": 32, "json": 96, "arithmetic": 96, "story": 160}
TOGETHER = 32  # documents that are asked at once
WORD = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True)
class Question:
    """One thing asked: the prompt as token ids, cut where the training text was cut, and the right answer."""

    task: str
    prompt_token_ids: list[int]
    answer: str


@dataclass(frozen=True)
class Score:
    """`right` of `asked` questions of one task, and the task's perplexity."""

    task: str
    asked: int
    right: int
    perplexity: float

    @property
    def share(self) -> float:
        return self.right / self.asked if self.asked else math.nan

    @property
    def margin(self) -> float:
        """Half the width of the 95% confidence interval of `share` (Wilson, 1927)."""
        if not self.asked:
            return math.nan
        z, n = 1.96, self.asked
        return z * math.sqrt(self.share * (1 - self.share) / n + z * z / (4 * n * n)) / (1 + z * z / n)


def evaluate(
    llm: LLM,
    num_documents: int = 200,
    tasks: tuple[str, ...] = tuple(corpus.WRITERS),
    on_step: Callable[[str], None] = lambda task: None,
    seed: int = corpus.HELD_OUT_SEED,
) -> list[Score]:
    """Score `llm` on `num_documents` held-out documents of each task; `on_step` hears of each finished document.

    Raises ValueError for an unknown task or the seed that training reads.
    """
    if seed == corpus.TRAIN_SEED:
        raise ValueError(f"seed={seed} is what training reads; any other seed is held-out text")
    scores = []
    for task in tasks:
        right = asked = 0
        losses: list[float] = []
        for start in range(0, num_documents, TOGETHER):
            documents = [
                corpus.document(task, seed, index) for index in range(start, min(start + TOGETHER, num_documents))
            ]
            batch = [question for document in documents for question in questions(document, llm.get_tokenizer())]
            for question, text in zip(batch, answers(llm, batch)):
                asked += 1
                right += is_right(task, text, question.answer)
            losses += token_losses(llm, documents)
            for _ in documents:
                on_step(task)
        scores.append(Score(task, asked, right, math.exp(sum(losses) / len(losses))))
    return scores


def questions(document: corpus.Document, tokenizer) -> list[Question]:
    """What `document` asks. A story asks to be continued from its first sentence; chat turns ask nothing here,
    since most of them have many right answers."""
    if document.task == "chat":
        return []
    ids, asked = [tokenizer.bos_token_id], []
    if document.task == "story":
        first_sentence = re.split(r"(?<=[.!?])\s", document.text)[0]
        return [Question("story", ids + tokenizer.encode(first_sentence, add_special_tokens=False), "")]
    for text, is_answer in document.segments:
        if is_answer:
            asked.append(Question(document.task, list(ids), text))
        ids += tokenizer.encode(text, add_special_tokens=False)
    return asked


def answers(llm: LLM, batch: list[Question]) -> list[str]:
    """The greedy answers; of a story that was cut off, without the word at the cut."""
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=MAX_TOKENS[question.task], stop=None if question.task == "story" else ["\n"]
        )
        for question in batch
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": question.prompt_token_ids} for question in batch], params, use_tqdm=False
    )
    said = []
    for question, output in zip(batch, outputs):
        completion = output.outputs[0]
        cut = question.task == "story" and completion.finish_reason == "length"
        said.append(re.sub(r"\S*$", "", completion.text) if cut else completion.text)
    return said


def is_right(task: str, text: str, expected: str) -> bool:
    if task == "arithmetic":
        return final_number(text) == final_number(expected)
    if task == "story":
        return not unknown_words(text)
    return text.strip() == expected.strip()


def final_number(text: str) -> int | None:
    """The N of the last "The answer is N", or None."""
    found = re.findall(r"The answer is (\d+)", text)
    return int(found[-1]) if found else None


def unknown_words(text: str) -> list[str]:
    """The words of `text` that the corpus never uses, in either case."""
    return [word for word in WORD.findall(text) if word.lower() not in lexicon()]


@lru_cache(maxsize=1)
def lexicon(per_task: int = 1000) -> frozenset[str]:
    """Every word of the corpus, lower case: the templates' words have all been seen well before `per_task`
    documents."""
    return frozenset(
        word.lower()
        for task in corpus.WRITERS
        for index in range(per_task)
        for word in WORD.findall(corpus.document(task, corpus.TRAIN_SEED, index).text)
    )


def token_losses(llm: LLM, documents: list[corpus.Document]) -> list[float]:
    """Negative log-likelihood of each token of the documents given those before it, nats,
    one document after the other."""
    tokenizer = llm.get_tokenizer()
    prompts = []
    for document in documents:
        ids = [tokenizer.bos_token_id]
        for text, _ in document.segments:
            ids += tokenizer.encode(text, add_special_tokens=False)
        prompts.append({"prompt_token_ids": ids})
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return [
        -row[token].logprob
        for output in outputs
        for token, row in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
    ]


def result(scores: list[Score], model: str, num_documents: int, seed: int, command: str, device) -> dict:
    """The scores as a result to be saved (see `measure.result`); nothing here was timed."""
    figures = {
        score.task: {
            "asked": score.asked,
            "right": score.right,
            "share": score.share if score.asked else None,
            "margin_95": score.margin if score.asked else None,
            "perplexity": score.perplexity,
        }
        for score in scores
    }
    workload = {"model": model, "documents_per_task": num_documents, "seed": seed, "decoding": "greedy"}
    return measure.result(f"tasks-{Path(model).name}", command, device, workload, None, figures, {})


def table(scores: list[Score]):
    """The scores for a terminal or a notebook (a rich table)."""
    from rich.table import Table

    table = Table(
        "task", "asked", "right", "share", "± (95%)", "goal", "perplexity", title="Held-out documents, greedy"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for score in scores:
        share = (str(score.right), f"{score.share:.1%}", f"{score.margin:.1%}") if score.asked else ("–", "–", "–")
        table.add_row(
            score.task, str(score.asked or "–"), *share, GOALS.get(score.task, "–"), f"{score.perplexity:.2f}"
        )
    return table


def tables(measured: dict) -> list:
    """A saved result as tables (rich)."""
    figures = measured["figures"]
    return [table([Score(task, f["asked"], f["right"], f["perplexity"]) for task, f in figures.items()])]
