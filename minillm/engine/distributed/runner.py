"""ParallelRunner: a ModelRunner that computes its part of a step, and knows all of its tokens. Built in chapter 20.

Each rank gets the same steps and keeps the same record of each request. The ranks of a stage draw the same tokens
(`minillm.parallel.sampler`), and the other stages hear of them, so no rank needs a word from the engine in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from minillm.engine.launched import LaunchedStep
from minillm.engine.runner import ModelRunner
from minillm.engine.step import ScheduledRequest, SchedulerOutput, StepResult
from minillm.engine.step_inputs import RequestState, StepInputs
from minillm.parallel.decoder import ParallelDecoder
from minillm.parallel.sampler import Arrival, SplitSampler
from minillm.sampling.grammar.mask import GrammarMasks


class ArrivingStep:
    """A launched step that draws tokens for the requests `drawn`, in another stage; in the last stage, in this one."""

    def __init__(self, launched: LaunchedStep, arrival: Arrival, drawn: set[str]):
        self.launched, self.arrival, self.drawn = launched, arrival, drawn
        self.result: StepResult | None = None

    def wait(self) -> StepResult:
        """As `LaunchedStep.wait`; the same result when it is called again."""
        if self.result is None:
            self.arrival.wait()
            self.result = self.launched.wait()
        return self.result


class ParallelRunner(ModelRunner):
    """The runner of one rank. `model` is a `ParallelDecoder`, and `sampler` draws where all logits are gathered."""

    model: ParallelDecoder
    sampler: SplitSampler

    def __init__(self, model: ParallelDecoder, *parts: object, **named: object):
        super().__init__(model, *parts, **named)
        self.vocab_size = model.whole.vocab_size
        self.masks = GrammarMasks(self.vocab_size, model.device)
        self.sampler = SplitSampler(self.sampler, model.communicator, model.vocabulary, self.vocab_size)
        self.layout = model.layout
        self.unread: deque[ArrivingStep] = deque()

    def launch(self, output: SchedulerOutput) -> ArrivingStep:
        """As `ModelRunner.launch`. A step reads the tokens of the last launched one on the device, where that drew one
        for each of its requests. Those of steps before it, of which a pipeline of three stages has some under way, are
        waited for here, and so are accepted drafts, samples and what a grammar forces: the engine has them from the
        leader, and this rank must know them too. The chunks of a prompt draw nothing, so the next chunk waits for none
        of them."""
        request_ids = {row.request_id for row in output.rows}
        on_device = self.unread[-1] if self.unread and self.unread[-1].launched.is_plain else None
        needed = [
            at
            for at, step in enumerate(self.unread)
            if step is not on_device and not step.drawn.isdisjoint(request_ids)
        ]
        for _ in range(needed[-1] + 1 if needed else 0):
            self.unread.popleft().wait()
        launched = super().launch(output)
        drawn = {row.request_id for row in output.rows if row.samples}
        self.unread.append(ArrivingStep(launched, self.sampler.arrival, drawn))
        while len(self.unread) > 1 and self.unread[0].result is not None:
            self.unread.popleft()
        return self.unread[-1]

    def forward(
        self, rows: Sequence[ScheduledRequest], token_ids: Tensor | None = None
    ) -> tuple[Tensor, StepInputs, list[tuple[RequestState, int, int]]]:
        """As `ModelRunner.forward`. Logits for prompt log-probabilities are gathered, and reported by one rank."""
        logits, step, scored = super().forward(rows, token_ids)
        is_cut = self.layout.is_last and self.layout.tensor_parallel_size > 1
        self.sampler.is_gathered = bool(scored) and is_cut
        if not scored:
            return logits, step, scored
        if is_cut:
            logits = self.sampler.gather(logits)
        if self.layout.rank == self.layout.leader:
            return logits, step, scored
        return logits[: len(logits) - sum(count for _, _, count in scored)], step, []

    def _feed_sampled(self, token_ids: Tensor, step: StepInputs) -> None:
        if len(step.late):
            self.sampler.arrival.wait()
        super()._feed_sampled(token_ids, step)
