"""Beam search over the engine: beams are requests that fork, share their blocks and copy on write. Built in chapter 06.

The search itself is chapter 01's. It asks for the next token's log-probabilities of a few texts, each one token
longer than one it asked for last time. That one's request goes on with the token; where two texts continue the same
one, the second forks off it, and what no beam continues is dropped.

A beam whose token has come rests, and keeps its blocks and its place in the batch. Where that leaves the others no
room, beams at rest end, and begin again from their tokens when the search continues them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from minillm.engine.deltas import TokenDelta
from minillm.engine.detokenizer import Detokenizer
from minillm.engine.engine import Engine
from minillm.engine.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestMetrics
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.sampling.beam import beam_search
from minillm.sampling.params import BeamSearchParams

Beam = tuple[int, ...]  # the tokens of a beam after the prompt


class ArrivedTokens(deque[TokenDelta]):
    """What steps have made for a search, which looks for an abort itself."""

    error: BaseException | None = None  # of the step that ended the search
    take = deque.append

    def fail(self, error: BaseException | None) -> None:
        self.error = error


def search_beams(
    engine: Engine,
    request: Request,
    search: BeamSearchParams,
    step: Callable[[], object],
    deltas: deque[TokenDelta],
    decode: Callable[[list[int]], str],
) -> BeamSearchOutput:
    """What `LLM.beam_search` gives back for one prompt. `step` runs a step, in which others are served too,
    and puts the new tokens of this search into `deltas`; the caller aborts what is left of it."""
    metrics = RequestMetrics(request.arrival_time)
    beam_width, prompt = search.beam_width, request.prompt_token_ids
    stop_token_ids, max_tokens = request.stop_token_ids, request.max_tokens

    def wait() -> list[TokenDelta]:
        step()
        arrived = list(deltas)
        deltas.clear()
        if arrived and metrics.first_token_time is None:
            metrics.first_token_time = engine.clock()
        return arrived

    requests = BeamRequests(
        request, beam_width, engine.runner.model.config.vocab_size, engine.scheduler, wait, engine.announcer.forget
    )
    engine.add_request(request)
    beams = beam_search(requests.next_logprobs, beam_width, max_tokens, stop_token_ids, search.length_penalty)
    detokenizer, samples, sequences = Detokenizer(decode, prompt), [], []
    for index, beam in enumerate(beams):
        ids, score = list(beam.token_ids), beam.cumulative_logprob
        shown = ids[:-1] if beam.finished and not search.include_stop_str_in_output else ids
        reason = "stop" if beam.finished else "length"
        text, lora = detokenizer.whole(shown), request.spec.lora_request
        samples.append(CompletionOutput(index, text, ids, score, finish_reason=reason, lora_request=lora))
        sequences.append(BeamSearchSequence(prompt + ids, decode(prompt + shown), score, reason))
    metrics.finished_time = engine.clock()
    metrics.num_cached_tokens, metrics.cached_tokens = request.num_cached_tokens, request.cached_tokens
    return BeamSearchOutput(
        request.request_id, request.prompt, prompt, None, samples, True, metrics, request.spec.lora_request, sequences
    )


class BeamRequests:
    """The requests behind the beams of one prompt. `wait` runs a step of the engine and returns their new tokens;
    `changed` hears of requests whose tokens the search has replaced."""

    def __init__(
        self,
        request: Request,
        beam_width: int,
        vocab_size: int,
        scheduler: Scheduler,
        wait: Callable[[], list[TokenDelta]],
        changed: Callable[[Iterable[Request]], None],
    ):
        self.scheduler, self.wait, self.changed, self.vocab_size = scheduler, wait, changed, vocab_size
        # The search decides what comes next; all the engine is asked for is what it needs to decide.
        params = replace(request.params, logprobs=min(2 * beam_width, vocab_size), ignore_eos=True, stop_token_ids=None)
        request.spec, request.stop_token_ids = replace(request.spec, params=params), frozenset()
        request.takes_drafts, request.needs_host = False, True  # the search decides what comes next
        self.request_id = request.request_id
        self.live: dict[Beam, Request] = {(): request}
        self.rows: dict[str, Tensor] = {}
        self._names = count(1)

    def next_logprobs(self, beams: list[Beam]) -> Tensor:
        """Log-probabilities of the next token of each beam, [num_beams, vocab_size]; -inf but for the best."""
        self._check_alive()
        if beams != [()]:
            self._continue(beams)
        self.rows = {}
        while len(self.rows) < len(beams):
            self._check_alive()
            arrived = self.wait()
            for delta in arrived:
                self._take(delta)
            if not arrived:
                self._make_room()
        return torch.stack([self.rows[self.live[beam].request_id] for beam in beams])

    def _check_alive(self) -> None:
        if any(request.finish_reason == "abort" for request in self.live.values()):
            raise RuntimeError(f"request {self.request_id!r} was aborted in the middle of its beam search")

    def _take(self, delta: TokenDelta) -> None:
        """Keep the log-probabilities and put the drawn token back: with nothing left to compute, the beam rests."""
        request = delta.request
        request.token_ids.pop()
        request.output_token_ids.pop()
        row = torch.full((self.vocab_size,), float("-inf"))
        row[list(delta.logprobs)] = torch.tensor([entry.logprob for entry in delta.logprobs.values()])
        self.rows[request.request_id] = row

    def _make_room(self) -> None:
        """If all that runs is at rest, end one beam of which nothing more is wanted for now."""
        if any(request.num_computed_tokens < request.num_tokens for request in self.scheduler.running):
            return
        rested = [one for one in self.live.values() if one.request_id in self.rows and not one.is_finished]
        if rested:
            self.scheduler.finish(rested[-1], "stop")

    def _continue(self, beams: list[Beam]) -> None:
        parents = [self.live[beam[:-1]] for beam in beams]
        kept: dict[Beam, Request] = {}
        for index, (beam, parent) in enumerate(zip(beams, parents)):
            # The last of a parent's beams takes the request itself, the others fork off while it is unchanged.
            last = parent not in parents[index + 1 :]
            kept[beam] = parent if last and not parent.is_finished else self.scheduler.fork(parent, next(self._names))
        for request in set(self.live.values()) - set(kept.values()):
            self.scheduler.finish(request, "stop")
        for beam, request in kept.items():
            request.token_ids.append(beam[-1])
            request.output_token_ids.append(beam[-1])
        self.changed(kept.values())  # the search chose the token, and the runner has drawn another one
        self.live = kept
