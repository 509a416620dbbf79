"""Requests as bytes, and a connection that sends them as they are."""

from __future__ import annotations

import json
import socket

from minillm.serving.run import RunningServer

from .conftest import PATIENCE


def raw(body: dict, path: str = "/v1/completions", more: str = "", version: str = "1.1") -> bytes:
    """A request as it goes over the wire; `more` are lines of its head, each with its end."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"{more}Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def connect(server: RunningServer) -> socket.socket:
    host, port = server.socket.getsockname()[:2]
    return socket.create_connection((host, port), timeout=PATIENCE)


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)
