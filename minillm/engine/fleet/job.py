"""A request on its way through a simulated fleet. Built in chapter 22."""

from __future__ import annotations

from collections.abc import Sequence


class Job:
    """A request in the fleet. Times in seconds; `first_token` and `finished` are None until then."""

    __slots__ = (
        "arrival", "blocks", "cached", "computed", "finish_step", "finished", "first_token", "generated", "has_kv",
        "index", "joined", "num_moves", "num_preemptions", "output_length", "pause_started", "paused", "pinned",
        "private", "prompt_length", "replica", "stored",
    )  # fmt: skip

    def __init__(self, index: int, arrival: float, prompt_length: int, output_length: int, blocks: Sequence[int] = ()):
        self.index, self.arrival = index, arrival
        self.prompt_length, self.output_length, self.blocks = prompt_length, output_length, blocks
        self.first_token: float | None = None
        self.finished: float | None = None
        self.generated = 0  # tokens that the client has; while it decodes, only when it leaves
        self.computed = 0  # tokens whose keys and values are in the cache, while it prefills
        self.cached = 0  # tokens of the prompt that the first replica found in its cache
        self.num_preemptions = self.num_moves = 0
        self.paused = 0.0  # seconds without keys and values: it was preempted, it moved, or its replica failed
        self.pause_started: float | None = None
        self.has_kv = False  # it brings its keys and values along
        self.replica = ""
        self.private, self.pinned, self.stored = 0, [], 0  # tokens and blocks of a pool; blocks dealt with
        self.joined = self.finish_step = 0  # in decode steps of its replica

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far; what a replica without its keys and values has to compute."""
        return self.prompt_length + self.generated

    def resume(self, now: float) -> None:
        """It goes on: a pause, if there was one, is over."""
        if self.pause_started is not None:
            self.paused += now - self.pause_started
            self.pause_started = None
