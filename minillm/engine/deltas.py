"""TokenDelta: what a step adds to a request, on the engine's side of the text. Built in chapter 05."""

from __future__ import annotations

from typing import NamedTuple

from minillm.engine.request import Request
from minillm.engine.step import StepResult
from minillm.sampling.logprobs import Logprob


class TokenDelta(NamedTuple):
    """One new token of one request, or its end without one."""

    request: Request  # perhaps a sample that was split off the request that was added: see its group_id
    token_id: int | None  # None where the request failed before there was one: the finish_reason is "error"
    logprobs: dict[int, Logprob] | None
    finish_reason: str | None  # with the request's last token: "stop", "length" or "error"


def deltas_of(added: list[tuple[Request, int | None]], result: StepResult) -> list[TokenDelta]:
    """The tokens that a step added, those of one request one after the other. The last of them says why it ended."""
    if len(added) <= len(result.token_ids) and not result.logprobs:  # as in most steps: one token a request
        return [TokenDelta(request, token_id, None, request.finish_reason) for request, token_id in added]
    scores = {name: iter(rows) for name, rows in result.logprobs.items()}
    following = [request for request, _ in added[1:]] + [None]
    return [
        TokenDelta(
            request,
            token_id,
            next(scores[request.request_id], None) if request.request_id in scores else None,
            request.finish_reason if request is not after else None,
        )
        for (request, token_id), after in zip(added, following)
    ]


def joined(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """The deltas of two steps that come together: only the last one of a request says why it ended."""
    last = {delta.request.request_id: place for place, delta in enumerate(deltas)}
    return [
        delta if last[delta.request.request_id] == place else delta._replace(finish_reason=None)
        for place, delta in enumerate(deltas)
    ]
