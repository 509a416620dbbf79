"""Reading: what one coroutine reads of the requests it asked for. Built in chapter 23.

with Reading(thread, mailbox, requests) as reading:      leaving it aborts what has not ended
    async for pieces in reading:                         [(which request, StreamDelta), ...] since the last look
        ...
reading.outputs()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from minillm.engine.mailbox import Inbox, Mailbox
from minillm.engine.outputs import RequestOutput, StreamDelta
from minillm.engine.request import Request
from minillm.engine.stream import Stream
from minillm.engine.thread import EngineThread

Piece = tuple[int, StreamDelta]  # which of the requests, and what is new of it


class Reading:
    """Requests that are submitted together and read in one event loop. Pieces that come while the reader is elsewhere
    wait, and are handed over together. All methods belong to that loop; none of them blocks it.

    `request_ids` are the caller's names for them. Raises what `EngineThread.add` raises, and then none is submitted.
    """

    def __init__(
        self,
        thread: EngineThread,
        mailbox: Mailbox[Piece],
        requests: Sequence[Request],
        request_ids: Sequence[str] | None = None,
    ):
        self._inbox: Inbox[Piece] = Inbox()
        self._open = {(place, index) for place, request in enumerate(requests) for index in range(request.params.n)}
        self.streams: list[Stream] = []
        try:
            for place, request in enumerate(requests):
                name = None if request_ids is None else request_ids[place]
                self.streams.append(thread.add(request, name, partial(self._hear, mailbox, place), keeps_deltas=False))
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def is_finished(self) -> bool:
        """Whether all pieces have been read."""
        return not self._open

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        """The pieces as they come. Raises the error of a step that ended a request, or why the engine refused one."""
        while self._open:
            pieces = await self._inbox.take()
            for place, delta in pieces:
                self._note(place, delta)
            yield pieces
        for stream in self.streams:
            if not stream.finished.is_set():  # the text thread is about to: then its id is free again
                await asyncio.to_thread(stream.finished.wait)
            if stream.error is not None:
                raise stream.error

    async def all(self) -> list[RequestOutput]:
        """Read to the end; the outputs."""
        async for _ in self:
            pass
        return self.outputs()

    def outputs(self) -> list[RequestOutput]:
        """What each request generated, when all pieces have been read."""
        return [stream.sink.collected() for stream in self.streams]

    def abort(self) -> None:
        """End what has not ended: its last piece says "abort"."""
        for stream in self.streams:
            if not stream.finished.is_set():
                stream.abort()

    def _hear(self, mailbox: Mailbox[Piece], place: int, delta: StreamDelta) -> None:
        """In the text thread."""
        if not mailbox.loop.is_closed():
            mailbox.post(self._inbox, (place, delta))

    def _note(self, place: int, delta: StreamDelta) -> None:
        if delta.finish_reason == "abort" and not delta.token_ids:  # one piece for all samples
            self._open = {one for one in self._open if one[0] != place}
        elif delta.finish_reason is not None:
            self._open.discard((place, delta.index))
