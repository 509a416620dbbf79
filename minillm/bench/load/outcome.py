"""What happened to one request, seen by its client. Built in chapter 24.

    intended   sent        1st token   2nd    3rd        last
       |--------|--------------|--ITL--|--ITL--|-- ... ----|
       |--------- TTFT --------|
       |---------------------- E2E latency ----------------|        TPOT = (E2E - TTFT) / (tokens - 1)

All latencies begin at the intended send time. A client that is held up sends late, and a latency from the actual send
time would omit the wait of just those requests that the server delayed (coordinated omission).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Outcome:
    """Times in seconds since the run began."""

    intended: float  # when the arrival process sends it; in a closed loop the actual time
    sent: float  # when it was sent
    ended: float  # when the answer was complete, or had failed
    status: int  # of HTTP; 0 where no answer came
    token_times: tuple[float, ...] = ()  # of each piece of the answer that had text or tokens
    num_prompt_tokens: int = 0  # as the server counted them
    num_cached_tokens: int = 0  # of these, found in a prefix cache
    num_output_tokens: int = 0  # as the server counted them; else the number of pieces
    max_tokens: int = 0  # that were asked for
    finish_reason: str | None = None
    error: str = ""  # why it failed

    @property
    def is_complete(self) -> bool:
        return self.status == 200 and not self.error and bool(self.token_times)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.token_times[0] - self.intended

    @property
    def service_ttft(self) -> float:
        """From the actual send time: what a test that omits the wait would report."""
        return self.token_times[0] - self.sent

    @property
    def inter_token_latencies(self) -> list[float]:
        """Between each piece and the one before (ITL). A piece of several tokens is one wait of its reader."""
        return [later - sooner for sooner, later in zip(self.token_times, self.token_times[1:])]

    @property
    def tpot(self) -> float:
        """Time per output token after the first; 0 for a single token."""
        gaps = self.num_output_tokens - 1
        return (self.token_times[-1] - self.token_times[0]) / gaps if gaps > 0 else 0.0

    @property
    def e2e_latency(self) -> float:
        return self.token_times[-1] - self.intended

    @property
    def lateness(self) -> float:
        """How long after its intended time it was sent."""
        return self.sent - self.intended

    def to_json(self) -> dict:
        """Its fields, the times rounded to a microsecond."""
        rounded = {name: round(getattr(self, name), 6) for name in ("intended", "sent", "ended")}
        return asdict(self) | rounded | {"token_times": [round(time, 6) for time in self.token_times]}

    @classmethod
    def from_json(cls, fields: dict) -> Outcome:
        return cls(**fields | {"token_times": tuple(fields["token_times"])})
