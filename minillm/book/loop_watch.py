"""How long an event loop stands still, and how many steps an engine takes meanwhile. Built in chapter 23."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from minillm.engine.engine import Engine

EVERY = 0.01  # seconds between two looks


@dataclass
class Watched:
    """What happened while a block ran."""

    steps: int = 0
    pause: float = 0.0  # the longest one of the running event loop, seconds


@asynccontextmanager
async def watched_loop(engine: Engine) -> AsyncIterator[Watched]:
    """`async with watched_loop(engine) as seen`: a coroutine asks for a turn every 10 ms, and notes its delay."""
    seen, first = Watched(), engine.num_steps

    async def tick() -> None:
        while True:
            due = time.perf_counter() + EVERY
            await asyncio.sleep(EVERY)
            seen.pause = max(seen.pause, time.perf_counter() - due)

    ticking = asyncio.ensure_future(tick())
    await asyncio.sleep(2 * EVERY)
    try:
        yield seen
        await asyncio.sleep(2 * EVERY)
    finally:
        ticking.cancel()
        seen.steps = engine.num_steps - first
