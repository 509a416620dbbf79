"""Turnstile: it lets a few requests pass in each turn of the event loop, so that streams go on. Built in chapter 23.

The event loop runs everything that is ready before it looks at its sockets and timers again. If 256 requests come
together, each a millisecond of parsing, every stream stands still for a quarter of a second.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 4  # requests that are parsed, or handed to the engine, in one turn of the event loop


class Turnstile:
    """`await turnstile.enter()` returns in the order of the calls, for at most `at_once` of them in a turn of the loop.
    Belongs to one event loop."""

    def __init__(self, at_once: int = AT_ONCE):
        self.at_once = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        if len(self._waiting) == 1:
            loop.call_soon(self._turn)
        await waiter

    def _turn(self) -> None:
        passed = 0
        while self._waiting and passed < self.at_once:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its request was cancelled
                waiter.set_result(None)
                passed += 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
