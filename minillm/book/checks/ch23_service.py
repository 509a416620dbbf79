"""The debugging exercise of chapter 23: a service over a toy engine, and what must not leak. Built in chapter 23."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

from minillm.book.checks import Draw, Raised
from minillm.book.checks.beside import ClassChecker, Story
from minillm.book.checks.ch23_toy import Client, ToyEngine


class Service:
    """Releases every request exactly once. The keywords are mistakes."""

    def __init__(
        self, engine: ToyEngine, *, head_first: bool = False, guards: Any = BaseException, passes_on: bool = True,
        looks: str = "before", catches: Any = OSError, at_once: bool = True, goes_on: bool = True,
    ) -> None:  # fmt: skip
        self.engine, self.clients = engine, {}
        self.head_first, self.guards, self.passes_on, self.looks = head_first, guards, passes_on, looks
        self.catches, self.at_once, self.goes_on = catches, at_once, goes_on

    def open(self, name: str, num_prompt: int, max_tokens: int, client: Client) -> None:
        if self.head_first:
            client.start()
        self.engine.add(name, num_prompt, max_tokens)
        try:
            if not self.head_first:
                client.start()
        except self.guards:
            self.engine.release(name)
            if self.passes_on:
                raise
            return
        self.clients[name] = client

    def step(self) -> None:
        self._end_gone("before")
        said = self.engine.step()
        self._end_gone("after")
        for name, token, is_last in said:
            if name not in self.clients:
                continue
            try:
                self.clients[name].send(token)
            except self.catches:
                is_last = self.at_once
                if not self.goes_on:
                    self._end(name)
                    return
            if is_last:
                self._end(name)

    def _end_gone(self, when: str) -> None:
        for name in [name for name, client in self.clients.items() if client.is_gone and self.looks == when]:
            self._end(name)

    def _end(self, name: str) -> None:
        del self.clients[name]
        self.engine.release(name)


_ERRORS = {kind.__name__: kind for kind in (TimeoutError, RuntimeError, asyncio.CancelledError)}


class Server:
    """A service with its engine and its clients."""

    def __init__(self, service_type: type, num_blocks: int) -> None:
        self.engine, self.clients, self.refused_heads = ToyEngine(num_blocks), {}, 0
        self.service = service_type(self.engine)

    def open(self, name: str, num_prompt: int, max_tokens: int, how: dict[str, Any] | None = None) -> None:
        """how: the client's, an error by its name."""
        how = how or {}
        client = Client(**how | {"breaks": _ERRORS.get(how.get("breaks", ""))})
        try:
            self.service.open(name, num_prompt, max_tokens, client)
        except ValueError:
            self.refused_heads += client.num_heads
            raise
        self.clients[name] = client

    def leave(self, name: str) -> None:
        self.clients[name].leave()

    def step(self) -> None:
        self.service.step()


def _why(got: Any, expected: Any, server: Server, call: tuple) -> str | None:
    if call[0] == "open" and not isinstance(expected, Raised):
        return "The engine takes this request, and its client gets the head of the answer."
    if call[0] == "open":
        return (
            f"open passes {expected.kind.__name__} on to its caller; the engine does not hold the request then, "
            "and a request that the engine refuses gets no head."
        )
    gone = [name for name, client in server.clients.items() if client.is_gone and name in server.engine.sizes]
    if gone:
        return f"Before this step the client of {', '.join(gone)} is known to be gone: release the request first."
    return None


def _random(draw: Draw) -> Story:
    num_blocks, turns = draw.randint(4, 20), draw.randint(5, 40)

    def calls(server: Server) -> Iterator[tuple]:
        for number in range(turns):
            if draw.rng.random() < 0.5:
                prompt = draw.randint(1, 4 * num_blocks - 2)
                most = draw.randint(1, min(12, 4 * num_blocks - prompt) + 1)
                how = {"reads": draw.randint(1, 14) if draw.rng.random() < 0.5 else 10**9}
                how |= {"starts": draw.rng.random() < 0.9, "notices": draw.rng.random() < 0.7}
                yield "open", f"r{number}", prompt, most, how | {"stalls": draw.rng.random() < 0.1}
            if draw.rng.random() < 0.1:
                yield "open", f"large{number}", 4 * num_blocks, 1
            if server.engine.sizes and draw.rng.random() < 0.2:
                yield "leave", draw.rng.choice(sorted(server.engine.sizes))
            yield ("step",)
        while server.engine.sizes:
            yield ("step",)

    return Story((num_blocks,), calls)


