"""/v1/chat/completions: conversations. Built in chapter 23."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from minillm.engine.llm import LLM
from minillm.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from minillm.engine.request import Request
from minillm.sampling.logprobs import Logprob
from minillm.serving.fields import NO_IMAGES, Shared, Usage
from minillm.serving.service import Asking
from minillm.serving.tools import Reader, WithTools, whole_calls


class ChatRequest(Shared, WithTools):
    """What POST /v1/chat/completions takes."""

    is_short: ClassVar[bool] = False  # a template is a program

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: Any = None
    # Declared so that they are refused by name.
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    documents: Any = None
    chat_template: Any = None

    NOT_SERVED: ClassVar = Shared.NOT_SERVED | {
        "echo": ((False,), "/v1/completions has it"),
        "audio": ((), NO_IMAGES),
        "modalities": ((["text"],), NO_IMAGES),
        "prediction": ((), "speculative decoding is the server's choice"),
        "reasoning_effort": ((), "chat_template_kwargs reaches a template that knows it"),
        "service_tier": (("auto", "default"), "there is one"),
        "verbosity": ((), "ask for it in a message"),
        "web_search_options": ((), "a server answers from its model alone"),
        "functions": ((), "use tools"),
        "function_call": ((), "use tool_choice"),
        "documents": ((), "put them into a message, or into chat_template_kwargs"),
        "chat_template": (
            (),
            "a template is a program; give it to the server, or write the prompt for /v1/completions",
        ),
    }

    @model_validator(mode="after")
    def _goes_together(self):
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} differ; use one"
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs; set it to true")
        if "chat_template" in (self.chat_template_kwargs or {}):
            raise ValueError("chat_template_kwargs has chat_template, which is not served; leave it out")
        if self.mode != "none" and self.mode != "auto" and self.constraint():
            raise ValueError("tool_choice and response_format both say what the text must look like; use one")
        return self

    @property
    def prompts(self) -> list[Any]:
        return [self.messages]

    def requests(self, llm: LLM, asking: Asking) -> list[Request]:
        """One; tokenizes, so not in the event loop."""
        most = self.max_tokens if self.max_tokens is not None else self.max_completion_tokens
        more: dict[str, Any] = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        more["structured_outputs"] = self.constraint() or self.tool_constraint(asking.tool_call_parser)
        params = self.sampling_params(asking.defaults, most, **more)
        continues = bool(self.continue_final_message)
        prompts = llm.inputs.conversations(
            self.messages,
            chat_template=llm.options.chat_template,
            add_generation_prompt=not continues if self.add_generation_prompt is None else self.add_generation_prompt,
            continue_final_message=continues,
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools] if self.mode != "none" else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        salted = [
            {"prompt": text} | ({"cache_salt": self.cache_salt} if self.cache_salt is not None else {})
            for text in prompts
        ]
        # The template writes the special tokens itself.
        more = (bool(self.add_special_tokens), asking.priority, asking.user)
        return llm.inputs.requests(salted, params, *more, lora_request=asking.lora_request)


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ContentLogprob] | None


class CalledFunction(BaseModel):
    name: str
    arguments: str  # JSON


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class Chats:
    """Writes the answers to one `ChatRequest`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, body: ChatRequest, llm: LLM, requests: list[Request], tool_call_parser: str = "hermes"):
        self.body, self.llm = body, llm
        parallel = body.parallel_tool_calls is not False
        self._readers = [Reader(body.mode, parallel, tool_call_parser) for _ in range(requests[0].params.n)]
        self._is_begun: set[int] = set()

    def choice(self, place: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """One sample, whole."""
        text, calls = self._readers[sample.index].add(sample.text, True)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = whole_calls(calls)
        choice: dict[str, Any] = {
            "index": sample.index,
            "message": message,
            "logprobs": self._logprobs(sample.logprobs, sample.token_ids),
            "finish_reason": self._finish_reason(sample.index, sample.finish_reason),
            "stop_reason": sample.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    def pieces(self, place: int, delta: StreamDelta, request: Request) -> list[dict[str, Any]]:
        """The choices of the chunks that a delta becomes; the first of a sample names the role."""
        index = delta.index
        text, calls = self._readers[index].add(delta.text, delta.finish_reason is not None)
        choices = []
        if index not in self._is_begun:
            self._is_begun.add(index)
            choices.append(self._piece(index, {"role": "assistant", "content": ""}))
        finish_reason = self._finish_reason(index, delta.finish_reason)
        logprobs = self._logprobs(delta.logprobs, delta.token_ids)
        if text or calls or finish_reason or logprobs or (self.body.return_token_ids and delta.token_ids):
            said: dict[str, Any] = ({"content": text} if text or not calls else {}) | (
                {"tool_calls": calls} if calls else {}
            )
            choice = self._piece(index, said, logprobs, finish_reason)
            if finish_reason:
                choice["stop_reason"] = delta.stop_reason
            if self.body.return_token_ids:
                choice["token_ids"] = delta.token_ids
            choices.append(choice)
        return choices

    @staticmethod
    def _piece(
        index: int, said: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": said, "logprobs": logprobs, "finish_reason": finish_reason}

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        if reason == "stop" and self._readers[index].num_calls and not self.body.mode.startswith("function:"):
            return "tool_calls"
        return reason

    def _logprobs(self, rows: list[dict[int, Logprob]] | None, token_ids: list[int]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        most = self.body.top_logprobs or 0
        return {"content": [self._token(token_id, row, most) for token_id, row in zip(token_ids, rows or ())]}

    def _token(self, token_id: int, row: dict[int, Logprob], most: int) -> dict[str, Any]:
        best = sorted(row.values(), key=lambda one: one.rank)[:most]
        return _named(row[token_id]) | {"top_logprobs": [_named(one) for one in best]}


def _named(one: Logprob) -> dict[str, Any]:
    name = one.decoded_token or ""
    return {"token": name, "logprob": one.logprob, "bytes": list(name.encode("utf-8", "replace"))}
