"""The check of chapter 14's loop that works one step ahead. Built in chapter 14."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from minillm.book.checks import Draw, FunctionChecker, Raised


class Ask(NamedTuple):
    """A request that wants at most `max_tokens` tokens, and ends with `stop`."""

    name: str
    max_tokens: int
    stop: int


class FakeRunner:
    """A device that computes steps, at most two at a time, and a log of what it was told.
    `tokens` are what each request will say."""

    def __init__(self, tokens: dict[str, list[int]]):
        self.tokens, self.made = tokens, dict.fromkeys(tokens, 0)
        self.log: list[tuple] = []
        self.steps: list[list[tuple[str, int]]] = []
        self.out: list[int] = []  # numbers of the steps that were launched and not waited for
        self.gone: set[str] = set()

    def __repr__(self) -> str:
        return "runner"

    def launch(self, names: Sequence[str]) -> int:
        """Start a step that makes one token for each of these; returns the number to wait for. Returns at once."""
        names = list(names)
        self.log.append(("launch", names))
        if not names or len(set(names)) < len(names):
            raise RuntimeError(f"launch({names}): a step has at least one row, and no request twice")
        if len(self.log) > 100_000:
            raise RuntimeError("100,000 calls, and no end: is every request served?")
        if len(self.out) == 2:
            raise RuntimeError(f"launch({names}): steps {self.out[0]} and {self.out[1]} are on their way already")
        if freed := [name for name in names if name in self.gone]:
            raise RuntimeError(f"launch({names}): the blocks of {freed[0]} were freed")
        self.steps.append([(name, self.tokens[name][self.made[name]]) for name in names])
        for name in names:
            self.made[name] += 1
        self.out.append(len(self.steps) - 1)
        return self.out[-1]

    def wait(self, step: int) -> list[int]:
        """The tokens of a step, in the order of its names; steps are waited for in the order in which they were
        launched."""
        self.log.append(("wait", step))
        if not self.out or self.out[0] != step:
            raise RuntimeError(f"wait({step!r}): on their way are the steps {self.out}, and the first comes first")
        return [token for _, token in self.steps[self.out.pop(0)]]

    def free(self, name: str) -> None:
        """Give a request's blocks back."""
        self.log.append(("free", name))
        if name in self.gone:
            raise RuntimeError(f"free({name!r}): its blocks were freed before")
        if held := [step for step in self.out if any(name == row for row, _ in self.steps[step])]:
            raise RuntimeError(
                f"free({name!r}): step {held[0]} is in flight and writes to its blocks, then another request's"
            )
        self.gone.add(name)


def serve_by_the_rules(asks: Sequence[Ask], runner: FakeRunner, places: int) -> dict[str, list[int]]:
    """The reference: one flag after the other."""
    said: dict[str, list[int]] = {ask.name: [] for ask in asks}
    coming, inside, done, before = list(asks), [], set(), None
    while coming or inside:
        while coming and len(inside) < places:
            inside.append(coming.pop(0))
        in_flight = set(before[1]) if before else set()
        wants = [ask for ask in inside if len(said[ask.name]) + (ask.name in in_flight) < ask.max_tokens]
        names = [ask.name for ask in wants if ask.name not in done]
        now = (runner.launch(names), names) if names else None
        if before:
            for name, token in zip(before[1], runner.wait(before[0])):
                ask = next(a for a in inside if a.name == name)
                if name not in done:
                    said[name].append(token)
                    if token == ask.stop or len(said[name]) == ask.max_tokens:
                        done.add(name)
        for ask in [a for a in inside if a.name in done and not (now and a.name in now[1])]:
            runner.free(ask.name)
            inside.remove(ask)
        before = now
    return said


def _calls(got: Any, asks: list[Ask], runner: FakeRunner, places: int) -> tuple[list[str], Any]:
    """What the runner was told, and the result."""
    calls = [f"{name}({', '.join(what) if isinstance(what, list) else what})" for name, what in runner.log]
    return calls, got


