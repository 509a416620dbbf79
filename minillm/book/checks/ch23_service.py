"""The debugging exercise of chapter 23: a service over a toy engine, and what must not leak. Built in chapter 23."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from minillm.book.checks import Case, Checker
from minillm.book.chips import Html, table

BLOCK = 4  # tokens in a block of the toy engine


class ToyEngine:
    """Serves requests out of `num_blocks` blocks of 4 tokens. A request takes the blocks of its prompt and its answer
    when it begins, gets one token in each step, and keeps its blocks until `release`.

    `tokens_of(name)` are the tokens that it gets: the same for the same name.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = self.free_blocks = num_blocks
        self.waiting: deque[str] = deque()
        self.running: dict[str, int] = {}  # name -> tokens so far
        self.sizes: dict[str, tuple[int, int]] = {}  # every request until its release: blocks, tokens of its answer
        self.num_steps = 0
        self.worked_for: set[str] = set()  # the requests that it held when its last step began

    def add(self, name: str, num_prompt: int, max_tokens: int) -> None:
        """Raises ValueError for a name that is in use, and for a request that can never fit."""
        blocks = -(-(num_prompt + max_tokens) // BLOCK)
        if name in self.sizes:
            raise ValueError(f"{name!r} is in use; release it first")
        if blocks > self.num_blocks:
            raise ValueError(f"{name!r} needs {blocks} blocks; there are {self.num_blocks}")
        self.sizes[name] = blocks, max_tokens
        self.waiting.append(name)

    def release(self, name: str) -> None:
        """End it, whether it waits, runs or has all its tokens, and give its blocks back. Raises KeyError for a name
        that is not in use."""
        if name not in self.sizes:
            raise KeyError(f"release({name!r}): it was never added, or was released before")
        blocks, _ = self.sizes.pop(name)
        if name in self.running:
            del self.running[name]
            self.free_blocks += blocks
        else:
            self.waiting.remove(name)

    def step(self) -> list[tuple[str, int, bool]]:
        """One token for each request that runs: its name, the token, whether it is the last."""
        self.num_steps += 1
        self.worked_for = set(self.sizes)
        while self.waiting and self.sizes[self.waiting[0]][0] <= self.free_blocks:
            name = self.waiting.popleft()
            self.running[name] = 0
            self.free_blocks -= self.sizes[name][0]
        said = []
        for name, count in list(self.running.items()):
            if count == self.sizes[name][1]:
                continue  # complete, and not released yet
            self.running[name] = count + 1
            said.append((name, token_of(name, count), count + 1 == self.sizes[name][1]))
        return said


def token_of(name: str, place: int) -> int:
    return sum(map(ord, name)) * 31 % 97 + place


class Client:
    """Reads until it leaves: after `reads` tokens, or when `leave` is called. One that stalls stays, and times out.

    notices: whether `is_gone` knows that it has left before something is sent to it.
    breaks: an error that `start` raises, whatever the client does.
    """

    def __init__(
        self,
        reads: int = 10**9,
        starts: bool = True,
        notices: bool = True,
        stalls: bool = False,
        breaks: type[BaseException] | None = None,
    ):
        self.reads, self.starts, self.notices, self.stalls, self.breaks = reads, starts, notices, stalls, breaks
        self.got: list[int] = []
        self.num_failed = 0
        self._has_left = not starts

    @property
    def is_gone(self) -> bool:
        """Whether the connection is known to be closed."""
        return self._has_left and (self.notices or self.num_failed > 0)

    def leave(self) -> None:
        self._has_left = True

    def start(self) -> None:
        """Send the head of the answer. Raises ConnectionResetError when the client has left."""
        if self.breaks:
            raise self.breaks("the head of the answer could not be sent")
        self._check()

    def send(self, token: int) -> None:
        """Raises ConnectionResetError when it has left, TimeoutError when it does not read."""
        self._check()
        self.got.append(token)
        if len(self.got) >= self.reads:
            self._has_left = True

    def _check(self) -> None:
        if self._has_left:
            self.num_failed += 1
            raise ConnectionResetError("the client has left")
        if self.stalls and self.got:
            self.num_failed += 1
            raise TimeoutError("the client does not read")


SCENE = (  # step, name, prompt, max_tokens, client
    (0, "A", 4, 8, {}),
    (0, "B", 8, 24, {"reads": 2}),
    (0, "C", 4, 8, {"reads": 8}),
    (1, "D", 8, 8, {}),
    (2, "E", 4, 8, {"starts": False}),
)
STEPS = 14


def trace_of(service_type: type) -> Html:
    """Five clients, step by step: B leaves after two tokens, D while it waits, E before the head of its answer."""
    engine, rows, note = ToyEngine(14), [], {2: "B left", 3: "D left", 7: "A is complete, C too"}
    service, clients, opened = service_type(engine), {}, {}
    for step in range(STEPS):
        said = note.get(step, "")
        for at, name, prompt, most, how in SCENE:
            if at == step:
                clients[name] = Client(**how)
                try:
                    service.open(name, prompt, most, clients[name])
                    opened[name] = True
                except OSError:
                    said = f"{name} left before it began"
        if step == 3:
            clients["D"].leave()
        service.step()
        in_use = engine.num_blocks - engine.free_blocks
        rows.append((step, " ".join(engine.running) or "-", " ".join(engine.waiting) or "-", in_use, said))
    return table(rows, ["step", "in the batch", "in the queue", "blocks in use", "what happened"])


check_repair_service = Checker(
    "repair_service",
    hint="Release every request that was added exactly once, however it ends.",
)


class _Watched:
    """A student's service with its engine and clients, compared after every step."""

    def __init__(self, case: Case, num_blocks: int):
        self.case, self.engine = case, ToyEngine(num_blocks)
        self.service = case.run(case.student, self.engine, may_change=True)
        self.clients: dict[str, Client] = {}
        self.max_tokens: dict[str, int] = {}

    def open(self, name: str, num_prompt: int, max_tokens: int, **how: Any) -> Client:
        client = Client(**how)
        if client.breaks or not client.starts:
            self._refuses(client.breaks or ConnectionResetError, name, num_prompt, max_tokens, client)
            return client
        self.case.run(self.service.open, name, num_prompt, max_tokens, client, may_change=True)
        self.clients[name], self.max_tokens[name] = client, max_tokens
        return client

    def refuses(self, name: str, num_prompt: int, max_tokens: int) -> None:
        """The engine refuses it."""
        self._refuses(ValueError, name, num_prompt, max_tokens, Client())

    def _refuses(self, kind: type[BaseException], name: str, *args: Any) -> None:
        before = set(self.engine.sizes)
        self.case.raises(kind, self.service.open, name, *args, hint="open passes the error on to its caller.")
        self.case.true(
            set(self.engine.sizes) == before,
            f"open({name!r}) raised {kind.__name__}, and the engine holds {_names(self.engine.sizes)}; "
            f"before, it held {_names(before)}",
            hint="start() may raise: then open must release the request that it has added.",
        )

    def step(self) -> None:
        gone = {name for name, client in self.clients.items() if client.is_gone}
        before, failed = self.engine.num_steps, {n: c.num_failed for n, c in self.clients.items()}
        self.case.run(self.service.step, may_change=True)
        for name in [name for name, client in self.clients.items() if client.is_gone and name in gone]:
            self.case.true(
                name not in self.engine.sizes,
                f"client {name} is gone (is_gone), and after the next step() the engine still holds its request: "
                f"{self.engine.num_blocks - self.engine.free_blocks} blocks are in use",
                hint="No token is sent for a request in the queue: check is_gone before the engine's step.",
            )
            self.case.true(
                name not in self.engine.worked_for,
                f"client {name} is gone (is_gone), and step() made an engine step before it released its request",
                hint="Release the requests of clients that are gone first: the engine must not work for them again.",
            )
            sent = self.clients[name].num_failed - failed[name]
            self.case.true(sent == 0, f"something was sent to {name}, whose client is known to have left")
            del self.clients[name]
        for name, client in list(self.clients.items()):
            said = [token_of(name, place) for place in range(len(client.got))]
            self.case.equal(client.got, said, f"the tokens of {name}", hint="Each token once, in order.")
            done = len(client.got) == self.max_tokens[name]
            if client.num_failed or done:
                self.case.true(
                    name not in self.engine.sizes,
                    f"{name} {'has all its tokens' if done else 'could not be written to'}, "
                    "and its request is not released",
                    hint="Release in the same step: after the last token, and after any OSError of send.",
                )
                del self.clients[name]
        self.case.equal(
            self.engine.num_steps - before,
            1,
            "the number of engine steps in one step()",
            hint="Call engine.step() once in each step().",
        )

    def finish(self) -> None:
        for _ in range(400):
            if not self.clients:
                break
            self.step()
        self.case.true(not self.clients, f"after 400 steps {_names(self.clients)} still wait for tokens")
        self.case.equal(self.engine.free_blocks, self.engine.num_blocks, "the number of free blocks at the end")
        self.case.true(not self.engine.sizes, f"at the end the engine still holds {_names(self.engine.sizes)}")


def _names(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"


@check_repair_service.part("example")
def _service_example(case: Case) -> None:
    watched = _Watched(case, 14)
    watched.open("A", 4, 8)
    watched.open("B", 8, 24, reads=2)
    for _ in range(4):
        watched.step()
    watched.open("D", 8, 8)
    watched.finish()


@check_repair_service.part("edges")
def _service_edges(case: Case) -> None:
    watched = _Watched(case, 6)
    watched.open("A", 4, 12)  # takes four of six blocks
    d = watched.open("D", 8, 8)  # waits
    watched.step()
    d.leave()
    watched.step()
    watched.open("D", 4, 4)  # the name is free again
    watched.finish()
    watched.open("E", 4, 8, starts=False)
    for error in (TimeoutError, RuntimeError, asyncio.CancelledError):
        watched.open("E", 4, 8, breaks=error)
    watched.open("E", 4, 8)
    watched.refuses("F", 40, 8)
    watched.open("F", 4, 4, reads=4)  # leaves with its last token
    watched.open("G", 4, 4, reads=1, notices=False)  # only a send finds out
    watched.step()
    watched.finish()
    watched.open("H", 4, 4, stalls=True)  # times out; those behind it in the same step must get their tokens
    watched.open("I", 4, 4)
    watched.open("J", 1, 1)
    watched.finish()
    watched.open("K", 4, 4).leave()  # before its first step
    watched.finish()
    watched.step()  # nothing is under way


@check_repair_service.part("random")
def _service_random(case: Case) -> None:
    for _ in range(25):
        watched, names = _Watched(case, case.randint(4, 20)), iter(range(10**6))
        for _ in range(case.randint(5, 40)):
            if case.rng.random() < 0.5:
                limit = 4 * watched.engine.num_blocks
                prompt = case.randint(1, limit - 2)
                most = case.randint(1, min(12, limit - prompt) + 1)
                watched.open(
                    f"r{next(names)}",
                    prompt,
                    most,
                    reads=case.randint(1, 14) if case.rng.random() < 0.5 else 10**9,
                    starts=case.rng.random() < 0.9,
                    notices=case.rng.random() < 0.7,
                    stalls=case.rng.random() < 0.1,
                )
            if watched.clients and case.rng.random() < 0.2:
                watched.clients[case.rng.choice(sorted(watched.clients))].leave()
            watched.step()
        watched.finish()
