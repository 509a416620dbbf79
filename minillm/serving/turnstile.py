"""Turnstile: it lets a few requests pass in each turn of the event loop, so that streams go on. Built in chapter 23.

The event loop runs everything that is ready before it looks at its sockets and timers again. If 256 requests come
together, each a millisecond of parsing, every stream stands still for a quarter of a second.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 4  # requests that are parsed, or handed to the engine, in one turn of the event loop


class Turnstile:
    """`await turnstile.enter()` returns in the order of the calls, for at most `at_once` of them in a turn of the loop;
    at once where none waits and the turn has a place left. Belongs to one event loop."""

    def __init__(self, at_once: int = AT_ONCE):
        self.at_once = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passed = 0  # in this turn
        self._is_turning = False  # whether the next turn is noticed

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn)
        if not self._waiting and self._passed < self.at_once:
            self._passed += 1
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _turn(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self.at_once:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its request was cancelled
                waiter.set_result(None)
                self._passed += 1
        self._is_turning = bool(self._passed)
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)