def _why(got: Any, expected: tuple, asks: list[Ask], runner: FakeRunner, places: int) -> str:
    right = expected[0]
    if isinstance(got, Raised):
        return f"{_TURN} The first calls are {', '.join(right[:8])}"
    calls = got[0]
    for call, other in zip(calls, right):
        if call != other:
            return _why_call(*call.rstrip(")").split("("), *other.rstrip(")").split("("))
    if len(calls) != len(right):
        return (
            f"The last ones are {', '.join(right[-3:])}. Serve until no request is left, nothing is in flight, "
            "and all blocks are free."
        )
    return (
        "A token of a step that was launched before the end was known is dropped. "
        "The stop token itself belongs to the output."
    )


def _why_call(call: str, names: str, other: str, right: str) -> str:
    """The first call that is not the right one: what was called, and what should have been."""
    if (call, other) == ("wait", "launch"):
        return (
            "The next step is launched first, then the host waits for the one before: "
            "so the device always has something to do."
        )
    if (call, other) == ("launch", "wait"):
        return (
            f"There is no request to launch in this turn: {names} has ended, or has no place. "
            "A place is only free when `free` was called."
        )
    if call == other == "launch":
        return _why_launch(names.split(", "), right.split(", "))
    if other == "free":
        return (
            f"{right} has ended and is in no step in flight: its blocks are free now, "
            "and another request may be waiting for them."
        )
    if call == "free":
        return (
            f"{names} is freed in the wrong place: at the end of the turn in which no step in flight has it any "
            "more, in the order of entering."
        )
    return _TURN


def _why_launch(names: list[str], right: list[str]) -> str:
    more = [name for name in names if name not in right]
    fewer = [name for name in right if name not in names]
    if more:
        return (
            f"{more[0]} needs no more tokens, or there is no place for it yet. "
            "Of max_tokens, count what is in flight too."
        )
    if fewer:
        return f"{fewer[0]} is not known to have ended, and there is a place."
    return "In the order in which they entered."


def _served(places: int, *asks: tuple[str, int, int, list[int]]) -> tuple:
    """Requests of (name, max_tokens, stop, what the model says)."""
    tokens = {name: [*said, *[6] * 12] for name, _, _, said in asks}
    return [Ask(name, most, stop) for name, most, stop, _ in asks], FakeRunner(tokens), places


def _random(draw: Draw) -> tuple:
    names = [f"r{number}" for number in "461038257"[: draw.randint(1, 9)]]  # in no order
    said = [[draw.randint(0, 6) for _ in range(9)] for _ in names]
    asks = ((name, draw.randint(1, 8), draw.randint(0, 3), tokens) for name, tokens in zip(names, said))
    return _served(draw.randint(1, 5), *asks)


_TURN = "Each turn: admit, launch, wait for the step that the turn before launched, free."
check_serve_ahead = FunctionChecker(
    "serve_ahead",
    serve_by_the_rules,
    observe=_calls,
    returns=("the calls of the runner", "the result"),
    examples=[_served(2, ("A", 5, 0, [4, 7, 0]), ("B", 3, 0, [5, 6, 8]), ("C", 2, 0, [3, 9]))],
    edges={
        "there is no request": _served(2),
        "there is one token": _served(3, ("A", 1, 0, [5])),
        "it stops at once, a step too many": _served(1, ("A", 4, 0, [0])),
        "it never stops": _served(1, ("A", 4, 9, [1, 2, 3, 4])),
        "both reasons come at once, so nothing is launched too many": _served(1, ("A", 3, 7, [1, 2, 7])),
        "all want one token": _served(2, *((name, 1, 0, [1]) for name in "ABCDE")),
        "B must wait for A's blocks": _served(1, ("A", 9, 0, [1, 0]), ("B", 9, 0, [2, 0])),
        "several end together": _served(
            3, ("A", 3, 0, [0]), ("B", 3, 5, [5]), ("C", 3, 0, [1, 0]), ("D", 2, 0, [1, 5])
        ),
        "every request has a stop token of its own": _served(2, ("A", 6, 1, [2, 2, 1]), ("B", 6, 2, [1, 1, 1, 2])),
        "they come in no order of names": _served(2, ("Zoe", 2, 0, [1, 1]), ("Ann", 3, 0, [2, 0]), ("Max", 2, 0, [0])),
    },
    random=_random,
    explain=_why,
    hint=_TURN,
    forbid=("minillm.engine.engine.Engine",),
)
