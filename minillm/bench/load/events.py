"""Server-sent events, read: when tokens came, and what the server counted. Built in chapter 24.

The client keeps the bytes as they arrive, each part with its time, and reads them after the run: the event loop does
nothing but receive while others are measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """A streamed answer, read."""

    token_times: list[float] = field(default_factory=list)  # of each event that had text or tokens
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    is_done: bool = False  # the stream came to its end mark
    error: str = ""
    text: str = ""


def read_answer(parts: Iterable[tuple[float, bytes]]) -> Answer:
    """The answer in `parts`, which may break anywhere; the event whose last byte is in a part came with that part."""
    answer, counted = Answer(), False
    for time, data in events(parts):
        if data == "[DONE]":
            answer.is_done = True
            continue
        try:
            message = json.loads(data)
        except json.JSONDecodeError:
            answer.error = f"an event is no JSON: {data[:80]!r}"
            continue
        try:
            counted |= _read_event(answer, time, message)
        except (AttributeError, TypeError, ValueError):
            answer.error = f"an event has another form than OpenAI's: {data[:80]!r}"
    if not counted:
        answer.num_output_tokens = len(answer.token_times)
    return answer


def _read_event(answer: Answer, time: float, message: dict[str, Any]) -> bool:
    """Whether it has the server's counts. Raises AttributeError, TypeError or ValueError for another form."""
    if error := message.get("error"):
        answer.error = str(error.get("message", error) if isinstance(error, dict) else error)
        return False
    if usage := message.get("usage"):
        answer.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
        answer.num_output_tokens = int(usage.get("completion_tokens") or 0)
        answer.num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    for choice in message.get("choices") or ():
        text, is_token = piece_of(choice)
        answer.text += text
        if is_token:
            answer.token_times.append(time)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return bool(usage)


def piece_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """The text of a choice in a chunk, and whether it brings tokens: a chat's first chunk may have only a role, a last
    one only its finish reason, and a token may be a part of a character and have no text yet."""
    delta = choice.get("delta")
    if delta is None:  # /v1/completions
        text = choice.get("text") or ""
        return text, bool(text or choice.get("token_ids") or not choice.get("finish_reason"))
    text = delta.get("content") or ""
    return text, bool(text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"))


def events(parts: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """The data of each event, with the time of the part that completed it."""
    rest = b""
    for time, data in parts:
        *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in whole:
            lines = block.decode("utf-8", "replace").split("\n")
            told = [line[5:].removeprefix(" ") for line in lines if line.startswith("data:")]
            if told:  # a comment that keeps the connection open has none
                yield time, "\n".join(told)
