"""Speculation: before a step drafts are asked for, after it the accepted tokens are counted. Built in chapter 18.

Drafter.propose -> Request.spec_token_ids -> Scheduler gives them slots -> runner verifies them -> Scheduler.update
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.engine.step import SchedulerOutput, StepResult
from minillm.speculative.adaptive import AdaptiveLength
from minillm.speculative.metrics import SpeculationMetrics
from minillm.trace import Trace

DEFAULT_LENGTH = 4


class Speculation:
    """Decides which requests get draft tokens, and how many: at most `num_tokens` each; `lengths` may choose fewer.
    `draft` is the runner's: it maps (request id, count) to draft tokens."""

    def __init__(
        self,
        draft: Callable[[list[tuple[str, int]]], list[list[int]]],
        num_tokens: int = DEFAULT_LENGTH,
        lengths: AdaptiveLength | None = None,
        trace: Trace | None = None,
    ):
        self.draft, self.num_tokens, self.lengths = draft, num_tokens, lengths
        self.trace = trace or Trace(enabled=False)
        self.metrics = SpeculationMetrics()
        self.asked: list[Request] = []  # whose drafts were asked for before the last step

    def propose(self, scheduler: Scheduler, known: Mapping[str, Request]) -> None:
        """Give every request that is about to decode its draft tokens, of those that the runner knows.
        None of their steps is in flight: a draft continues the last token, which has to be known."""
        for request in scheduler.running:  # drafts that the last step had no room for are of no use any more
            request.spec_token_ids = []
        self.asked = ready = [
            request
            for request in scheduler.running
            if _takes_draft(request) and known.get(request.request_id) is request
        ]
        if not ready:
            return
        counts = self._counts(ready, scheduler)
        drafts = self.draft([(request.request_id, count) for request, count in zip(ready, counts)])
        for request, token_ids in zip(ready, drafts):
            request.spec_token_ids = token_ids

    def count(self, output: SchedulerOutput, result: StepResult, requests: Mapping[str, Request]) -> None:
        """What became of the draft tokens of a step; before it is taken in, while its requests are alive."""
        for row in output.rows:
            if not row.samples or (request := requests.get(row.request_id)) is None:
                continue
            drafted, accepted = len(row.draft), result.num_accepted.get(row.request_id, 0)
            if self.lengths is not None:
                self.lengths.add(row.request_id, drafted, accepted)
            if drafted:
                self.metrics.add(drafted, accepted)
                request.num_drafted_tokens += drafted
                request.num_accepted_tokens += accepted
                self.trace.count("drafted", drafted, request=row.request_id, draft=row.draft)
                self.trace.count("accepted", accepted, request=row.request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These have ended."""
        if self.lengths is not None:
            for request_id in request_ids:
                self.lengths.forget(request_id)

    def _counts(self, ready: list[Request], scheduler: Scheduler) -> list[int]:
        """How many tokens each may draft: what is left of the budget when every running request has its own token."""
        left = max(0, scheduler.max_num_batched_tokens - len(scheduler.running))
        counts = []
        limits = [
            max(0, min(self.num_tokens, request.max_tokens - len(request.output_token_ids) - 1)) for request in ready
        ]
        if self.lengths is not None:
            limits = self.lengths.choose(
                [request.request_id for request in ready], limits, len(scheduler.running) - len(ready)
            )
        for limit in limits:
            counts.append(min(limit, left))
            left -= counts[-1]
        return counts


def _takes_draft(request: Request) -> bool:
    """Whether all but its last token is computed, and the prompt is not about to fork."""
    return (
        request.takes_drafts
        and request.num_computed_tokens == request.num_tokens - 1
        and request.num_in_flight == request.num_forks == 0
        and len(request.output_token_ids) > 0
    )
