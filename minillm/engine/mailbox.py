"""Mailbox: from the thread that makes the texts to the event loop that reads them. Built in chapter 23.

    text thread   post(inbox, delta)   one wake-up of the loop for all that comes before it runs
    event loop    deliver              some inboxes at a time, so that other callbacks get their turn
    coroutine     await inbox.take()   everything that came since it last looked: a slow reader's deltas merge

Waking a loop writes to a socket: for each token of 256 streams that would cost more than the token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")
AT_ONCE = 16  # inboxes that wake their readers before the loop sees to others: a few milliseconds of work


class Inbox(Generic[Item]):
    """What came for one coroutine, in order."""

    def __init__(self):
        self._items: list[Item] = []
        self._filled = asyncio.Event()

    async def take(self) -> list[Item]:
        """Wait for something; all that is there."""
        await self._filled.wait()
        self._filled.clear()
        taken, self._items = self._items, []
        return taken

    def put(self, item: Item) -> None:
        """In the event loop."""
        self._items.append(item)
        self._filled.set()


class Mailbox(Generic[Item]):
    """Posts items to the inboxes of one event loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._posted: deque[tuple[Inbox[Item], Item]] = deque()
        self._is_scheduled = False

    def post(self, inbox: Inbox[Item], item: Item) -> None:
        """Raises RuntimeError when the loop is closed, because nothing reads the mailbox any more."""
        self._posted.append((inbox, item))
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Cleared first: what is posted from now on schedules another delivery, and may find its items delivered.
        self._is_scheduled = False
        woken = set()
        while self._posted and len(woken) < AT_ONCE:
            inbox, item = self._posted.popleft()
            inbox.put(item)
            woken.add(inbox)
        if self._posted and not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._deliver)
