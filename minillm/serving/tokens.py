"""/tokenize and /detokenize. Built in chapter 23."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, Field, model_validator

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


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    inputs = service.llm.inputs
    text, special = body.prompt, body.add_special_tokens is not False
    if body.messages is not None:
        [text] = inputs.conversations(body.messages, add_generation_prompt=body.add_generation_prompt)
        special = bool(body.add_special_tokens)
    check_text("prompt", text)
    with inputs.lock:
        ids = inputs.tokenizer.encode(text, add_special_tokens=special)
    answer = {"count": len(ids), "max_model_len": service.llm.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = service.llm.get_tokenizer().convert_ids_to_tokens(ids)
    return answer


def _detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    service.llm.inputs.check_token_ids("tokens", body.tokens)
    return {"prompt": service.llm.outputs.decode_all(body.tokens)}
