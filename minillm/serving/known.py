"""Who asks, for the paths that need to know. Built in chapter 23."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from minillm.serving.keys import Client


async def client_of(request: Request) -> Client:
    """A coroutine, so that no thread is asked. Raises ApiError 401."""
    return request.app.state.models.clients.find(request.headers.get("authorization"))


Known = Annotated[Client, Depends(client_of)]


async def admin_of(client: Known) -> Client:
    """Raises ApiError 401, and 403 for a client that may not change what is served."""
    client.check_admin()
    return client


Admin = Annotated[Client, Depends(admin_of)]
