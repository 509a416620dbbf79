"""How many draft tokens were accepted. Built in chapter 18."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SpeculationMetrics:
    """Counts over all requests, as vLLM's SpecDecodingStats has them.

    A draft token is accepted where the target drew the same token, even if the text ended before it, or a jump took its
    place.
    """

    num_drafts: int = 0  # of one request in one step, however many tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_misses: int = 0  # drafts with a rejected token
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """One draft was checked: its first `num_accepted` tokens of `num_drafted` were accepted."""
        for counts, number in ((self.drafted_per_position, num_drafted), (self.accepted_per_position, num_accepted)):
            counts += [0] * (num_drafted - len(counts))
            for position in range(number):
                counts[position] += 1
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.num_misses += num_accepted < num_drafted

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over all, also those discarded after a rejected one; 0 without any."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a step with a draft made, the target's own one included."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of the draft tokens at each position, the share that was accepted."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted_per_position, self.drafted_per_position)]

    @property
    def alpha(self) -> float:
        """The chance that a draft token is accepted given that all before it were: the formula's α.
        0 without any."""
        return self.num_accepted_tokens / max(1, self.num_accepted_tokens + self.num_misses)
