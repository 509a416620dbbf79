"""The trace of project 1: chats and documents, and what their users were promised. Built in chapter 25."""

from __future__ import annotations

import random
from dataclasses import dataclass

from minillm.engine.metrics import Targets


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: lengths in tokens (smallest and largest), what its users were promised (seconds), and the
    points of a promise that is kept."""

    name: str
    prompt: tuple[int, int]
    answer: tuple[int, int]
    targets: Targets
    points: int


CHAT = Kind("chat", (40, 400), (16, 160), Targets(ttft=0.5, tpot=0.03), 1)
DOCUMENT = Kind("document", (2000, 6000), (16, 96), Targets(ttft=2.0, tpot=0.06), 3)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the trace, its answer's true length included; a submission never sees one of these."""

    arrival: float
    kind: Kind
    prompt_tokens: int
    answer_tokens: int


def make_trace(seed: int, num_requests: int = 100) -> list[Asked]:
    """Chats that trickle in, documents that come in bursts; more work than can be served in time."""
    rng = random.Random(f"capstone scheduler {seed}")
    asked, now = [], 0.0
    while len(asked) < num_requests:
        now += rng.expovariate(16.0)
        burst = rng.randint(2, 5) if rng.random() < 0.1 else 0
        asked += [
            Asked(now, kind, rng.randint(*kind.prompt), rng.randint(*kind.answer))
            for kind in [DOCUMENT] * burst or [CHAT]
        ]
    return asked[:num_requests]
