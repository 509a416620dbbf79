"""A request: a prompt, how to continue it, and how far it has come. Built in chapter 05.

token_ids            [p p p p p p | o o o]     prompt, then what was generated
num_computed_tokens   --------->               keys and values of these are in the cache
num_tokens            ------------------>      all there are, guesses too (chapter 18)

A step computes some of the difference.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from minillm.sampling.grammar.protocol import Grammar, GrammarError
from minillm.sampling.logprobs import Logprob
from minillm.sampling.noise import derive_seed
from minillm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class SampledToken(NamedTuple):
    """What a step drew for a request, or what its grammar forced behind that."""

    token_id: int
    logprobs: dict[int, Logprob] | None = None  # of the most probable tokens, where they were asked for


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # in the queue, owns no block
    RUNNING = "running"  # in the batch
    PREEMPTED = "preempted"  # was running, back in the queue, its blocks taken
    FINISHED = "finished"


class Request:
    """What the engine is asked to do, and its state. `max_tokens` is what both the parameters and the limits allow."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        seed: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        prompt: str | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
        index: int = 0,
        group_id: str | None = None,
        logprob_start_len: int = 0,
        grammar: Grammar | None = None,
    ):
        self.request_id = request_id
        self.group_id = request_id if group_id is None else group_id  # the request that this is a sample of
        self.prompt = prompt
        self.params = params
        self.max_tokens = max_tokens
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time  # seconds
        self.priority = priority  # lower goes first
        self.user = user
        self.cache_salt = cache_salt  # requests with different salts share no cached block
        self.index = index  # which of the n samples
        self.grammar = grammar  # what its text may go on with (chapter 19)

        self.prompt_token_ids = list(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.spec_token_ids: list[int] = []  # guessed to come next, and not checked yet (chapter 18)
        # [len(spec_token_ids), vocab_size], what they were drawn from, if by chance
        self.spec_probs: Tensor | None = None
        self.takes_drafts = True
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0  # of those
        self.num_in_flight = 0  # tokens that launched steps will sample, and nobody has seen (chapter 14)
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None  # why its grammar could not go on, where it ended with "error"
        # The output that the step under way draws without a mask, and why.
        self.maskless: tuple[int, GrammarError] | None = None
        self.num_forks = params.n - 1 if index == 0 else 0  # samples still to be split off, when the prompt is done
        self.num_cached_tokens = 0  # prompt tokens that were not computed, since a cache had them
        self.cached_tokens: dict[str, int] = {}  # the same by tier: device, host, disk (chapter 17)
        self.num_preemptions = 0
        self.max_computed_tokens = 0  # the most it ever had computed: what lies under it was paid for once
        self.token_times: list[float] = []  # when each output token came, seconds on the engine's clock
        # Where prompt log-probabilities begin; nothing precedes token 0.
        self.logprob_start_len = max(1, logprob_start_len)
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.logprob_start_len
        own = frozenset(params.stop_token_ids)
        self.stop_token_ids = own if params.ignore_eos else own | eos_token_ids  # every token that ends it

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + len(self.spec_token_ids) + self.num_in_flight

    @property
    def ends_in_flight(self) -> bool:
        """Whether a token on its way is sure to be the last, so that nothing after it need be computed."""
        return self.num_in_flight > 0 and len(self.output_token_ids) + self.num_in_flight >= self.max_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def prefix_cache_limit(self) -> int:
        """How many of its first tokens may come from a cache. The logits of the last are always wanted;
        those of the prompt from one token before where its log-probabilities begin.
        """
        known = len(self.token_ids)
        return (known if self.prompt_logprobs is None else min(known, self.logprob_start_len)) - 1

    def sample_seed(self, index: int | None = None) -> int:
        """The seed of sample `index`, or of this one. The first one keeps the request's,
        so it is the same for any n."""
        index = self.index if index is None else index
        return derive_seed(self.seed, index) if index else self.seed

    def append(self, token_id: int) -> bool:
        """Take the next token, and finish if it is the last: `stop` for a stop token, `length` at the limit.
        A token that its grammar does not take ends it with `error`. Returns whether it was taken."""
        at_end = False
        if self.grammar is not None:
            try:
                self.grammar.accept(token_id)
            except (GrammarError, ValueError) as error:
                self._fail(error)
                return False
            at_end = self.grammar.is_terminated
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)
        num_outputs = len(self.output_token_ids)
        if at_end or (token_id in self.stop_token_ids and num_outputs >= self.params.min_tokens):
            self.finish_reason = "stop"
            if token_id in self.params.stop_token_ids:
                self.stop_reason = token_id
        elif num_outputs >= self.max_tokens:
            self.finish_reason = "length"
        return True

    def take(self, tokens: list[SampledToken]) -> list[tuple[Request, SampledToken | None]]:
        """Take what the model drew, as far as the text goes on, and whatever the grammar forces after each token.

        Several were drawn where guesses were right; those behind a jump count only if the guess was that very jump.
        What was drawn without a mask is not taken. Returns what was; a None if the grammar failed before the first
        token.
        """
        if self.grammar is None and len(tokens) == 1:  # as in most steps
            self.append(tokens[0].token_id)
            return [(self, tokens[0])]
        drawn, taken = deque(tokens), []
        maskless, self.maskless = self.maskless, None
        while drawn and not self.finish_reason:
            if maskless is not None and len(self.output_token_ids) == maskless[0]:
                self._fail(maskless[1])
            elif self.append(drawn[0].token_id):
                taken.append(drawn.popleft())
                self._take_jump(drawn, taken)
        return [(self, token) for token in taken or [None]]

    def _take_jump(self, drawn: deque[SampledToken], taken: list[SampledToken]) -> None:
        for token_id in self._jump_tokens():
            if drawn and drawn[0].token_id != token_id:
                drawn.clear()
            if self.finish_reason or not self.append(token_id):
                break
            taken.append(drawn.popleft() if drawn else SampledToken(token_id))

    def _jump_tokens(self) -> list[int]:
        """The tokens that follow whatever the model says, since the grammar leaves no choice; none unless asked for."""
        if self.grammar is None or self.finish_reason or not self.params.structured_outputs.jump_forward:
            return []
        try:
            return self.grammar.jump_tokens()
        except GrammarError as error:
            self._fail(error)
            return []

    def _fail(self, error: Exception) -> None:
        self.finish_reason, self.error = "error", error

    def fork(self, index: int) -> Request:
        """Sample `index` of the same prompt, exactly as far as this one has come, output included."""
        child = Request(
            f"{self.group_id}_{index}", self.prompt_token_ids, self.params, self.max_tokens, self.seed,
            self.eos_token_ids, self.prompt, self.arrival_time, self.priority, self.user, self.cache_salt, index,
            self.group_id, self.logprob_start_len, self.grammar and self.grammar.copy(),
        )  # fmt: skip
        child.token_ids += self.output_token_ids
        child.output_token_ids += self.output_token_ids
        child.num_forks, child.takes_drafts, child.maskless = 0, self.takes_drafts, self.maskless
        child.num_cached_tokens, child.cached_tokens = self.num_cached_tokens, self.cached_tokens
        child.num_computed_tokens = child.max_computed_tokens = self.num_computed_tokens
        return child

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt {self.num_prompt_tokens}, "
            f"output {len(self.output_token_ids)}/{self.max_tokens}, computed {self.num_computed_tokens})"
        )
