"""The HTTP application: paths, and what is answered. Built in chapter 23."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from minillm import __version__
from minillm.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from minillm.serving.absent import why_absent
from minillm.serving.adapters import add_adapter_paths
from minillm.serving.chat import ChatAnswer, ChatRequest, Chats
from minillm.serving.completions import CompletionAnswer, CompletionRequest, Completions
from minillm.serving.description import OF_ALL_PATHS, describe, refusals
from minillm.serving.errors import ApiError, of_exception, of_validation
from minillm.serving.known import Known
from minillm.serving.limits import Limits
from minillm.serving.metrics import ServerMetrics
from minillm.serving.models import Models
from minillm.serving.page import add_page
from minillm.serving.repository_paths import add_repository_paths
from minillm.serving.service import Call, Service
from minillm.serving.sse import DONE, EventStream, answered, event
from minillm.serving.tokens import add_token_paths

LEFT = 499  # nginx's status for a client that has left: it appears only in the log, since no client reads it


class Writer(Protocol):
    """`Completions` or `Chats`."""

    kind: str
    chunk_kind: str

    def choice(self, place: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]: ...
    def pieces(self, place: int, delta: StreamDelta, request: Any) -> list[dict[str, Any]]: ...


def create_app(models: Models) -> FastAPI:
    """OpenAI's API. `app.state.models` has the services; `app.state.service` is the one of the only model."""
    config = models.config
    app = FastAPI(
        title="minillm", version=__version__, docs_url=None, redoc_url=None, responses=refusals(*OF_ALL_PATHS)
    )
    app.state.models, app.state.service = models, models.default
    app.add_middleware(
        Limits,
        max_header_bytes=config.max_header_bytes,
        max_body_bytes=config.max_body_bytes,
        body_seconds=config.body_seconds,
        on_refused=models.metrics.refused,
    )
    _answer_errors(app, models.metrics)

    asks = refusals(400, 401, 404, 429, 503)
    streams = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}

    @app.post("/v1/completions", response_model=CompletionAnswer, responses=asks | streams)
    async def completions(request: Request, body: CompletionRequest, client: Known) -> Response:
        service = models.find(body.model)
        call = await service.call(body, client, len(body.prompts), Completions.prefix)
        return await _answer(request, service, call, Completions(body, service.llm, call.requests), body)

    @app.post("/v1/chat/completions", response_model=ChatAnswer, responses=asks | streams)
    async def chat_completions(request: Request, body: ChatRequest, client: Known) -> Response:
        service = models.find(body.model)
        call = await service.call(body, client, 1, Chats.prefix)
        return await _answer(
            request, service, call, Chats(body, service.llm, call.requests, service.config.tool_call_parser), body
        )

    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models", response_model=ModelList, responses=refusals(401))
    async def model_list(client: Known) -> Any:
        return {"object": "list", "data": models.cards()}

    @app.get("/v1/models/{model:path}", response_model=ModelCard, responses=refusals(401, 404))
    async def model(model: str, client: Known) -> Any:
        return models.card(model)

    @app.get("/health", response_class=Response, responses=refusals(503))
    async def health() -> Response:
        """200 while the engine can compute."""
        await models.check_health()
        return Response(status_code=200)

    @app.get("/ready", response_class=Response, responses=refusals(503))
    async def ready() -> Response:
        """200 while requests are taken: what a load balancer asks."""
        models.check_ready()
        return await health()

    @app.get("/version", response_model=Version)
    async def version() -> Any:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        """In a thread: writing it takes milliseconds."""
        return Response(models.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    add_token_paths(app, models, asks)
    add_adapter_paths(app, models, refusals(400, 401, 403, 404, 408, 413))
    if models.loader is not None:
        add_repository_paths(app, models.loader)
    if config.page:
        add_page(app, models)
    describe(app, bool(config.keys))
    return app


class ModelCard(BaseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "minillm"
    root: str
    parent: str | None = None  # the model that an adapter changes
    max_model_len: int


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]


class Version(BaseModel):
    version: str


async def _answer(request: Request, service: Service, call: Call, writer: Writer, body: Any) -> Response:
    if body.stream:
        return EventStream(_chunks(service, call, writer, body))
    with call:
        outputs = await answered(call.outputs(), request)
        _raise_failed(outputs)
        answer: dict[str, Any] = {"id": call.id, "object": writer.kind, "created": call.created, "model": call.model}
        answer["choices"] = [
            writer.choice(place, output, sample) for place, output in enumerate(outputs) for sample in output.outputs
        ]
        answer["usage"] = _usage(call, body)
        return JSONResponse(answer)


async def _chunks(service: Service, call: Call, writer: Writer, body: Any) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer. An error after the first of them is an event too: the status is long sent."""
    options = body.stream_options
    with_usage = bool(options and options.include_usage)
    always = bool(options and options.continuous_usage_stats)
    head = json.dumps({"id": call.id, "object": writer.chunk_kind, "created": call.created, "model": call.model})

    def chunk(choices: list[dict[str, Any]], usage: bool) -> bytes:
        told = json.dumps(choices, ensure_ascii=False, separators=(",", ":"))
        counts = f',"usage":{json.dumps(_usage(call, body))}' if usage else ',"usage":null' if with_usage else ""
        return event(f'{head[:-1]},"choices":{told}{counts}}}')

    failure: ApiError | None = None
    with call:
        try:
            async with aclosing(call.pieces()) as all_pieces:
                async for pieces in all_pieces:
                    events = []  # what is there is sent at once: a write to the socket costs more than an event
                    for place, delta in pieces:
                        if delta.finish_reason == "error":
                            failure = _failed(delta.error)
                            break
                        if delta.error is None:  # a failed step raises its error behind the last piece
                            choices = writer.pieces(place, delta, call.requests[place])
                            events += [chunk([choice], always) for choice in choices]
                    if events:
                        yield b"".join(events)
                    if failure is not None:
                        raise failure
            if with_usage:
                yield chunk([], True)
        except Exception as error:
            yield event(json.dumps(of_exception(error).body()))
        yield DONE


def _usage(call: Call, body: Any) -> dict[str, Any]:
    only_scores = getattr(body, "only_scores", False)
    return call.usage((lambda count: 0) if only_scores else (lambda count: count)).model_dump()


def _raise_failed(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for sample in output.outputs:
            if sample.finish_reason == "error":
                raise _failed(sample.error)


def _failed(error: str | None) -> ApiError:
    """A grammar that could not go on."""
    return ApiError(400, error or "the text could not go on", code="generation_failed")


def _answer_errors(app: FastAPI, metrics: ServerMetrics) -> None:
    def refuse(error: ApiError) -> Response:
        metrics.refused(error.status)
        return error.answer()

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return refuse(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return refuse(of_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return refuse(ApiError(404, why_absent(request.url.path)))
        if error.status_code == 405:
            answer = refuse(ApiError(405, f"{request.url.path} does not take {request.method}"))
            answer.headers.update(error.headers or {})
            return answer
        return refuse(ApiError(400, str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=LEFT)

    @app.exception_handler(Exception)
    async def other(request: Request, error: Exception) -> Response:
        return refuse(of_exception(error))

    for kind in (ValueError, TypeError, NotImplementedError, RuntimeError):
        app.add_exception_handler(kind, other)
