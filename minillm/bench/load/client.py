"""The load generator: sends what a plan says and notes when the answers come. Built in chapter 24.

    python -m minillm.bench.load.client < job.json > outcomes.jsonl

It is a process of its own with one event loop, and it imports nothing heavy: whatever the engine, a notebook or a
progress bar does, it does not delay a send or a time stamp. Answers are kept as bytes with their times and are read
after the run. How late its own loop was is part of its report.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field

import aiohttp

from .events import read_answer
from .intervals import Histogram
from .outcome import Outcome

# Seconds. A look at the own loop takes a core from the server where both share two: with one look in 5 ms each of the
# two threads of a prefill of 145 ms waited 7 ms for its core, with one in 50 ms 2 ms.
LAG_EVERY, PROGRESS_EVERY = 0.05, 0.2
ERROR_BYTES = 2000  # of a refusal that are read


@dataclass(frozen=True)
class Send:
    """One request: when, and what."""

    body: str  # JSON
    at: float | None = None  # seconds after the run began; None: as soon as a client is free
    max_tokens: int = 0


@dataclass(frozen=True)
class Job:
    """All that one run of the client needs."""

    url: str  # of the endpoint
    sends: list[Send]
    warmups: list[Send] = field(default_factory=list)  # before the run, and not measured
    concurrency: int | None = None  # at most so many at once; None: no limit
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 600.0  # seconds until an answer must be complete


@dataclass
class Report:
    outcomes: list[Outcome]  # in the order of the sends
    lag: dict[str, float]  # of the client's loop, in seconds: p50, p99, max
    cpu_share: float  # of one core, during the run


async def run(job: Job, on_done: Callable[[int], object] = lambda count: None) -> Report:
    """Send everything; returns when the last answer is complete or has failed."""
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=connector,
                headers=job.headers | {"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=2**20,
            )
        )
        if job.warmups:
            await _Load(job, session, on_done).all_of(job.warmups)
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection would be a pause in every measurement
        try:
            lag = await stack.enter_async_context(watched_lag())
            load = _Load(job, session, on_done)
            cpu, began = time.process_time(), time.perf_counter()
            kept = await load.all_of(job.sends)
            cpu_share = (time.process_time() - cpu) / (time.perf_counter() - began)
        finally:
            gc.enable()
            gc.unfreeze()
    outcomes = [one.outcome(send) for one, send in zip(kept, job.sends)]
    told = {name: lag.percentile(q) if len(lag) else 0.0 for name, q in (("p50", 50), ("p99", 99), ("max", 100))}
    return Report(outcomes, told, cpu_share)


@asynccontextmanager
async def watched_lag() -> AsyncIterator[Histogram]:
    """How late the running event loop comes to a timer, while this is open."""
    lag, loop = Histogram(), asyncio.get_running_loop()

    async def watch() -> None:
        while True:
            due = loop.time() + LAG_EVERY
            await asyncio.sleep(LAG_EVERY)
            lag.add(loop.time() - due)

    watching = asyncio.ensure_future(watch())
    try:
        yield lag
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


@dataclass
class _Kept:
    """An answer as it came."""

    intended: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""

    def outcome(self, send: Send) -> Outcome:
        answer = read_answer(self.parts) if self.status == 200 else read_answer(())
        error = self.error or answer.error
        if not error and self.status == 200 and not answer.is_done and answer.finish_reason is None:
            error = "the stream broke off"
        return Outcome(
            self.intended,
            self.sent,
            self.ended,
            self.status,
            tuple(answer.token_times),
            answer.num_prompt_tokens,
            answer.num_cached_tokens,
            answer.num_output_tokens,
            send.max_tokens,
            answer.finish_reason,
            error,
        )


class _Load:
    """Times begin at 0 when `all_of` does."""

    def __init__(self, job: Job, session: aiohttp.ClientSession, on_done: Callable[[int], object]):
        self.job, self.session, self.on_done = job, session, on_done
        self.num_done, self.began = 0, 0.0

    async def all_of(self, sends: list[Send]) -> list[_Kept]:
        kept = [_Kept() for _ in sends]
        self.began = time.perf_counter()
        if any(send.at is None for send in sends):
            queue = iter(zip(sends, kept))
            workers = min(self.job.concurrency or len(sends), len(sends))
            await asyncio.gather(*(self._client(queue) for _ in range(workers)))
        else:
            await self._open(sends, kept)
        return kept

    async def _client(self, queue) -> None:
        """One client of a closed loop: its next request begins when its last one has ended."""
        for send, kept in queue:
            await self._send(send, kept)
            kept.intended = kept.sent

    async def _open(self, sends: list[Send], kept: list[_Kept]) -> None:
        """An open loop: each at its time. With `concurrency` it waits for a place, and its latency counts that."""
        places = asyncio.Semaphore(self.job.concurrency or len(sends) or 1)

        async def send_one(send: Send, one: _Kept) -> None:
            async with places:
                await self._send(send, one)

        tasks = []
        for send, one in sorted(zip(sends, kept), key=lambda pair: pair[0].at or 0.0):
            one.intended = send.at or 0.0
            if (wait := one.intended - self.now) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.ensure_future(send_one(send, one)))
        await asyncio.gather(*tasks)

    async def _send(self, send: Send, kept: _Kept) -> None:
        kept.sent = self.now
        try:
            async with asyncio.timeout(self.job.timeout):
                async with self.session.post(self.job.url, data=send.body.encode()) as response:
                    kept.status = response.status
                    if response.status != 200:
                        kept.error = (await response.content.read(ERROR_BYTES)).decode("utf-8", "replace")
                    else:
                        async for part in response.content.iter_any():
                            kept.parts.append((self.now, part))
        except TimeoutError:
            kept.error = f"no whole answer within {self.job.timeout:g} s"
        except (aiohttp.ClientError, OSError) as error:
            kept.error = f"{type(error).__name__}: {error}"
        kept.ended = self.now
        self.num_done += 1
        self.on_done(self.num_done)

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began


def main() -> None:
    """A job on stdin; on stdout lines with how many are done, then the report."""
    fields = json.load(sys.stdin)
    job = Job(**fields | {name: [Send(**send) for send in fields[name]] for name in ("sends", "warmups")})
    told = time.monotonic()

    def on_done(count: int) -> None:
        nonlocal told
        if time.monotonic() - told > PROGRESS_EVERY:
            told = time.monotonic()
            print(json.dumps({"done": count}), flush=True)

    report = asyncio.run(run(job, on_done))
    outcomes = [outcome.to_json() for outcome in report.outcomes]
    print(json.dumps(asdict(report) | {"outcomes": outcomes}), flush=True)


if __name__ == "__main__":
    main()
