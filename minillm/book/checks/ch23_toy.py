"""The toy engine of chapter 23's debugging exercise, its clients, and the trace of a service. Built in chapter 23."""

from __future__ import annotations

from collections import deque

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
        self.num_failed = self.num_heads = 0
        self._has_left = not starts

    @property
    def is_gone(self) -> bool:
        """Whether the connection is known to be closed."""
        return self._has_left and (self.notices or self.num_failed > 0)

    def leave(self) -> None:
        self._has_left = True

    def start(self) -> None:
        """Send the head of the answer. Raises ConnectionResetError when the client has left."""
        self.num_heads += 1
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
