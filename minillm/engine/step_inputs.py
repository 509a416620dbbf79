"""What the runner reads in a step: the state of each request, and one step's numbers. Built in chapter 05."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from minillm.engine.step import NewRequest, ScheduledRequest
from minillm.sampling.grammar.mask import Stuck
from minillm.sampling.grammar.protocol import Grammar
from minillm.sampling.noise import derive_seed


class RequestState:
    """What the runner knows of one request. A drafter reads it too (`minillm.speculative.drafter.DraftedRequest`)."""

    __slots__ = (
        "adapter", "cache_salt", "draft_probs", "grammar", "index", "logprob_start_len", "num_prompt_tokens",
        "output_token_ids", "params", "prompt", "prompt_token_ids", "request_id", "seed", "slot", "stop_token_ids",
        "stuck", "token_ids",
    )  # fmt: skip

    def __init__(self, new: NewRequest, slot: int, grammar: Grammar | None):
        self.request_id, self.params, self.seed, self.index = new.request_id, new.params, new.seed, new.index
        self.stop_token_ids, self.cache_salt = new.stop_token_ids, new.cache_salt
        self.logprob_start_len, self.adapter = new.logprob_start_len, new.adapter
        self.token_ids = new.token_ids  # prompt and output, as far as the host knows them
        self.num_prompt_tokens = new.num_prompt_tokens
        self.prompt_token_ids = new.token_ids[: new.num_prompt_tokens]
        self.output_token_ids = new.token_ids[new.num_prompt_tokens :]
        self.prompt = np.asarray(self.prompt_token_ids, np.int64)
        self.slot = slot
        self.grammar = grammar
        self.stuck: Stuck | None = None  # where in the step under way its grammar could make no mask, and why
        # [num draft tokens, vocab_size]: what they were drawn from, if they were sampled
        self.draft_probs: Tensor | None = None

    def sample_seed(self, index: int | None = None) -> int:
        """As `minillm.engine.request.Request.sample_seed`."""
        index = self.index if index is None else index
        return derive_seed(self.seed, index) if index else self.seed

    def tokens(self, row: ScheduledRequest) -> np.ndarray | list[int]:
        """The tokens that a row of a step processes, draft tokens last."""
        end = row.start + row.num_tokens
        if end <= self.num_prompt_tokens:
            return self.prompt[row.start : end]
        return [*self.token_ids[row.start : end - len(row.draft)], *row.draft]


@dataclass
class StepInputs:
    """One step's numbers on the host, ready to be sent; decode rows stand first."""

    rows: Sequence[ScheduledRequest]
    states: list[RequestState]  # of each row
    slots: np.ndarray  # [num_rows]
    starts: np.ndarray  # [num_rows]
    counts: tuple[int, ...]  # tokens of each row
    samples: tuple[int, ...]  # of each row
    has_drafts: bool
    any_scored: bool  # whether a request wants log-probabilities of its prompt
    token_ids: np.ndarray  # [num_tokens]; 0 for one that only the device knows
    positions: np.ndarray  # [num_tokens]
    slot_mapping: np.ndarray  # [num_tokens]
    query_start_loc: np.ndarray  # [num_rows + 1]
    late: np.ndarray  # the rows whose token only the device knows
    seq_lens: np.ndarray  # [num_rows], with this step's tokens
    all_sample: bool  # whether every row wants one next token

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def all_decode(self) -> bool:
        """Whether every row has one token."""
        return len(self.token_ids) == len(self.rows)

    def logits_wanted(self) -> np.ndarray:
        """Of the step's tokens those whose logits are drawn from: the last one of each row that samples,
        and all its draft tokens. Behind an accepted draft token another token is drawn."""
        ends = self.query_start_loc[1:]
        if not self.has_drafts:
            return ends - 1 if self.all_sample else ends[np.asarray(self.samples) > 0] - 1
        wanted = [range(end - 1 - len(row.draft), end) for row, end in zip(self.rows, ends.tolist()) if row.samples]
        return np.fromiter((at for some in wanted for at in some), np.int64)
