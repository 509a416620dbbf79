"""Limits on what a client sends: a body that is too large, compressed, or never complete. Built in chapter 23."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from minillm.serving.errors import ApiError
from minillm.serving.turnstile import Turnstile

Receive = Callable[[], Awaitable[Any]]
REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class Limits:
    """ASGI middleware. It reads the body, within its limits, before the application sees the request; what is beyond
    them is refused, and the connection closed, since the rest of the body would be taken for the next request.

    Each answer has the X-Request-Id of its request, or a new one. HEAD is GET whose body the HTTP server leaves out."""

    def __init__(
        self,
        app: Any,
        max_header_bytes: int,
        max_body_bytes: int,
        body_seconds: float,
        on_refused: Callable[[int], object] = lambda status: None,
    ):
        self.app, self.max_header_bytes, self.on_refused = app, max_header_bytes, on_refused
        self.max_body_bytes, self.body_seconds = max_body_bytes, body_seconds
        self.turnstile = Turnstile()

    async def __call__(self, scope: Any, receive: Receive, send: Callable[..., Any]) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = _with_request_id(scope, send)
        try:
            async with asyncio.timeout(self.body_seconds):
                body = await self._body(scope, receive)
        except TimeoutError:
            seconds = f"body_seconds={self.body_seconds:g}"
            await self._refuse(ApiError(408, f"the body was not complete after {seconds}"), scope, receive, send)
            return
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        if body is None:  # the client has left
            return
        await self.turnstile.enter()
        told = False

        async def replay() -> Any:
            nonlocal told
            if not told:
                told = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self.app(scope | {"method": "GET"} if scope["method"] == "HEAD" else scope, replay, send)

    async def _body(self, scope: Any, receive: Receive) -> bytes | None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self.max_header_bytes:
            raise ApiError(431, f"the headers have {size} bytes; at most {self.max_header_bytes} are allowed")
        headers = dict(scope["headers"])
        if (encoding := headers.get(b"content-encoding", b"identity").lower()) not in (b"identity", b""):
            said = encoding.decode("ascii", "replace")
            raise ApiError(415, f"Content-Encoding: {said} is not served; send the body as it is", "Content-Encoding")
        said = headers.get(b"content-length", b"0")
        if said.isdigit():
            self._check(int(said))
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            self._check(size := size + len(parts[-1]))
            if not message.get("more_body", False):
                return b"".join(parts)

    def _check(self, size: int) -> None:
        if size > self.max_body_bytes:
            raise ApiError(413, f"the body has {size} bytes or more; at most {self.max_body_bytes} are allowed")

    async def _refuse(self, error: ApiError, scope: Any, receive: Receive, send: Callable[..., Any]) -> None:
        self.on_refused(error.status)
        answer = error.answer()
        answer.headers["Connection"] = "close"
        await answer(scope, receive, send)


def _with_request_id(scope: Any, send: Callable[..., Any]) -> Callable[..., Any]:
    asked = dict(scope["headers"]).get(b"x-request-id", b"")
    request_id = asked if REQUEST_ID.fullmatch(asked) else uuid4().hex.encode()

    async def send_with_id(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = message | {"headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
        await send(message)

    return send_with_id
