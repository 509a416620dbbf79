"""The engine with and without HTTP in one process. Built in chapter 24.

Two processes with the same weights do not run at the same pace: the median of the same prefill lay between 140 and
166 ms in six of them, one after the other. That is more than HTTP costs. Here both ways lead to the same engine thread:

    the client's process -> HTTP -> engine thread
    this thread         ->          engine thread

What is compared was measured in rounds, both ways in each; an interval comes from drawing whole rounds again.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ... import LLM, SamplingParams
from ...engine.async_llm import AsyncLLM
from ...engine.metrics import percentile
from ...engine.outputs import RequestOutput
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

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[RequestOutput]:
        """`LLM.generate` on the engine thread, between two of its steps."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.engine.thread.call(lambda: self.engine.llm.generate(inputs, params, use_tqdm=False)).result()

    def seconds(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        started = time.perf_counter()
        self.generate(prompts, max_tokens)
        return time.perf_counter() - started


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


Pair = tuple[Sequence[float], Sequence[float]]  # of a round: seconds without HTTP, and with it


def http_cost(rounds: Sequence[Pair]) -> float:
    """The share of the throughput that HTTP takes: the median over the rounds, each of one run without and one with."""
    return 1 - statistics.median(offline / http for [offline], [http] in rounds)


def added_by_http(rounds: Sequence[Pair], q: float = 50) -> float:
    """Percentile `q` with HTTP less that without."""
    without, with_http = (percentile([one for own in each for one in own], q) for each in zip(*rounds))
    return with_http - without


def times_slower(rounds: Sequence[Pair], q: float = 99) -> float:
    """Percentile `q` of the second kind over that of the first."""
    first, second = (percentile([one for own in each for one in own], q) for each in zip(*rounds))
    return second / first
