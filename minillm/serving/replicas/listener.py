"""FlightListener: hears the tokens of one request in a replica, and sends them to the front. Built in chapter 22."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minillm.engine.deltas import TokenDelta
from minillm.serving.replicas.messages import Begun, Ended, Submit, Tokens

if TYPE_CHECKING:
    from minillm.serving.replicas.replica import Replica


class FlightListener:
    """Listens to the tokens of one request, in the engine thread."""

    def __init__(self, replica: Replica, submit: Submit, arrived: float):
        self.replica, self.flight_id, self.arrived = replica, submit.flight_id, arrived
        self.position = len(submit.output_token_ids)
        self.first_step = replica.engine.llm.engine.num_steps
        self.has_begun = self.took_in = False

    def take(self, delta: TokenDelta) -> None:
        token_ids = [] if delta.token_id is None else [delta.token_id]
        request = delta.request
        tokens = Tokens(
            self.flight_id,
            self.position,
            token_ids,
            None if delta.logprobs is None else [delta.logprobs],
            delta.finish_reason,
            request.error if delta.finish_reason == "error" else None,
            None if self.has_begun else self._begun(delta),
        )
        self.position += len(token_ids)
        self.replica.tell_cache()  # first: who hears of the token may ask for its blocks
        self.replica.channel.send(tokens)
        if delta.finish_reason is not None:
            self.replica.forget(self.flight_id)
        else:
            self.replica.streams.begun(self.flight_id)

    def fail(self, error: BaseException | None) -> None:
        """It was aborted by a step that failed, or refused."""
        self.replica.forget(self.flight_id)
        self.replica.channel.send(Ended(self.flight_id, "it was aborted" if error is None else repr(error)))

    def _begun(self, delta: TokenDelta) -> Begun:
        self.has_begun = True
        request, engine = delta.request, self.replica.engine.llm.engine
        scheduled = request.scheduled_time or request.arrival_time
        return Begun(
            max(0.0, scheduled - self.arrived),
            request.num_cached_tokens,
            request.cached_tokens,
            request.prompt_logprobs,
            engine.num_steps - self.first_step,
            self.took_in,
        )
