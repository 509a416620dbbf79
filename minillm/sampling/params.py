"""SamplingParams: how the tokens of one request are chosen. Built in chapter 01."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from minillm.sampling import absent
from minillm.sampling.checks import (
    as_bias,
    as_callables,
    as_some_token_ids,
    as_strings,
    as_token_ids,
    bias_of_json,
    check_flags,
    check_float,
    check_int,
    takes_names_of_vllm,
)
from minillm.sampling.grammar.params import StructuredOutputsParams

if TYPE_CHECKING:
    from torch import Tensor

MAX_SEED = 2**63 - 1  # a seed travels in an int64 tensor
GREEDY_BELOW = 1e-5  # a lower temperature would overflow float32; the most probable token wins anyway
BY_POSITION = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature")

LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]  # (output token ids, logits [vocab_size]) -> logits


class RequestOutputKind(enum.Enum):
    """What each output holds that `LLMEngine.step` hands out."""

    CUMULATIVE = 0  # all that was generated so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # all of it, once, at the end


@takes_names_of_vllm(absent.PARAMS, BY_POSITION)
@dataclass(slots=True, repr=False)
class SamplingParams:
    """One request's choices. Names and meaning are vLLM's.

    They are checked when they are made, and again when a request is added: a field may be changed until then. The
    request keeps a copy. None stands for the default.

    The parameters act in this order: `allowed_token_ids`, `bad_words`, `logits_processors`, `logit_bias`, then the
    penalties on the biased logits, then `temperature`, `min_p`, `top_k`, `top_p`. Each filter looks at the distribution
    the one before left. Raises TypeError or ValueError naming the field, the value and what is allowed.
    """

    n: int = 1  # how many samples of the prompt
    presence_penalty: float = 0.0  # subtracted once from the logit of every token of the output
    frequency_penalty: float = 0.0  # subtracted as often as the token occurs in the output
    repetition_penalty: float = 1.0  # shrinks the logit of every token of prompt and output
    temperature: float = 1.0  # 0 is greedy: the most probable token, no noise
    _: KW_ONLY
    top_p: float = 1.0  # keep the fewest tokens that hold this much probability
    top_k: int = 0  # keep the k most probable tokens; 0 or -1 keeps all
    min_p: float = 0.0  # keep tokens at least this probable, relative to the most probable one
    seed: int | None = None  # same seed, same text, whatever shares the batch; None or -1: drawn from the LLM's seed
    stop: str | Sequence[str] | None = None  # strings that end the text, and are cut from it: the first to complete
    stop_token_ids: Sequence[int] | None = None  # tokens that end the text, beside the model's own
    ignore_eos: bool = False  # go on after the model's end-of-sequence token
    max_tokens: int | None = 16  # None: as many as max_model_len leaves
    min_tokens: int = 0  # no end before so many tokens; a stop string has to complete after them
    logprobs: int | None = None  # report the sampled token and this many best; -1 is the whole vocabulary
    prompt_logprobs: int | None = None  # the same for each token of the prompt
    logprob_token_ids: Sequence[int] | None = None  # report the sampled token and these, in place of the best
    detokenize: bool = True  # False leaves the text empty
    skip_special_tokens: bool = True  # leave special tokens out of the text
    spaces_between_special_tokens: bool = True  # False joins what stands between special tokens without a space
    include_stop_str_in_output: bool = False  # leave the stop string, or the stop token's text, in the text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # what `LLMEngine.step` hands out
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None  # what the text must look like
    logit_bias: Mapping[int, float] | None = None  # token id -> what is added to its logit
    allowed_token_ids: Sequence[int] | None = None  # no other token is drawn
    extra_args: Mapping[str, Any] | None = None  # kept for functions of your own; the engine reads none of it
    bad_words: Sequence[str] | None = None  # words that are never completed
    # Functions (output token ids, logits [vocab_size]) -> logits, called one after the other for each token.
    logits_processors: Sequence[LogitsProcessor] | None = None
    bad_words_token_ids: list[list[int]] | None = field(default=None, init=False, compare=False)  # set by a tokenizer

    def __post_init__(self):
        for name, default in DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        self._check_numbers()
        check_flags(self, *FLAGS)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind={self.output_kind!r} is not allowed; allowed: a RequestOutputKind")
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise TypeError(f"extra_args={self.extra_args!r} is not allowed; allowed: a dictionary, or None")
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n={self.n} greedy samples would all be the same; use n=1 or temperature > 0")
        # Lists and dictionaries of its own: a change of what was given changes nothing here.
        self.structured_outputs = StructuredOutputsParams.make(self.structured_outputs)
        self.stop, self.bad_words = as_strings("stop", self.stop), as_strings("bad_words", self.bad_words)
        self.stop_token_ids = as_token_ids("stop_token_ids", [] if self.stop_token_ids is None else self.stop_token_ids)
        for name in ("allowed_token_ids", "logprob_token_ids"):
            setattr(self, name, as_some_token_ids(name, getattr(self, name)))
        self.logit_bias = as_bias(self.logit_bias)
        self.logits_processors = as_callables("logits_processors", self.logits_processors)
        self._check_together()

    def _check_numbers(self) -> None:
        check_int("n", self.n, 1)
        check_float("temperature", self.temperature, 0, 1000)
        check_float("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError(f"top_p={self.top_p!r} keeps no token; allowed: over 0, up to 1")
        check_int("top_k", self.top_k, -1)
        check_float("min_p", self.min_p, 0, 1)
        self.seed = None if self.seed == -1 else self.seed
        check_int("seed", self.seed, 0, MAX_SEED, none_means="drawn from the LLM's seed")
        check_float("presence_penalty", self.presence_penalty, -2, 2)
        check_float("frequency_penalty", self.frequency_penalty, -2, 2)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100)
        check_int("max_tokens", self.max_tokens, 1, none_means="as many as fit")
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
            check_int(name, getattr(self, name), -1, none_means="not reported")

    def _check_together(self) -> None:
        """Raise ValueError for fields that exclude each other."""
        structured = self.structured_outputs
        if structured is not None and self.ignore_eos and (structured.kind != "begin" or structured.after):
            raise ValueError(
                "ignore_eos=True goes on after the end of the text, which structured_outputs sets; use only one"
            )
        if structured is not None and structured.jump_forward and self.reports_logprobs:
            name = "logprobs" if self.logprobs is not None else "logprob_token_ids"
            raise ValueError(
                f"{name}={getattr(self, name)} are not computed of the tokens that jump_forward writes; "
                "leave out either"
            )
        for name in ("allowed_token_ids", "bad_words", "logits_processors"):
            if structured is not None and getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} may forbid every token that structured_outputs allows; use only "
                    "one, and say in the grammar what may not come"
                )
        if not self.detokenize and self.stop:
            raise ValueError(
                f"stop={self.stop!r} is looked for in the text, and detokenize=False makes none; "
                "use stop_token_ids, or leave detokenize out"
            )
        if self.logprob_token_ids is not None and self.logprobs not in (None, len(self.logprob_token_ids)):
            raise ValueError(
                f"logprobs={self.logprobs} asks for the best tokens, logprob_token_ids={self.logprob_token_ids} "
                f"for others; leave logprobs out, or set it to {len(self.logprob_token_ids)}"
            )

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """The parameters of a request as JSON has it: keys of `logit_bias` may be strings, and its values are cut to
        -100 and 100."""
        if given.get("logit_bias") is not None:
            given["logit_bias"] = bias_of_json(given["logit_bias"])
        return cls(**given)

    def clone(self) -> SamplingParams:
        """A copy, checked anew."""
        copy = replace(self)
        copy.bad_words_token_ids = self.bad_words_token_ids
        return copy

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def begins_whole(self) -> bool:
        """Whether the text has characters of its own from its first byte on, as a grammar's has. Free text may begin
        with the rest of a character of the prompt."""
        return self.structured_outputs is not None and self.structured_outputs.after is None

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def reports_logprobs(self) -> bool:
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def has_rules(self) -> bool:
        """Whether its logits are changed row by row, see `minillm.sampling.rules`."""
        return bool(self.allowed_token_ids or self.reads_outputs)

    @property
    def reads_outputs(self) -> bool:
        """Whether a rule for the next token depends on the tokens before it."""
        return bool(self.bad_words or self.logits_processors)

    def token_ids(self) -> dict[str, list[int]]:
        """Every token id given, by field: what only a vocabulary can check."""
        names = ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids")
        return {name: list(getattr(self, name) or ()) for name in names}

    def __repr__(self) -> str:
        given = [(one.name, getattr(self, one.name)) for one in fields(self) if one.init]
        told = [f"{name}={value!r}" for name, value in given if value != UNSET.get(name) and value not in ([], {})]
        return f"SamplingParams({', '.join(told)})"


UNSET = {one.name: one.default for one in fields(SamplingParams) if one.init}
DEFAULTS = {name: value for name, value in UNSET.items() if value is not None and name != "max_tokens"}
FLAGS = tuple(name for name, value in DEFAULTS.items() if isinstance(value, bool))


@takes_names_of_vllm(absent.BEAM, ("beam_width", "max_tokens", "ignore_eos", "temperature", "length_penalty"))
@dataclass
class BeamSearchParams:
    """What `LLM.beam_search` searches for. Names and meaning are vLLM's."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # nothing is sampled
    length_penalty: float = 1.0  # a beam's score is its log-probability / tokens ** length_penalty
    include_stop_str_in_output: bool = False  # leave the text of an end-of-sequence token in the text
    skip_special_tokens: bool = True

    def __post_init__(self):
        check_int("beam_width", self.beam_width, 1)
        check_int("max_tokens", self.max_tokens, 1)
        check_float("length_penalty", self.length_penalty, -1000, 1000)
        check_flags(self, "ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
        if self.temperature != 0:
            raise NotImplementedError(
                f"temperature={self.temperature!r} is not served: {absent.BEAM['temperature'].why}"
            )
