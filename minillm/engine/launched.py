"""LaunchedStep: a step on its way, and what its draws mean for each request. Built in chapter 14.

draws     [x]   [d d x]         [s s s]         one token a row; a draft and the token after it; samples of one prompt
result    x     accepted d, x   a token each    and behind each what its grammar forces (chapter 19)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import numpy as np

from minillm.engine.following import follow, num_accepted
from minillm.engine.input_batch import NO_SLOT, NONE, InputBatch
from minillm.engine.prompt_scores import ScoredPrompt
from minillm.engine.step import ScheduledRequest, StepResult
from minillm.engine.step_inputs import RequestState
from minillm.sampling.counts import TokenCounts
from minillm.sampling.logprobs import Logprob, LogprobTensors, dictionaries
from minillm.sampling.sampler import SamplerOutput
from minillm.staging import Download
from minillm.trace import Trace


class LaunchedStep:
    """All that the host wants of a step is copied as soon as it is there, and waited for together.
    `rows` and `states` are those that sample; `is_plain` says that each does so once, and that none has a grammar."""

    def __init__(
        self,
        rows: Sequence[ScheduledRequest],
        states: list[RequestState],
        sampled: SamplerOutput | None,
        prompts: list[ScoredPrompt],
        requests: InputBatch,
        trace: Trace,
        slots: np.ndarray = NONE,
        is_plain: bool = False,
        counts: TokenCounts | None = None,
    ):
        self.rows, self.states, self.sampled = rows, states, sampled
        self.prompts, self.requests, self.trace = prompts, requests, trace
        self.slots, self.is_plain, self.num_removed, self.counts = slots, is_plain, requests.num_removed, counts
        wanted = (*(sampled.tensors if sampled else ()), *chain.from_iterable(part.scores for part in prompts))
        self.download = Download(*wanted)

    def wait(self) -> StepResult:
        """What was generated. The runner's own record of each request goes on with it;
        one that has ended meanwhile is left out."""
        with self.trace.span("wait"):
            arrived = self.download.wait()
        if self.counts is not None:
            self.counts.arrived()
        if self.is_plain and len(arrived) == 1:  # as in most steps: no log-probabilities
            token_ids = arrived[0].tolist()
            self.requests.extend(self.states, self.slots, token_ids, self.num_removed)
            return StepResult({state.request_id: [token_id] for state, token_id in zip(self.states, token_ids)})
        tensors = iter(arrived)
        sampled = self.sampled and self.sampled.read(*islice(tensors, len(self.sampled.tensors)))
        result = StepResult()
        for request_id, first, counts, scores in self.prompts:
            taken = LogprobTensors(*islice(tensors, len(scores)))
            result.prompt_logprobs[request_id] = (first, dictionaries(taken, counts))
        if sampled is not None:
            self._read(*sampled, result)
        return result

    def _read(self, token_ids: list[int], logprobs: list[dict[int, Logprob] | None] | None, result: StepResult) -> None:
        drawn = zip(token_ids, logprobs or [None] * len(token_ids))
        for state, row in zip(self.states, self.rows):
            of_row = list(islice(drawn, row.samples + len(row.draft)))
            if state.slot == NO_SLOT:
                continue
            # Each sample but the first is a request of its own from now on, which the next step announces with its
            # text.
            for fork_id, one in zip(row.fork_ids, of_row[1:]):
                self._put(fork_id, *follow(state, state.grammar, [one], fork=True), result)
            accepted = num_accepted(of_row, row.draft)
            if row.draft:
                result.num_accepted[state.request_id] = accepted
            taken, ended, error = follow(state, state.grammar, of_row[: accepted + 1])
            self._put(state.request_id, taken, ended, error, result)
            for token_id, _ in taken:
                self.requests.extend([state], np.array([state.slot]), [token_id], self.requests.num_removed)

    @staticmethod
    def _put(request_id: str, taken: list[tuple], ended: bool, error: str | None, result: StepResult) -> None:
        result.token_ids[request_id] = [token_id for token_id, _ in taken]
        if any(row is not None for _, row in taken):
            result.logprobs[request_id] = [row for _, row in taken]
        if ended:
            result.ended.add(request_id)
        if error is not None:
            result.errors[request_id] = error
