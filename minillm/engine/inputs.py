"""From what a caller wrote to requests that can be served: tokenize and check. Built in chapter 04.

Everything is checked before any request starts, so a bad one disturbs no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any

from minillm.engine.chats import render_chats
from minillm.engine.healing import Prompt as ReadyPrompt, all_healed
from minillm.engine.lock import locked
from minillm.engine.lora_request import AdapterRef, LoRARequest
from minillm.engine.prompt_forms import (
    as_prompts,
    check_length,
    check_text,
    logprob_start_of,
    longest_token,
    one_each,
    salt_of,
)
from minillm.engine.request import Request
from minillm.sampling.grammar.compiler import GrammarCompiler
from minillm.sampling.noise import derive_seed
from minillm.sampling.params import SamplingParams
from minillm.sampling.rules import word_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minillm.sampling.grammar.protocol import CompiledGrammar

Prompt = str | Sequence[int] | dict[str, Any]
PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "logprob_start_len", "heal"}
PROMPT_FORMS = (
    "a string, a list of token ids, {'prompt': string}, {'prompt_token_ids': [ids]} "
    "(with or without 'cache_salt', 'logprob_start_len', 'heal'), or a list of these"
)


class InputProcessor:
    """Makes requests for one model. Raises TypeError or ValueError naming the prompt, the value and the limit.

    `default_params` are those of a prompt that is given none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        seed: int,
        clock: Callable[[], float] = time.monotonic,
        default_params: SamplingParams = SamplingParams(),
    ):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.clock = clock
        self.default_params = default_params
        self.lock = threading.RLock()  # a tokenizer serves one thread at a time
        self.adapters: Callable[[Any, int], list[Any]] = _no_adapters  # of a `lora_request`: chapter 23
        self._longest_token = cache(partial(longest_token, tokenizer))
        self._counter = count()

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        add_special_tokens: bool = True,
        priority: int | Sequence[int] | None = None,
        user: str | Sequence[str] | None = None,
        num_new: int = 1,
        lora_request: Any = None,
    ) -> list[Request]:
        """One request a prompt, in order; parameters, priorities, users and adapters are one for all or one each. Each
        has room for `num_new` tokens at least; a text that only becomes a vector needs none."""
        prompts = as_prompts(prompts)
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise TypeError(f"prompts={prompts!r} is not allowed; allowed: {PROMPT_FORMS}")
        adapters = [None] * len(prompts) if lora_request is None else self.adapters(lora_request, len(prompts))
        with self.lock:
            params = self._params(sampling_params, len(prompts))
            checked = [self._tokens(f"prompts[{at}]", p, add_special_tokens, num_new) for at, p in enumerate(prompts)]
            salts = [salt_of(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]
            starts = [
                logprob_start_of(f"prompts[{index}]", *one) for index, one in enumerate(zip(prompts, checked, params))
            ]
            ready = all_healed(prompts, checked, params, lambda: self._grammars.vocabulary)
            for one in ready:
                self.compile(one.params)
            priorities = one_each("priority", priority, int, 0, len(prompts))
            users = one_each("user", user, str, "", len(prompts))
            arrival_time = self.clock()
            return [
                self._request(*options, arrival_time=arrival_time)
                for options in zip(ready, salts, starts, priorities, users, adapters)
            ]

    @locked
    def conversations(self, messages: Sequence[Any], **options: Any) -> list[str]:
        """One conversation or several, as the text that the model's chat template makes of each, see `render_chats`."""
        return render_chats(self.tokenizer, messages, **options)

    def _params(self, given: Any, num_prompts: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            params = [self._own(given or self.default_params)] * num_prompts
        else:
            several = given if isinstance(given, Sequence) else [given]
            own = {id(one): self._own(one) for one in {id(one): one for one in several}.values()}
            params = [own[id(one)] for one in several]
        if len(params) != num_prompts:
            raise ValueError(
                f"sampling_params has {len(params)} entries for {num_prompts} prompts; pass one for all, or one each"
            )
        return params

    def _own(self, params: SamplingParams) -> SamplingParams:
        """A copy for the request, checked as it is now: the caller may have changed it, and may go on to do so."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params={params!r} is not allowed; allowed: a SamplingParams, or a list of them")
        params = params.clone()
        if params.bad_words:
            check_text("bad_words", "".join(params.bad_words))
            encode = partial(self.tokenizer.encode, add_special_tokens=False)
            params.bad_words_token_ids = word_token_ids(encode, params.bad_words)
        self._check_against_vocabulary(params)
        return params

    @locked
    def compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """What `structured_outputs` allows, made ready for this vocabulary. Raises ValueError if it cannot be."""
        if params.structured_outputs is None:
            return None
        return self._grammars.compile(params.structured_outputs)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_token_ids)

    def _check_against_vocabulary(self, params: SamplingParams) -> None:
        for name, token_ids in params.token_ids().items():
            self.check_token_ids(name, token_ids)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise ValueError(f"{name}={getattr(params, name)} exceeds the vocabulary of {self.vocab_size} tokens")

    def _tokens(self, name: str, prompt: Any, add_special_tokens: bool, num_new: int) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict) and prompt.keys() <= PROMPT_KEYS and not PROMPT_KEYS.isdisjoint(prompt):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), self._checked(name, prompt["prompt_token_ids"], num_new)
            prompt = prompt.get("prompt", prompt)
        if not isinstance(prompt, str):
            raise TypeError(f"{name}={prompt!r} is not allowed; allowed: {PROMPT_FORMS}")
        if not prompt:
            raise ValueError(f"{name} is an empty string; give at least one character, or prompt_token_ids")
        check_text(name, prompt)
        check_length(name, prompt, self.max_model_len - num_new, self._longest_token())
        return prompt, self._checked(
            name, self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens), num_new
        )

    def _checked(self, name: str, token_ids: Any, num_new: int) -> list[int]:
        if not isinstance(token_ids, Sequence) or not all(type(token_id) is int for token_id in token_ids):
            raise TypeError(f"{name}: prompt_token_ids={token_ids!r} is not allowed; allowed: a list of whole numbers")
        if not token_ids:
            raise ValueError(f"{name} has 0 tokens; a prompt needs at least one")
        if len(token_ids) > (most := self.max_model_len - num_new):
            also = " and at least one new token" if num_new else ""
            raise ValueError(
                f"{name} has {len(token_ids)} tokens; max_model_len={self.max_model_len} must hold it{also}, "
                f"so at most {most} are allowed"
            )
        self.check_token_ids(f"{name}: prompt_token_ids", token_ids)
        return list(token_ids)

    def check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        """Raise ValueError for an id outside of the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"{name} has token id {token_id}; the vocabulary has {self.vocab_size} tokens, "
                    f"so 0 to {self.vocab_size - 1} are allowed"
                )

    def _request(
        self,
        ready: ReadyPrompt,
        cache_salt: str | None,
        logprob_start_len: int,
        priority: int,
        user: str,
        adapter: tuple[LoRARequest, AdapterRef] | None,
        arrival_time: float,
    ) -> Request:
        number, params = next(self._counter), ready.params
        room = self.max_model_len - len(ready.token_ids)
        return Request(
            request_id=str(number), prompt=ready.text, prompt_token_ids=ready.token_ids, params=params,
            seed=derive_seed(self.seed, number) if params.seed is None else params.seed,
            eos_token_ids=self.eos_token_ids,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            arrival_time=arrival_time, priority=priority, user=user, cache_salt=cache_salt,
            logprob_start_len=logprob_start_len, taken_back=ready.taken_back,
            lora_request=adapter and adapter[0], adapter=adapter and adapter[1],
        )  # fmt: skip


def _no_adapters(given: Any, num_prompts: int) -> list[Any]:
    raise ValueError(f"lora_request={given!r} needs an LLM that was made with enable_lora=True")
