"""The check of chapter 22's stream that outlives its replicas. Built in chapter 22."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minillm.book.checks import Case, Draw, Raised
from minillm.book.checks.beside import ClassChecker, Story

STOP = 0


class Stream:
    """What the client has, and the newest flight. The keywords are mistakes."""

    def __init__(
        self, prompt: list[int], max_tokens: int, stop: int, *, old: bool = False, anew: bool = False,
        twice: bool = False, gaps: bool = False, empty_gaps: bool = False, stops: bool = True, keeps_stop: bool = True,
        in_prompt: bool = False, most: bool = True, ended: bool = True, deaths: str = "once", first_gap: bool = False,
        unlost: bool = False, begun: bool = False, ahead: bool = False, left: bool = True, together: bool = True,
    ) -> None:  # fmt: skip
        if not prompt or max_tokens < 1:
            raise ValueError("a prompt has at least one token, and max_tokens is at least 1")
        self.prompt, self.max_tokens, self.stop = list(prompt), max_tokens, stop
        self.output, self.finished = [], in_prompt and stop in prompt
        self.newest, self.alive = 0, begun
        self.old, self.anew, self.twice, self.gaps, self.empty_gaps = old, anew, twice, gaps, empty_gaps
        self.stops, self.keeps_stop, self.most, self.ended, self.deaths = stops, keeps_stop, most, ended, deaths
        self.first_gap, self.unlost, self.ahead, self.left, self.together = first_gap, unlost, ahead, left, together

    def submit(self) -> tuple[int, list[int], int]:
        self.newest, self.alive = self.newest + (self.together or not self.alive), True
        sent = self.prompt if self.anew else self.prompt + self.output
        return self.newest, list(sent), self.max_tokens - len(self.output) * self.left

    def receive(self, flight: int, position: int, tokens: list[int]) -> list[int]:
        gap = position > len(self.output) and not self.gaps and not (self.empty_gaps and not tokens)
        if gap and self.first_gap:
            raise ValueError("a gap")
        if self.finished or not (self.counts(flight) or self.old):
            return []
        if gap:
            raise ValueError(f"position {position} leaves a gap after {len(self.output)} tokens")
        new = list(tokens if self.twice else tokens[max(0, len(self.output) - position) :])
        new = new[: self.max_tokens - len(self.output)] if self.most else new
        if self.stop in new and self.stops:
            new = new[: new.index(self.stop) + self.keeps_stop]
            self.finished = True
        self.output = self.output + new
        self.finished = self.finished or len(self.output) >= self.max_tokens
        return list(new)

    def lost(self, flight: int) -> bool:
        again = (flight == self.newest or self.deaths == "all") and (self.alive or self.deaths == "twice")
        again = bool(again and not (self.finished and self.ended))
        if again and not self.unlost:
            self.alive = False
        return again

    def counts(self, flight: int) -> bool:
        return (flight == self.newest or (self.ahead and flight > self.newest)) and self.alive


def _why(got: Any, expected: Any, stream: Stream, call: tuple) -> str | None:
    """From what the stream has before the call to what it must do."""
    method, *given = call
    has = f"the client has {stream.output} of at most {stream.max_tokens} tokens"
    if method == "submit":
        return (
            f"The replica has to compute the prompt and what the client has; {has}. Lists that were passed in or "
            "returned are the caller's, who may have changed them: keep copies, and return new lists."
        )
    flight, rest = given[0], given[1:]
    state = f"flight {stream.newest} is the newest" if stream.newest else "no flight has been submitted yet"
    if stream.newest and not stream.alive:
        state = f"flight {stream.newest} was lost, and no other has begun"
    if stream.finished:
        state = "the output is finished, so nothing is missing"
    if method == "lost":
        return f"It is asked for flight {flight}, and {state}: {has}."
    if isinstance(expected, Raised):
        return f"Position {rest[0]} leaves a gap: the token at position {len(stream.output)} is missing."
    if stream.finished or not stream.counts(flight):
        return f"A message of flight {flight}, and {state}: it counts for nothing, wherever it begins."
    return f"A message with {rest[1]} from position {rest[0]} on, where {has}. It ends at {stream.stop} or when full."


def _broken(draw: Draw) -> Story:
    """Random chunks, repeated ones, late messages of dead replicas, kills; until the output is complete."""
    truth = [draw.randint(1, 90) for _ in range(draw.randint(1, 14))]
    if draw.rng.random() < 0.5:
        truth[-1] = STOP

    def calls(stream: Stream) -> Iterator[tuple]:
        old, size = [], len(truth)
        yield ("submit",)
        while not stream.finished:
            have, flight, kind = len(stream.output), stream.newest, draw.rng.random()
            if kind < 0.6:
                begin, end = draw.randint(max(0, have - 2), have + 1), draw.randint(have, min(size, have + 4) + 1)
                old.append(("receive", flight, begin, truth[begin:end]))
                yield old[-1]
            elif kind < 0.75 and old:
                yield draw.rng.choice(old)
            elif kind < 0.9:
                yield "lost", flight
                # The dead replica had sent more than the client took: it comes late, and is dropped.
                late = "receive", flight, have, truth[have : have + draw.randint(1, 4)]
                if draw.rng.random() < 0.3:
                    yield late
                yield ("submit",)
                yield late
            elif flight > 1:
                yield "lost", draw.randint(1, flight)
        yield "lost", stream.newest

    return Story(([5, 6], len(truth), STOP), calls)


def _foreign(*numbers: int) -> str:
    return " · ".join(f"receive({number}, 0, [5]) · lost({number})" for number in numbers)


def _two_streams(case: Case) -> None:
    one, two = (case.run(case.student, [7], 2, STOP) for _ in range(2))
    case.run(one.submit)
    case.run(one.receive, 1, 0, [3])
    case.equal((one.output, two.output), ([3], []), "the pair of outputs of two streams, one of them used,")


check_resumed_stream = ClassChecker(
    "resumed_stream",
    Stream,
    what="stream",
    shows=("output", "finished"),
    lends=True,
    examples=[
        Story(
            ([7, 8], 5, STOP),
            "submit() · receive(1, 0, [3, 4]) · lost(1) · submit() · receive(1, 2, [5]) · receive(2, 2, [5, 6, 9])",
        )
    ],
    edges={
        "a message repeats tokens, leaves a gap or holds the stop token": Story(
            ([7], 6, STOP),
            "submit() · receive(1, 0, [3]) · receive(1, 0, [3, 4]) · receive(1, 1, [4]) · receive(1, 3, [6]) ·"
            "receive(1, 2, []) · receive(1, 2, [5, 0, 9]) · receive(1, 4, [9]) · lost(1)",
        ),
        "a message has more tokens than max_tokens": Story(
            ([7], 3, STOP), "submit() · receive(1, 0, [1, 2, 3, 4]) · lost(1)"
        ),
        "two replicas die": Story(
            ([7], 4, STOP),
            "submit() · lost(1) · submit() · lost(1) · receive(2, 0, [5]) · lost(2) · submit() ·"
            "receive(2, 1, [6]) · receive(3, 0, [5, 6])",
        ),
        "the prompt holds the stop token, which ends nothing there": Story(
            ([STOP, 7], 3, STOP),
            "submit() · receive(1, 0, [3]) · lost(1) · submit() · receive(2, 1, [0])",
        ),
        "the replica dies, and no other is there yet: no message of a lost flight counts": Story(
            ([7], 4, STOP), "submit() · lost(1) · receive(1, 0, [5])"
        ),
        "some flights were never submitted, have been lost, or are not the newest any more": Story(
            ([7], 4, STOP),
            f"receive(0, 0, [5]) · lost(0) · submit() · {_foreign(0, 2, -1)} · submit() ·"
            f"receive(1, 0, [5]) · receive(2, 0, [6]) · lost(2) · {_foreign(2, -2)}",
        ),
        "a gap is refused only where the message counts": Story(
            ([7], 3, STOP),
            "submit() · receive(1, 1, [5]) · receive(1, 2, []) · receive(1, 0, [5]) · submit() · receive(1, 9, [5]) ·"
            "receive(2, 0, [5, 6, 0]) · receive(2, 9, [5])",
        ),
        "lists are the caller's, who changes them after each call: keep copies, and return new lists": Story(
            ([7, 8], 5, STOP), "submit() · receive(1, 0, [3]) · submit() · receive(2, 1, [4]) · submit()"
        ),
        "the prompt is empty: it has at least one token, and max_tokens is at least 1": Story(([], 3, STOP), ""),
        "max_tokens is 0, and has to be at least 1": Story(([7], 0, STOP), ""),
    },
    also={"edges": _two_streams},
    random=_broken,
    trials=60,
    raises=(ValueError,),
    explain=_why,
    hint="The client's tokens are the truth: go on behind them, and take nothing twice.",
    misconceptions={
        "A message of an old flight counts for nothing: only the newest one does.": dict(old=True),
        "A message may repeat tokens that the client has: skip those before len(output).": dict(twice=True),
        "A stop token in the prompt ends nothing: only a generated one does.": dict(in_prompt=True),
        "A position larger than len(output) leaves a gap: raise ValueError.": dict(gaps=True),
        "A message without tokens can leave a gap, too.": dict(empty_gaps=True),
        "The next replica computes the prompt and all that the client has.": dict(anew=True),
        "The next replica may generate max_tokens minus what the client has.": dict(left=False),
        "The stop token ends the output: what comes behind it is dropped.": dict(stops=False),
        "The stop token is part of the output.": dict(keeps_stop=False),
        "The output has at most max_tokens tokens.": dict(most=False),
        "An output that is finished is not submitted again.": dict(ended=False),
        "A death counts for the newest flight alone.": dict(deaths="all"),
        "A flight is lost once: the second report of its death asks for nothing.": dict(deaths="twice"),
        "After lost(flight), messages of this flight count for nothing.": dict(unlost=True),
        "Before the first submit no flight counts, flight 0 included.": dict(begun=True),
        "A flight that was never submitted counts for nothing.": dict(ahead=True),
        "A message that counts for nothing leaves no gap: look at its flight first.": dict(first_gap=True),
        "submit begins a new flight, also where the one before was still running.": dict(together=False),
    },
)
