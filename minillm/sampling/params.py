"""SamplingParams: how the tokens of one request are chosen. Built in chapter 01."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from minillm.sampling.grammar.params import StructuredOutputsParams

MAX_SEED = 2**63 - 1  # a seed travels in an int64 tensor
GREEDY_BELOW = 1e-5  # a lower temperature would overflow float32; the most probable token wins anyway


@dataclass(frozen=True)
class SamplingParams:
    """One request's choices, checked when made. Names and meaning are vLLM's.

    The parameters act in this order: `logit_bias`, then the penalties on the biased logits, then `temperature`,
    `min_p`, `top_k`, `top_p`. Each filter looks at the distribution the one before left.
    Raises TypeError or ValueError naming the field, the value and what is allowed.
    """

    n: int = 1  # how many samples of the prompt
    temperature: float = 1.0  # 0 is greedy: the most probable token, no noise
    top_p: float = 1.0  # keep the fewest tokens that hold this much probability
    top_k: int = 0  # keep the k most probable tokens; 0 or -1 keeps all
    min_p: float = 0.0  # keep tokens at least this probable, relative to the most probable one
    seed: int | None = None  # same seed, same text, whatever shares the batch
    presence_penalty: float = 0.0  # subtracted once from the logit of every token of the output
    frequency_penalty: float = 0.0  # subtracted as often as the token occurs in the output
    repetition_penalty: float = 1.0  # shrinks the logit of every token of prompt and output
    stop: str | Sequence[str] | None = None  # strings that end the text, and are cut from it: the first to complete
    stop_token_ids: Sequence[int] | None = None  # tokens that end the text, beside the model's own
    ignore_eos: bool = False  # go on after the model's end-of-sequence token
    max_tokens: int | None = 16  # None: as many as max_model_len leaves
    min_tokens: int = 0  # no end before so many tokens; a stop string has to complete after them
    logprobs: int | None = None  # report the sampled token and this many best; -1 is the whole vocabulary
    prompt_logprobs: int | None = None  # the same for each token of the prompt
    logit_bias: Mapping[int, float] | None = None  # token id -> what is added to its logit
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None  # what the text must look like

    def __post_init__(self):
        check_int("n", self.n, 1)
        check_float("temperature", self.temperature, 0, 1000)
        check_float("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError(f"top_p={self.top_p!r} keeps no token; allowed: over 0, up to 1")
        check_int("top_k", self.top_k, -1)
        check_float("min_p", self.min_p, 0, 1)
        check_int("seed", self.seed, 0, MAX_SEED, none_means="drawn from the LLM's seed")
        check_float("presence_penalty", self.presence_penalty, -2, 2)
        check_float("frequency_penalty", self.frequency_penalty, -2, 2)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100)
        check_int("max_tokens", self.max_tokens, 1, none_means="as many as fit")
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_int("logprobs", self.logprobs, -1, none_means="not reported")
        check_int("prompt_logprobs", self.prompt_logprobs, -1, none_means="not reported")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos={self.ignore_eos!r} is not allowed; allowed: True or False")
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n={self.n} greedy samples would all be the same; use n=1 or temperature > 0")
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.make(self.structured_outputs))
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError(
                "ignore_eos=True goes on after the end of the text, which structured_outputs sets; use only one"
            )
        if self.structured_outputs is not None and self.structured_outputs.jump_forward and self.logprobs is not None:
            raise ValueError(
                f"logprobs={self.logprobs} are not computed of the tokens that jump_forward writes; leave out either"
            )
        # Frozen outside, plain tuples and dictionaries inside.
        object.__setattr__(self, "stop", _as_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def token_ids(self) -> dict[str, list[int]]:
        """Every token id given, by field: what only a vocabulary can check."""
        return {"stop_token_ids": list(self.stop_token_ids), "logit_bias": list(self.logit_bias)}


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_int(name: str, value: object, low: int, high: int | None = None, none_means: str | None = None) -> None:
    if value is None and none_means:
        return
    allowed = f"a whole number from {low}" + (f" to {high}" if high is not None else " on")
    allowed += f", or None ({none_means})" if none_means else ""
    if not _is_int(value):
        raise TypeError(f"{name}={value!r} is not allowed; allowed: {allowed}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={value!r} is not allowed; allowed: {allowed}")


def check_float(name: str, value: object, low: float, high: float) -> None:
    allowed = f"a number from {low} to {high}"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not allowed; allowed: {allowed}")
    if not low <= value <= high:  # NaN fails this too
        raise ValueError(f"{name}={value!r} is not allowed; allowed: {allowed}")


def _as_stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise TypeError(f"stop={stop!r} is not allowed; allowed: a string or a list of strings")
    if not all(strings):
        raise ValueError(f"stop={stop!r} holds an empty string, which every text contains; leave it out")
    return tuple(strings)


def _as_token_ids(token_ids: object) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if not isinstance(token_ids, Sequence) or not all(map(_is_int, token_ids)):
        raise TypeError(f"stop_token_ids={token_ids!r} is not allowed; allowed: a list of token ids")
    if any(token_id < 0 for token_id in token_ids):
        raise ValueError(f"stop_token_ids={token_ids!r} is not allowed; allowed: token ids from 0 on")
    return tuple(token_ids)


def _as_bias(bias: object) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping) or not all(map(_is_int, bias)):
        raise TypeError(f"logit_bias={bias!r} is not allowed; allowed: a dictionary from token id to a number")
    for token_id, value in bias.items():
        if token_id < 0:
            raise ValueError(f"logit_bias has token id {token_id}; allowed: token ids from 0 on")
        check_float(f"logit_bias[{token_id}]", value, -100, 100)
    return dict(bias)
