"""The engine with and without HTTP in one process. Built in chapter 24.

Two processes with the same weights do not run at the same pace: the median of the same prefill lay between 140 and
166 ms in six of them, one after the other. That is more than HTTP costs. Here both ways lead to the same engine thread:

    the client's process -> HTTP -> engine thread
    this thread         ->          engine thread
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ... import LLM, SamplingParams
from ...engine.async_llm import AsyncLLM
from ...serving.run import RunningServer
from ..load.target import find
from .peers import Server, prompts_of


class Here:
    """A server of this process. `server` is how others reach it."""

    def __init__(self, engine: AsyncLLM, server: Server):
        self.engine, self.server = engine, server

    def ttft(self, prompt: Sequence[int], max_tokens: int) -> float:
        """Seconds from a request's arrival to its first token, without HTTP."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return self.engine.thread.submit({"prompt_token_ids": list(prompt)}, params).output().metrics.ttft


@contextmanager
def served_here(path: Path, dtype: str) -> Iterator[Here]:
    """Load the checkpoint, and serve it until the block ends."""
    engine = AsyncLLM(LLM(str(path), device="cpu", dtype=dtype))
    try:
        with RunningServer(engine) as running:
            gc.collect()
            gc.freeze()  # as `minillm serve` does
            try:
                target = find(running.url)
                yield Here(engine, Server(target, prompts_of(path, target.model), os.getpid()))
            finally:
                gc.unfreeze()
    finally:
        engine.shutdown()
