"""Server-sent events: a text that arrives piece by piece over one HTTP answer. Built in chapter 23.

    data: {"choices": [...]}
                                  an empty line ends an event
    data: [DONE]

(The format is in the HTML standard, section "Server-sent events"; the end mark is OpenAI's.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


def event(data: str) -> bytes:
    """One event. JSON has no line breaks of its own, so that one line is enough."""
    return b"data: " + data.encode("utf-8", "replace") + b"\n\n"


class EventStream(Response):
    """Sends what a generator yields. When the client leaves, the generator is closed where it waits, and cleans up."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncGenerator[bytes, None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.pieces = pieces

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]) -> None:
        await while_connected(self._write(send), receive)

    async def _write(self, send: Callable[..., Any]) -> None:
        async with aclosing(self.pieces):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(work: Awaitable[Result], receive: Callable[[], Awaitable[Any]]) -> Result | None:
    """The result of `work`, which is cancelled when the client leaves; None then."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    return None if working.cancelled() else working.result()


async def answered(work: Awaitable[Result], request: Request) -> Result:
    """The result of `work`. Raises ClientDisconnect, after `work` was cancelled, when the client leaves before."""
    result = await while_connected(work, request.receive)
    if result is None:
        raise ClientDisconnect
    return result