check_repair_service = ClassChecker(
    "repair_service",
    Service,
    adapt=lambda service_type: partial(Server, service_type),
    what="server",
    shows={
        "the list of requests that the engine holds": lambda server, calls: sorted(server.engine.sizes),
        "the dict of tokens that clients got": lambda server, calls: {
            n: list(c.got) for n, c in server.clients.items()
        },
        "the list of requests that the last engine step worked for": lambda server, calls: sorted(
            server.engine.worked_for
        ),
        "the dict of sends that failed": lambda server, calls: {n: c.num_failed for n, c in server.clients.items()},
        "the number of engine steps": lambda server, calls: server.engine.num_steps,
        "the number of heads sent for refused requests": lambda server, calls: server.refused_heads,
        "the number of free blocks": lambda server, calls: server.engine.free_blocks,
    },
    examples=[
        Story(
            (14,),
            "open('A', 4, 8) · open('B', 8, 24, {'reads': 2}) · step() · step() · step() · step() · open('D', 8, 8) ·"
            + " · ".join(["step()"] * 9),
        )
    ],
    edges={
        "a client leaves while its request is in the queue": Story(
            (6,),
            "open('A', 4, 12) · open('D', 8, 8) · step() · leave('D') · step() · open('D', 4, 4) ·"
            + " · ".join(["step()"] * 16),
        ),
        "the head cannot be sent, for one reason or another": Story(
            (6,),
            "open('E', 4, 8, {'starts': False}) · open('E', 4, 8, {'breaks': 'TimeoutError'}) ·"
            "open('E', 4, 8, {'breaks': 'RuntimeError'}) · open('E', 4, 8, {'breaks': 'CancelledError'}) ·"
            "open('E', 4, 8)",
        ),
        "the engine refuses a request: it takes the request first, then the client gets the head of the answer": Story(
            (6,), "open('E', 4, 8) · open('F', 40, 8) · open('E', 4, 4) · step() · open('F', 4, 4)"
        ),
        "a client leaves with its last token, and another one is not known to have left": Story(
            (6,),
            "open('F', 4, 4, {'reads': 4}) · open('G', 4, 4, {'reads': 1, 'notices': False}) ·"
            + " · ".join(["step()"] * 6),
        ),
        "a client times out; those behind it get their tokens in the same step": Story(
            (6,),
            "open('H', 4, 4, {'stalls': True}) · open('I', 4, 4) · open('J', 1, 1) ·" + " · ".join(["step()"] * 6),
        ),
        "a client leaves before the first step": Story((6,), "open('K', 4, 4) · leave('K') · step() · step()"),
    },
    random=_random,
    trials=25,
    raises=(ValueError, OSError, RuntimeError, asyncio.CancelledError),
    explain=_why,
    hint="Release every request that was added exactly once, however it ends.",
    misconceptions={
        "Release the requests of clients that are gone first: the engine must not work for them again.": dict(
            looks="after"
        ),
        "No token is sent for a request in the queue: check is_gone before the engine's step.": dict(looks="never"),
        "start() may raise: then open must release the request that it has added.": dict(guards=()),
        "Not every error is an OSError: whatever start() raises, release the request.": dict(guards=OSError),
        "asyncio.CancelledError is no Exception: whatever start() raises, release the request.": dict(guards=Exception),
        "Release after any OSError of send: a TimeoutError is one, too.": dict(catches=ConnectionResetError),
        "An error of one client does not end the step: the others get their tokens in it.": dict(goes_on=False),
        "Release in the same step: after the last token, and after any OSError of send.": dict(at_once=False),
        "open passes the error on to its caller.": dict(passes_on=False),
        "The engine takes the request before its client gets the head of the answer: "
        "a refused request gets an error instead.": dict(head_first=True),
    },
)
