"""/tokenize and /detokenize. Built in chapter 23."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from fastapi import FastAPI
from pydantic import BaseModel, Field, model_validator

from minillm.engine.inputs import InputProcessor
from minillm.engine.prompt_forms import check_text
from minillm.serving.fields import Strict
from minillm.serving.known import Known
from minillm.serving.models import Models
from minillm.serving.service import Service


class TokenizeRequest(Strict):
    """A prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _has_one(self):
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages has to be given, and not both")
        return self


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class DetokenizeAnswer(BaseModel):
    prompt: str


def add_token_paths(app: FastAPI, models: Models, refusals: dict[int | str, Any]) -> None:
    """Each of them in a thread: a tokenizer takes its time."""

    @app.post("/tokenize", response_model=TokenizeAnswer, responses=refusals)
    async def tokenize(body: TokenizeRequest, client: Known) -> Any:
        return await asyncio.to_thread(_tokenize, models.find(body.model), body)

    @app.post("/detokenize", response_model=DetokenizeAnswer, responses=refusals)
    async def detokenize(body: DetokenizeRequest, client: Known) -> Any:
        return await asyncio.to_thread(_detokenize, models.find(body.model), body)


class _Copies:
    """A second tokenizer of each model: a text may have any length here, and requests wait for none of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: WeakKeyDictionary[InputProcessor, tuple[threading.Lock, Any]] = WeakKeyDictionary()

    def encode(self, inputs: InputProcessor, text: str, special: bool) -> list[int]:
        with self._lock:
            if inputs not in self._copies:
                with inputs.lock:
                    self._copies[inputs] = threading.Lock(), copy.deepcopy(inputs.tokenizer)
            lock, tokenizer = self._copies[inputs]
        with lock:
            return tokenizer.encode(text, add_special_tokens=special)


_copies = _Copies()


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    inputs = service.llm.inputs
    text, special = body.prompt, body.add_special_tokens is not False
    if body.messages is not None:
        [text] = inputs.conversations(body.messages, add_generation_prompt=body.add_generation_prompt)
        special = bool(body.add_special_tokens)
    check_text("prompt", text)
    ids = _copies.encode(inputs, text, special)
    answer = {"count": len(ids), "max_model_len": service.llm.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = service.llm.get_tokenizer().convert_ids_to_tokens(ids)
    return answer


def _detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    service.llm.inputs.check_token_ids("tokens", body.tokens)
    return {"prompt": service.llm.outputs.decode_all(body.tokens)}
