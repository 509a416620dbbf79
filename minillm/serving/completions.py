"""/v1/completions: prompts as text or token ids, continued. Built in chapter 23."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from minillm.engine.llm import LLM
from minillm.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from minillm.engine.request import Request
from minillm.sampling.logprobs import Logprob
from minillm.serving.fields import Shared, Usage
from minillm.serving.service import Asking

DEFAULT_MAX_TOKENS = 16
SHORT = 1024  # characters, or token ids, that are made ready in less than 0.5 ms
TokenId = Annotated[int, Field(ge=0)]


class CompletionRequest(Shared):
    """What POST /v1/completions takes."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    echo: bool | None = False  # the prompt before each answer
    logprobs: Annotated[int, Field(ge=0)] | None = None  # for each token, so many of the most probable ones
    suffix: Any = None

    NOT_SERVED: ClassVar = Shared.NOT_SERVED | {"suffix": (("",), "the book's models only continue")}

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def is_short(self) -> bool:
        """Whether its request is made ready in less time than a hand-over to another thread and back takes."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        lists = (self.bad_words, self.logit_bias, self.allowed_token_ids, self.stop_token_ids)
        is_plain = not (self.response_format or self.structured_outputs or any(lists))
        return is_one and is_plain and len(self.prompt) <= SHORT

    @property
    def only_scores(self) -> bool:
        """max_tokens=0 with echo: the log-probabilities of the prompt, and no answer."""
        return self.max_tokens == 0 and bool(self.echo)

    def requests(self, llm: LLM, asking: Asking) -> list[Request]:
        """One a prompt; tokenizes, so not in the event loop."""
        more: dict[str, Any] = {"logprobs": self.logprobs, "structured_outputs": self.constraint()}
        if self.echo and self.logprobs is not None:
            more["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        most = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        params = self.sampling_params(asking.defaults, 1 if self.only_scores else most, **more)
        prompts: list[dict[str, Any]] = []
        for prompt in self.prompts:
            name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
            prompts.append({name: prompt} | ({"cache_salt": self.cache_salt} if self.cache_salt is not None else {}))
        special = self.add_special_tokens is not False
        return llm.inputs.requests(
            prompts, params, special, asking.priority, asking.user, lora_request=asking.lora_request
        )


class LegacyLogprobs(BaseModel):
    """One entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where the token begins in `text`, in characters


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Completions:
    """Writes the answers to one `CompletionRequest`."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: CompletionRequest, llm: LLM, requests: list[Request]):
        self.body, self.llm, self.n = body, llm, requests[0].params.n
        self._offsets: dict[int, int] = {}  # characters of each choice so far
        self._prompts = [self._text_of(request) if body.echo else "" for request in requests]
        self._is_begun: set[int] = set()

    def choice(self, place: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """One sample of prompt `place`, whole."""
        index, text = place * self.n + sample.index, self._prompts[place]
        rows, token_ids = list(sample.logprobs or ()), sample.token_ids
        if self.body.only_scores:
            rows, token_ids = [], []
        else:
            text += sample.text
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, output, rows, token_ids),
            "finish_reason": "length" if self.body.only_scores else sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [row and _by_id(row) for row in output.prompt_logprobs]
        if self.body.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": output.prompt_token_ids}
        return choice

    def pieces(self, place: int, delta: StreamDelta, request: Request) -> list[dict[str, Any]]:
        """The choices of the chunks that a delta becomes."""
        index, text = place * self.n + delta.index, delta.text
        rows, token_ids = list(delta.logprobs or ()), delta.token_ids
        first = index not in self._is_begun
        self._is_begun.add(index)
        if self.body.only_scores:
            text, rows, token_ids = "", [], []
        if first:
            text = self._prompts[place] + text
        logprobs = None
        if self.body.logprobs is not None:
            scored = request.prompt_token_ids if first and self.body.echo else None
            logprobs = self._legacy(index, request.prompt_logprobs if scored else None, scored, rows, token_ids)
        finish_reason = delta.finish_reason and ("length" if self.body.only_scores else delta.finish_reason)
        if not (text or token_ids or finish_reason):
            return []
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.body.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": request.prompt_token_ids if first else None}
        return [choice]

    def _text_of(self, request: Request) -> str:
        if request.prompt is not None:
            return request.prompt
        return self.llm.outputs.decode_of(request.params)(list(request.prompt_token_ids))

    def _logprobs(
        self, index: int, output: RequestOutput, rows: list[dict[int, Logprob]], token_ids: list[int]
    ) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        scored = output.prompt_token_ids if self.body.echo else None
        return self._legacy(index, output.prompt_logprobs if scored else None, scored, rows, token_ids)

    def _legacy(
        self,
        index: int,
        prompt_rows: list[dict[int, Logprob] | None] | None,
        prompt_token_ids: list[int] | None,
        rows: list[dict[int, Logprob]],
        token_ids: list[int],
    ) -> dict[str, Any]:
        pairs = list(zip(prompt_token_ids or (), prompt_rows or ())) + list(zip(token_ids, rows))
        tokens, chosen, best, offsets = [], [], [], []
        for token_id, row in pairs:
            name = self._name(token_id, row)
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(name)
            tokens.append(name)
            offsets.append(offset)
            chosen.append(None if row is None else row[token_id].logprob)
            best.append(None if row is None else {self._name(other, row): one.logprob for other, one in row.items()})
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": best, "text_offset": offsets}

    def _name(self, token_id: int, row: dict[int, Logprob] | None) -> str:
        if row is not None and row[token_id].decoded_token is not None:
            return row[token_id].decoded_token
        return self.llm.outputs.decode_all([token_id])


def _by_id(row: dict[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for token_id, one in row.items()
    }
