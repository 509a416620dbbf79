"""Blanks in a chapter's text: the reader fills in a number, and is told whether it is right. Built in chapter 24."""

from __future__ import annotations

import math
from dataclasses import dataclass

from minillm.book.chips import Html
from minillm.book.style import colour


@dataclass(frozen=True)
class Blank:
    """A question with a number for an answer; the chapter's text has the answer folded."""

    question: str
    answer: float
    unit: str = ""
    within: float = 0.01  # share of the answer by which a number may be off


BLANKS = {
    "office": Blank(
        "120 people, 28 s of reading, answers after 2 s. The rate that they send:", 4.0, "requests a second"
    ),
    "upper bound": Blank("The least number of requests at which P99 has an upper bound:", 368, "requests", 1e-9),
    "logits": Blank("Bytes that a step's 64 rows of all logits would cost, from one rank of two:", 16_416_768, "bytes"),
    "micro-batches": Blank("The least number of micro-batches with which 4 stages idle for at most 10%:", 27, "", 1e-9),
    "hidden": Blank("The least number of tokens on each rank from which on the transfer is hidden:", 2472.5, "tokens"),
    "mixtral": Blank("GB of the experts of one layer of Mixtral, in bf16:", 2.82, "GB"),
    "touched": Blank("Experts of 128, 8 for each token, that a step with 16 tokens reads:", 82.4, "experts"),
    "dispatch": Blank("Bytes of a token's dispatch and combine in one layer of DeepSeek-V3:", 172_032, "bytes"),
    "api": Blank("What 1,000 chat requests cost at the API:", 0.0512, "dollars"),
    "moved bytes": Blank("The keys and values of a prompt of 8,192 tokens of Qwen3-8B:", 1.208, "GB", 0.02),
    "two choices": Blank("Replicas whose load a power-of-two router reads for each request, of 1,000:", 2, "replicas"),
    "preempted": Blank(
        "Tokens to compute again after a preemption at 1,200 prompt and 34 output tokens:", 1234, "tokens"
    ),
    "image tokens": Blank("Tokens of the prompt that an image of 448 × 896 pixels takes:", 512, "tokens", 1e-9),
}


def blank(name: str, given: object) -> Html:
    """Whether `given`, which the reader put in the place of `...`, is the answer to the blank `name`.

    Raises KeyError for a name that is no blank, and TypeError for what is no number.
    """
    asked = BLANKS[name]
    if given is ...:
        return _told(asked, "Put your number in the place of the three dots and run the cell again.", "limit")
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"given={given!r}: put one number in the place of the three dots")
    said = f"{given:,.6g} {asked.unit}".rstrip()
    if math.isclose(given, asked.answer, rel_tol=asked.within):
        return _told(asked, f"✓ {said}", "good")
    return _told(asked, f"{said}: too {'large' if given > asked.answer else 'small'}.", "wasted")


def _told(asked: Blank, verdict: str, role: str) -> Html:
    style = f"border-left:4px solid {colour(role)};background:#f6f8fa;color:#24292f;padding:6px 12px;margin:4px 0"
    text = f"{asked.question}\n{verdict}"
    return Html(f'<div style="{style};font:14px sans-serif">{text.replace(chr(10), "<br>")}</div>', text)
