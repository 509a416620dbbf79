"""What a request gives back: texts, tokens, log-probabilities, times. Built in chapter 04."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minillm.engine.lora_request import LoRARequest
from minillm.sampling.logprobs import Logprob

if TYPE_CHECKING:
    from minillm.engine.request import Request
    from minillm.engine.sink import OutputSink


@dataclass
class CompletionOutput:
    """One sample of a request."""

    index: int  # which of the n samples
    text: str  # without the stop string
    token_ids: list[int]  # all that were generated, the token that ended it included
    cumulative_logprob: float | None = None  # sum over token_ids; None unless logprobs was asked for
    logprobs: list[dict[int, Logprob]] | None = None  # one dictionary a token
    finish_reason: str | None = None  # "stop", "length", "abort", or "error" for a grammar that could not go on
    stop_reason: int | str | None = None  # the stop token or string; None for end-of-sequence and "length"
    error: str | None = None  # with "error": what went wrong
    lora_request: LoRARequest | None = None  # the adapter that generated it
    # vLLM's, of what the book does not build.
    routed_experts = sampling_mask = spec_decode_metrics = weight_versions = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times in seconds on one monotonic clock, and counts."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # prompt tokens that a prefix cache had already
    num_preemptions: int = 0
    token_times: list[float] = field(default_factory=list)  # of the first sample's tokens
    cached_tokens: dict[str, int] = field(default_factory=dict)  # num_cached_tokens by tier: "device", "host", "disk"
    num_drafted_tokens: int = 0  # draft tokens (chapter 18)
    num_accepted_tokens: int = 0  # of those, how many the target model accepted
    scheduled_time: float | None = None  # when it first got tokens of a step

    @classmethod
    def of(cls, request: Request, sink: OutputSink) -> RequestMetrics:
        """As far as the request and its samples have come."""
        return cls(
            request.arrival_time,
            sink.first_token_time,
            sink.finished_time,
            request.num_cached_tokens,
            sink.num_preemptions,
            request.token_times,
            request.cached_tokens,
            sink.num_drafted_tokens,
            sink.num_accepted_tokens,
            request.scheduled_time,
        )

    # vLLM's names, of its engines of both generations.
    arrival_ts = property(lambda self: self.arrival_time)
    queued_ts = property(lambda self: self.arrival_time)  # a request is queued when it arrives
    scheduled_ts = first_scheduled_time = property(lambda self: self.scheduled_time)
    first_token_ts = property(lambda self: self.first_token_time)
    last_token_ts = last_token_time = property(lambda self: self.token_times[-1] if self.token_times else None)
    first_token_latency = property(lambda self: self.ttft)
    num_generation_tokens = property(lambda self: len(self.token_times))

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.scheduled_time is None else self.scheduled_time - self.arrival_time

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between each token and the one before (ITL)."""
        return [later - sooner for sooner, later in zip(self.token_times, self.token_times[1:])]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None for a single token."""
        gaps = self.inter_token_latencies
        return sum(gaps) / len(gaps) if gaps else None

    @property
    def ttft(self) -> float | None:
        """Time to first token, in seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the last token."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass
class RequestOutput:
    """One prompt with its samples, in the order they were asked for."""

    request_id: str
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # None for the first token: nothing precedes it
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    lora_request: LoRARequest | None = None  # the adapter that it asked for
    # vLLM's, of what the book does not build.
    encoder_prompt = encoder_prompt_token_ids = kv_transfer_params = ec_transfer_params = None
    num_cache_creation_tokens = prompt_token_id_logprobs = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that a prefix cache had already."""
        return self.metrics.num_cached_tokens


@dataclass
class BeamSearchSequence:
    """One text that a beam search found."""

    tokens: list[int]  # prompt and output
    text: str  # of both
    cum_logprob: float
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # a search keeps none


@dataclass
class BeamSearchOutput(RequestOutput):
    """What `LLM.beam_search` found for one prompt, best first: as `outputs`, and as vLLM's `sequences`."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


@dataclass(frozen=True)
class StreamDelta:
    """What one step adds to one sample. The texts of all deltas of a sample, joined, are the text of `generate`."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # set on the last delta
    error: str | None = None  # as in CompletionOutput
    request_id: str = ""
    index: int = 0  # which of the n samples
    logprobs: list[dict[int, Logprob]] | None = None  # one dictionary a token, where they were asked for
    stop_reason: int | str | None = None  # as in CompletionOutput
