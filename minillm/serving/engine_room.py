"""EngineRoom: the engine at work, told to all who watch it over server-sent events. Built in chapter 23.

    engine thread   StepLog.add              while there is a watcher
    event loop      StepLog.take -> RoomView -> one record as JSON, at most ten times a second
                        -> watcher, watcher, ...    each sends the newest record; one that is slow misses some

A record says nothing of prompts, texts, keys and users.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from minillm.engine.step_log import StepLog
from minillm.serving.errors import ApiError
from minillm.serving.room_view import RoomView
from minillm.serving.sse import event

if TYPE_CHECKING:
    from minillm.serving.service import Call, Service

EVERY = 0.1  # seconds between two records, at least
HEARTBEAT = 5.0  # seconds without a record after which a comment shows that the connection lives
MOST_WATCHERS = 256
REMEMBERED_TAGS = 1024
TAG = re.compile(r".*-page-([0-9a-f]{8})")  # of a request_id that the page chose

log = logging.getLogger("uvicorn.error")


class EngineRoom:
    """One producer for all watchers, at work from the first one to the last. All methods belong to one event loop."""

    def __init__(self, service: Service):
        self.service = service
        self.num_watchers = 0
        self._tags: OrderedDict[str, str] = OrderedDict()  # by group id
        self._latest, self._number = b"", 0  # the newest record
        self._news = asyncio.Event()  # replaced with every record
        self._producer: asyncio.Task[None] | None = None

    def note(self, call: Call) -> None:
        """Remember what the page calls its own requests, so that it can find them again."""
        if self.num_watchers and (found := TAG.fullmatch(call.id)):
            for request in call.requests:
                self._tags[request.group_id] = found[1]
            while len(self._tags) > REMEMBERED_TAGS:
                self._tags.popitem(last=False)

    def check_room(self) -> None:
        """Raise ApiError 429 where as many watch as may, 503 while the server shuts down."""
        self.service.gate.check_open()
        if self.num_watchers >= MOST_WATCHERS:
            raise ApiError(429, f"{MOST_WATCHERS} watchers are connected already; close one", code="overloaded")

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events for one watcher, until it leaves or the server drains."""
        self.num_watchers += 1
        if self.num_watchers == 1:
            self._latest = b""
            self._producer = asyncio.ensure_future(self._produce())
        producer, seen = self._producer, self._number - bool(self._latest)
        try:
            while not producer.done():
                if seen != self._number:
                    seen = self._number
                    yield self._latest
                    continue
                try:
                    await asyncio.wait_for(self._news.wait(), HEARTBEAT)
                except TimeoutError:
                    yield b": nothing new\n\n"
            yield event(json.dumps({"closed": "draining" if self.service.gate.is_closed else "failed"}))
        finally:
            self.num_watchers -= 1
            if not self.num_watchers:
                producer.cancel()

    async def _produce(self) -> None:
        engine, steps = self.service.llm.engine, StepLog()
        engine.step_logs.append(steps)
        try:
            view, before = RoomView(engine), None
            loop = asyncio.get_running_loop()
            began = loop.time()
            while not self.service.gate.is_closed:
                record = json.dumps(view.record(steps.take(), self._tags), separators=(",", ":"))
                if record != before:
                    before = record
                    self._publish(event(f'{{"time":{loop.time() - began:.3f},{record[1:]}'))
                await asyncio.sleep(EVERY)
        except Exception:
            log.exception("the engine room is closed until the next visit")
        finally:
            engine.step_logs.remove(steps)
            self._news.set()

    def _publish(self, record: bytes) -> None:
        self._latest = record
        self._number += 1
        self._news.set()
        self._news = asyncio.Event()
