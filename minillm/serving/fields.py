"""Fields that the requests of both endpoints share, and how they become SamplingParams. Built in chapter 23.

A field that OpenAI or vLLM has and this server does not is declared too: with the value that asks for nothing it is
taken, with any other it is refused by name. What is declared nowhere is refused as well, so nothing is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from minillm.sampling.params import SamplingParams

NO_IMAGES = "the book serves text"
Stop = Annotated[list[str], Field(max_length=64)]


class Strict(BaseModel):
    """JSON as it is: "1" is no number, and every field is known."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None  # a last chunk with the counts of tokens
    continuous_usage_stats: bool | None = None  # the counts so far in every chunk (vLLM)


class JsonSchema(Strict):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self):
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema belongs to type "json_schema", and to no other; give both or neither')
        return self

    def constraint(self) -> dict[str, Any] | None:
        """As `structured_outputs` has it."""
        if self.type == "json_object":
            return {"json_object": True}
        if self.type == "json_schema":
            schema = self.json_schema.schema_
            return {"json": schema if isinstance(schema, dict) else {}}
        return None


class Shared(Strict):
    """What both endpoints take. Limits are those of SamplingParams, which names the field when one is exceeded."""

    model: str | None = Field(None, description="The name of the model, or of an adapter.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | Stop | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = Field(None, description="Used where the key names no user of its own.")
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: Annotated[list[str], Field(max_length=1024)] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    return_token_ids: bool | None = None
    # Declared so that they are refused by name; the value that asks for nothing is taken.
    store: Any = None
    metadata: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    logits_processors: Any = None
    return_tokens_as_token_ids: Any = None
    kv_transfer_params: Any = None

    # field -> (values that ask for nothing, why it is not served)
    NOT_SERVED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "store": ((False,), "nothing of a request is kept"),
        "metadata": (({},), "nothing of a request is kept"),
        "best_of": ((1,), "ask for n samples with logprobs, and choose among them"),  # best_of=n is all of them
        "use_beam_search": ((False,), "LLM.beam_search searches offline"),
        "length_penalty": ((1, 1.0), "LLM.beam_search searches offline"),
        "truncate_prompt_tokens": ((), "cut the prompt before it is sent; /tokenize counts its tokens"),
        "logits_processors": (([],), "functions do not come over HTTP"),
        "return_tokens_as_token_ids": ((False,), "return_token_ids gives the ids beside the text"),
        "kv_transfer_params": (({},), "a server is one process"),
    }

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self):
        for name, (neutral, why) in self.NOT_SERVED.items():
            value = getattr(self, name)
            neutral = (*neutral, self.n) if name == "best_of" else neutral
            if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
                raise ValueError(f"{name}={_short(value)} is not served: {why}; leave it out")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belongs to a stream; set stream to true, or leave it out")
        return self

    def constraint(self) -> dict[str, Any] | None:
        """The one rule for the whole text, wherever it stands. Raises ValueError for two of them."""
        of_format = self.response_format and self.response_format.constraint()
        if of_format and self.structured_outputs:
            raise ValueError("response_format and structured_outputs both say what the text must look like; use one")
        return of_format or self.structured_outputs

    def sampling_params(self, defaults: SamplingParams, max_tokens: int | None, **more: Any) -> SamplingParams:
        """`defaults` where a field is absent or null; `max_tokens` None is as many as fit. Raises what SamplingParams
        does."""
        base = {name: getattr(defaults, name) for name in OF_DEFAULTS}
        asked = {name: getattr(self, name) for name in OF_PARAMS} | more
        given = base | {name: value for name, value in asked.items() if value is not None}
        return SamplingParams.from_optional(**given, max_tokens=max_tokens)


OF_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OF_PARAMS = (
    "n temperature top_p seed presence_penalty frequency_penalty logit_bias stop top_k min_p repetition_penalty "
    "min_tokens stop_token_ids ignore_eos include_stop_str_in_output skip_special_tokens "
    "spaces_between_special_tokens bad_words allowed_token_ids prompt_logprobs"
).split()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
