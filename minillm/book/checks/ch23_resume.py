"""The check of chapter 23's client that reconnects: connections that break, end, repeat and leave gaps.
Built in chapter 23."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minillm.book.checks import Case, Draw, FunctionChecker

Pairs = Sequence[tuple[int, str | None]]
_FIRST, _MOST = 0.5, 30.0  # seconds before an attempt: 0.5 * 2**f, and at most 30
_MANY = 60  # calls of connect: more than any case takes


class Line:
    """A connection: gives its pairs, then breaks, or runs out of them."""

    def __init__(self, pairs: Pairs, breaks: bool) -> None:
        self.pairs, self.breaks, self.given, self.num_closed = list(pairs), breaks, 0, 0

    def __iter__(self) -> Iterator[tuple[int, str | None]]:
        for one in self.pairs:
            self.given += 1
            yield one
        if self.breaks:
            raise ConnectionError("the connection is lost")

    def close(self) -> None:
        self.num_closed += 1


class Server:
    """`connect`: hands out prepared connections, None for a refusal, and notes what it was asked for."""

    def __init__(self, lines: Sequence[Line | None]) -> None:
        self.lines, self.made, self.asked = list(lines), [], []

    def __call__(self, last_id: int | None) -> Line:
        self.asked.append(last_id)
        if len(self.asked) > _MANY:
            raise RuntimeError(f"connect was called {_MANY} times: the loop does not end")
        made = self.lines[len(self.asked) - 1] if len(self.asked) <= len(self.lines) else None
        if made is None:
            raise ConnectionError("no connection")
        self.made.append(made)
        return made

    def __repr__(self) -> str:
        return "connect"


class Sleep:
    """`sleep`: notes the seconds, and does not sleep."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)

    def __repr__(self) -> str:
        return "sleep"


def resumed(
    connect: Callable, sleep: Callable, most_failures: int, *, skips: bool = True, compares: bool = True,
    gaps: bool = True, exhausted: bool = False, ahead: int = 0, resets: bool = True, limit: float = _MOST,
    closes: bool = True, at_once: bool = False, sleeps_first: bool = False,
) -> Iterator[str]:  # fmt: skip
    """The tokens of an answer, each once. The keywords are mistakes."""
    said: list[str] = []
    failures = 0
    while True:
        before, connection, broken = len(said), None, True
        try:
            connection = connect(before - 1 + ahead if said else None)
            for place, token in list(connection) if at_once else connection:
                if place > len(said) and gaps:
                    raise LookupError(f"token {len(said)} is lost")
                if place < len(said) and token != said[place] and compares:
                    raise ValueError(f"token {place} is another one")
                if place < len(said) and skips:
                    continue
                if token is None:
                    return
                said.append(token)
                yield token
            broken = False
        except ConnectionError:
            pass
        finally:
            if connection is not None and closes:
                connection.close()
        if exhausted and not broken:
            return
        failures = 0 if len(said) > before and resets else failures + (len(said) == before)
        if failures == most_failures and not sleeps_first:
            raise ConnectionError(f"{failures} connections in a row brought nothing")
        sleep(min(limit, _FIRST * 2**failures))
        if failures == most_failures:
            raise ConnectionError(f"{failures} connections in a row brought nothing")


def _read(answer: Callable) -> Callable:
    """The tokens until the generator ends; an error that the statement asks for is the last one, by its name."""

    @functools.wraps(answer)
    def tokens(*given: Any) -> list[str]:
        got: list[str] = []
        try:
            got.extend(answer(*given))  # what came before an error is kept
        except (LookupError, ValueError, ConnectionError) as error:
            got.append(type(error).__name__)
        return got

    return tokens


def _told(got: list[str], connect: Server, sleep: Sleep, most: int) -> tuple:
    return connect.asked, sleep.waits, [line.num_closed for line in connect.made], got


def _why(got: tuple, expected: tuple, *given: Any) -> str | None:
    hints = (
        "None at first; then the id of the last token that was yielded. Each call is one attempt.",
        "Sleep min(30, 0.5 * 2**f) s before the next attempt, with f fruitless attempts in a row.",
        "Close each connection exactly once, however it ended: try ... finally.",
        "Skip tokens with ids that you have, and compare them. Gap: LookupError; other answer: ValueError.",
    )
    return next((hint for one, right, hint in zip(got, expected, hints) if one != right), None)


