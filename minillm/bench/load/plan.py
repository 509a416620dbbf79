"""From a trace to the requests that are sent: prompts from real token ids, as ids or as text. Built in chapter 24."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...engine.workload import TraceRequest
from .client import Send

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
ATTEMPTS = 8  # to find a text of exactly so many tokens


@dataclass(frozen=True)
class Prompts:
    """How the prompts of a trace are made and sent."""

    model: str
    token_ids: Sequence[int]  # that prompts are drawn from: the vocabulary without special tokens
    tokenizer: Any = None  # for text
    as_text: bool = False  # instead of token ids; a chat is always text
    chat: bool = False
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)  # put into every request; None leaves a field out

    def __post_init__(self):
        if (self.as_text or self.chat) and self.tokenizer is None:
            raise ValueError("a prompt as text needs the model's tokenizer; name it with --tokenizer")

    def sends(self, trace: Sequence[TraceRequest], is_closed_loop: bool, time_scale: float = 1.0) -> list[Send]:
        return [
            Send(self.body_of(one), None if is_closed_loop else one.timestamp * time_scale, one.output_length)
            for one in trace
        ]

    def body_of(self, request: TraceRequest) -> str:
        ids = request.prompt(self.token_ids)
        prompt: Any = text_of(self.tokenizer, ids) if self.as_text or self.chat else ids
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.output_length, "temperature": 0.0}
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        for name in ("user", "priority"):
            if value := getattr(request, name):
                body[name] = value
        return json.dumps({name: value for name, value in (body | self.extra_body).items() if value is not None})


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """A text of as many tokens as `ids` that begins like their text. Random ids rarely come back as they were, since
    a tokenizer merges neighbours: what is missing is added, what is too long is cut, until the length is right or
    ATTEMPTS are used up; then the nearest length is taken (the server's count is what is reported)."""
    ids, best, error = list(ids), "", float("inf")
    wanted, spare = len(ids), list(ids)
    for _ in range(ATTEMPTS):
        text = tokenizer.decode(ids)
        again = list(tokenizer.encode(text, add_special_tokens=False))
        if abs(len(again) - wanted) < error:
            best, error = text, abs(len(again) - wanted)
        if not error:
            break
        ids = again[:wanted] + spare[: max(0, wanted - len(again))]
        spare = spare[1:] + spare[:1]
    return best


def load_vocabulary(name: str) -> tuple[Any, list[int]]:
    """The tokenizer of a bundled model, a folder or a hub id, and the ids of its ordinary tokens: neither special ones
    nor parts of a character, which have no text of their own."""
    from ...model.checkpoint import load_tokenizer, resolve_model  # transformers takes seconds to import

    tokenizer = load_tokenizer(resolve_model(name))
    special = set(tokenizer.all_special_ids)
    ordinary = [token_id for token_id in range(len(tokenizer)) if token_id not in special]
    texts = tokenizer.batch_decode([[token_id] for token_id in ordinary])
    return tokenizer, [token_id for token_id, text in zip(ordinary, texts) if text and REPLACEMENT not in text]
