"""A draft model: a smaller decoder drafts, token by token, in a paged cache of its own. Built in chapter 18.

    certain tokens   t t t t t t              the target rejected a draft token and put x in its place:
    draft's cache    k k k k k g g g          the three g were drafted; the keys of one are still right
    next time        t t t t t t g x          common part kept, one token to compute, then the next draft

After a full acceptance two tokens are to be computed first: the last draft token, whose keys were not needed before,
and the target's free token. The first step of a draft is therefore a small ragged batch like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.kv_cache.manager import KVCacheManager
from minillm.sampling.grammar.mask import GrammarMasks
from minillm.sampling.grammar.protocol import GrammarError
from minillm.sampling.metadata import SamplingMetadata, SamplingRow
from minillm.sampling.noise import derive_seed
from minillm.sampling.sampler import Sampler
from minillm.speculative.drafter import Draft, DraftedRequest, by_chance
from minillm.speculative.rejection import DRAFT
from minillm.staging import Download


class DraftState:
    """What the draft model has computed of one request. The cache manager takes it for a request."""

    prompt_logprobs = None

    def __init__(self, request_id: str, cache_salt: str | None = None):
        self.request_id, self.cache_salt = request_id, cache_salt
        self.token_ids: list[int] = []  # those of the request, then the draft tokens
        self.num_certain = 0  # of them, when it was asked the last time
        self.num_computed_tokens = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def prefix_cache_limit(self) -> int:
        return len(self.token_ids) - 1

    def follow(self, token_ids: list[int]) -> None:
        """Take over what has become certain; rejected draft tokens are forgotten, with their keys."""
        same = self.num_certain
        while same < min(len(self.token_ids), len(token_ids)) and self.token_ids[same] == token_ids[same]:
            same += 1
        self.token_ids[same:] = token_ids[same:]
        self.num_certain = len(token_ids)
        # The last one is read again in any case: its logits are wanted.
        self.num_computed_tokens = max(0, min(self.num_computed_tokens, same, len(token_ids) - 1))


class DraftRow(NamedTuple):
    """A row of a draft step: `num_tokens` tokens of a request, from `start` on."""

    request: DraftState
    start: int
    num_tokens: int
    block_ids: list[int]
    samples: int = 1
    draft: tuple[int, ...] = ()


class ModelDrafter:
    """Drafts with a model. `forward` maps rows to logits, one row of logits for each that samples, and takes the rows'
    tokens where only the device knows them (`ModelRunner.forward` of the draft model); `manager` owns the blocks of its
    cache.

    Of prompts it has not read it reads at most `max_num_batched_tokens` in a step, and drafts when it is done.
    Where its cache is full, or a text is longer than the `max_model_len` it was made for, there is no draft.
    `on_forget` is called with the id of a request that has ended.
    """

    def __init__(
        self,
        forward: Callable[[list[DraftRow], Tensor | None], Tensor],
        manager: KVCacheManager,
        vocab_size: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
        max_num_batched_tokens: int = 8192,
        on_forget: Callable[[str], object] = lambda request_id: None,
    ):
        self.forward, self.manager, self.on_forget = forward, manager, on_forget
        self.vocab_size, self.max_model_len, self.device = vocab_size, max_model_len, device
        self.max_num_batched_tokens = max_num_batched_tokens
        self.sampler = Sampler()
        self.masks = GrammarMasks(vocab_size, device)
        self.states: dict[str, DraftState] = {}

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[Draft]:
        drafting = [
            Drafting(request, self._state(request), min(count, self.max_model_len - len(request.token_ids)))
            for request, count in zip(requests, counts)
        ]
        active = self._read(drafting)
        metadata: SamplingMetadata | None = None
        while active:
            if metadata is None or len(metadata.rows) != len(active):
                metadata = self._metadata(active)
            metadata.masks = self.masks.fill([(one.request.grammar, ()) for one in active])
            if self.masks.stuck:  # the draft goes no further than the grammar
                active = [one for index, one in enumerate(active) if index not in self.masks.stuck]
                continue
            self._extend(active, metadata)
            active = [one for one in active if not one.is_done]
        return [one.draft() for one in drafting]

    def _extend(self, active: list[Drafting], metadata: SamplingMetadata) -> None:
        """Draft until the first request has enough. The draft tokens go from step to step on the device,
        and the host waits for all of them together; a grammar has to see each one before the next."""
        rounds = 1 if any(one.request.grammar is not None for one in active) else min(one.num_left for one in active)
        rows = [self._row(one, samples=1) for one in active]
        drafted: list[Tensor] = []  # of each round, [len(active)]
        probs: list[Tensor] = []
        for _ in range(rounds):
            logits = self.forward(rows, drafted[-1] if drafted else None)
            drafted.append(self.sampler.choose(logits, metadata))
            if any(one.by_chance for one in active):
                probs.append(metadata.probs(logits))
            metadata.advance(drafted[-1])
            rows = [row._replace(start=row.start + row.num_tokens, num_tokens=1) for row in rows]
        (token_ids,) = Download(torch.stack(drafted, dim=1)).wait()
        for index, one in enumerate(active):
            one.take(token_ids[index].tolist(), [of_round[index] for of_round in probs] if one.by_chance else [])

    def forget(self, request_id: str) -> None:
        if (state := self.states.pop(request_id, None)) is not None:
            self.manager.free(state)
            self.on_forget(request_id)

    def text_of(self, request: DraftedRequest) -> list[int]:
        """The tokens of a request that the model reads: all of them."""
        return request.token_ids

    def salt_of(self, request: DraftedRequest) -> str | None:
        """Requests whose texts have a common beginning share its blocks if this is equal too."""
        return request.cache_salt

    def _state(self, request: DraftedRequest) -> DraftState:
        state = self.states.setdefault(request.request_id, DraftState(request.request_id, self.salt_of(request)))
        state.follow(self.text_of(request))
        if request.request_id in self.manager.tables:
            # Now, while all its tokens are certain: what has a name is never written again.
            self.manager.cache_blocks(state)
        return state

    def _read(self, drafting: list[Drafting]) -> list[Drafting]:
        """Compute what is certain and not in the cache, but for the tokens that the first draft step takes along.
        Returns those that can draft, the ones with a single token to compute first."""
        budget = self.max_num_batched_tokens
        active, reading = [], []
        for one in drafting:
            if one.count < 1 or not self._make_room(one):
                continue
            missing = one.num_missing
            if missing <= budget:
                active.append(one)
                budget -= missing
            elif budget:
                reading.append(self._row(one, samples=0)._replace(num_tokens=budget))
                budget = 0
        if reading:
            self.forward(reading, None)
            for row in reading:
                row.request.num_computed_tokens += row.num_tokens
        return sorted(active, key=lambda one: one.num_missing > 1)

    def _make_room(self, one: Drafting) -> bool:
        """KV slots for what is certain and for the draft; a new request begins with what the prefix cache holds of
        it."""
        state, found = one.state, None
        if state.request_id not in self.manager.tables:
            found = self.manager.get_computed_blocks(state)
        num_computed = state.num_computed_tokens if found is None else found.num_tokens
        if not self.manager.allocate_slots(state, len(state.token_ids) + one.count - 1 - num_computed, found):
            return False
        state.num_computed_tokens = num_computed
        return True

    def _row(self, one: Drafting, samples: int) -> DraftRow:
        state = one.state
        return DraftRow(
            state, state.num_computed_tokens, one.num_missing, self.manager.tables[state.request_id], samples
        )

    def _metadata(self, active: list[Drafting]) -> SamplingMetadata:
        rows = [
            SamplingRow(
                one.request.params,
                derive_seed(one.request.sample_seed(), DRAFT) if one.by_chance else one.request.sample_seed(),
                one.request.prompt_token_ids,
                one.request.output_token_ids + one.token_ids,
                one.request.stop_token_ids,
            )
            for one in active
        ]
        return SamplingMetadata(rows, self.vocab_size, self.device)


class Drafting:
    """A draft in the making."""

    def __init__(self, request: DraftedRequest, state: DraftState, count: int):
        self.request, self.state, self.count = request, state, count
        self.by_chance = by_chance(request)
        self.token_ids: list[int] = []
        self.probs: list[Tensor] = []

    @property
    def num_missing(self) -> int:
        return len(self.state.token_ids) - self.state.num_computed_tokens

    @property
    def num_left(self) -> int:
        return self.count - len(self.token_ids)

    def take(self, token_ids: list[int], probs: list[Tensor]) -> None:
        """Add draft tokens, all but the last one computed; a request with a grammar gets one at a time."""
        self.state.num_computed_tokens = len(self.state.token_ids) + len(token_ids) - 1
        if self.request.grammar is not None:
            try:
                self.request.grammar.accept(*token_ids)
            except GrammarError:
                self.count = len(self.token_ids)  # the draft goes no further than the grammar
                return
        self.state.token_ids += token_ids
        self.token_ids += token_ids
        self.probs += probs

    @property
    def is_done(self) -> bool:
        return self.num_left <= 0 or (self.request.grammar is not None and self.request.grammar.is_terminated)

    def draft(self) -> Draft:
        if self.request.grammar is not None:  # as it was: nothing is certain yet
            self.request.grammar.rollback(len(self.token_ids))
        return Draft(self.token_ids, torch.stack(self.probs) if self.probs else None)