def _lazy(case: Case) -> None:
    """A token is yielded before the next pair is read, and closing the generator closes its connection."""
    server = Server([Line(_story(4), False)])
    answer = case.run(case.student, server, Sleep(), 3)
    case.equal(len(server.asked), 0, "the connections before the first token is asked for", hint="A generator is lazy.")
    case.equal(next(answer), "t0 ", "the first token")
    hint = "Yield each token before you read the next pair."
    case.equal(server.made[0].given, 1, "the events read for one token", hint=hint)
    answer.close()
    case.equal(server.made[0].num_closed, 1, "how often the connection was closed with the generator", hint="finally.")


class _ResumeChecker(FunctionChecker):
    def _judge_part(self, part: str, case: Case) -> None:
        super()._judge_part(part, case)
        if part == "edges":
            _lazy(case)


def _story(count: int) -> list[tuple[int, str | None]]:
    """An answer of `count` tokens, and its end."""
    return [*((place, f"t{place} ") for place in range(count)), (count, None)]


def _given(*lines: tuple[Pairs, str] | None, most: int = 3) -> tuple:
    """Connections with their pairs, which then break or end."""
    return Server([line and Line(line[0], line[1] == "breaks") for line in lines]), Sleep(), most


_4, _6 = _story(4), _story(6)


def _random(draw: Draw) -> tuple:
    count, have, lines = draw.randint(0, 12), 0, []
    story = _story(count)
    while have <= count:
        if draw.rng.random() < 0.25:
            lines.append(None)
            continue
        start, end = draw.randint(0, min(have, count) + 1), draw.randint(have, count + 2)
        lines.append((story[start:end], "breaks" if end <= count and draw.rng.random() < 0.7 else "ends"))
        have = max(have, end)
    return _given(*lines, most=10**6)


check_resume = _ResumeChecker(
    "resume",
    resumed,
    adapt=_read,
    observe=_told,
    returns=(
        "the list of ids that connect was called with",
        "the list of seconds that were slept",
        "how often each connection was closed",
        "the list of tokens",
    ),
    examples={
        "one connection brings it all": _given((_6, "ends")),
        "the connection breaks after three tokens": _given((_6[:3], "breaks"), (_6[3:], "ends")),
        "the server repeats two tokens": _given((_6[:3], "breaks"), (_6[1:], "ends")),
    },
    edges={
        "the answer has no token": _given((_story(0), "ends")),
        "the first attempt fails": _given(None, (_4, "ends")),
        "a connection ends without the end of the answer: it is lost, too": _given((_4[:2], "ends"), (_4, "ends")),
        "two connections and an attempt bring nothing new": _given(
            (_4[:2], "breaks"), (_4[:2], "breaks"), None, (_4, "ends")
        ),
        "new tokens come between attempts that fail": _given(
            (_4[:1], "breaks"), None, (_4[:2], "breaks"), None, None, (_4, "breaks")
        ),
        "no attempt succeeds": _given(None, None, None),
        "a connection without a pair is the only attempt": _given(([], "breaks"), most=1),
        "two attempts fail after two tokens": _given((_4[:2], "breaks"), None, None, most=2),
        "nine attempts fail": _given(*[None] * 9, (_4, "ends"), most=20),
        "token 2 is gone: a gap raises LookupError": _given((_4[:2], "breaks"), (_4[3:], "ends")),
        "token 0 is gone: a gap raises LookupError": _given((_4[1:], "ends")),
        "the end comes too early: a gap raises LookupError": _given(([*_4[:2], _4[4]], "ends")),
        "another answer repeats id 1 with another token: ValueError": _given(
            (_4[:2], "breaks"), ([(0, "t0 "), (1, "other "), (2, "t2 ")], "ends")
        ),
        "another answer ends where a token was: ValueError": _given((_4[:3], "breaks"), ([(2, None)], "ends")),
    },
    random=_random,
    trials=120,
    explain=_why,
    hint="Remember the tokens that were yielded; ask for what follows them; skip what is repeated.",
    misconceptions={
        "A server may begin earlier than asked: skip the tokens that were yielded, and compare them.": dict(
            skips=False
        ),
        "A repeated token that is another one belongs to another answer: raise ValueError.": dict(compares=False),
        "An id larger than the next one leaves a gap: raise LookupError.": dict(gaps=False),
        "A connection that runs out of pairs before the end of the answer is lost: connect again.": dict(
            exhausted=True
        ),
        "connect gets the id of the last token that was yielded, not the next id.": dict(ahead=1),
        "A new token ends the row of fruitless attempts: f is 0 again.": dict(resets=False),
        "No wait is longer than 30 seconds.": dict(limit=1e9),
        "Close each connection exactly once, also where the answer is complete or an error is raised.": dict(
            closes=False
        ),
        "Yield each token before you read the next pair: a connection that breaks has brought some.": dict(
            at_once=True
        ),
        "After the last attempt allowed no sleep follows.": dict(sleeps_first=True),
    },
)
