"""HTTP at its edges: heads that never end, trailers, upgrades, requests behind requests. An HTTP parser that is faster
and promises less (httptools, as uvicorn uses it) failed most of these."""

from __future__ import annotations

import contextlib
import json
import time

import httpx
import pytest

from minillm.serving.keys import Key

from .conftest import MODEL, PATIENCE, settle, wait_until
from .wire import connect, everything, raw

GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
SHORT = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
MANY = 400
LONG = SHORT | {"max_tokens": MANY, "ignore_eos": True}
CHUNKED = "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


def chunked(body: dict, trailers: bytes) -> bytes:
    content = json.dumps(body).encode()
    return (
        CHUNKED.format(path="/v1/completions").encode()
        + b"%x\r\n%b\r\n0\r\n" % (len(content), content)
        + trailers
        + b"\r\n"
    )


def answered(server, *pieces: bytes) -> list[bytes]:
    """The status of each answer to what is sent piece by piece, until the server closes the connection."""
    with connect(server) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.1)
        parts = everything(connection).split(b"HTTP/1.1 ")
    assert parts[0] == b""
    return [part.split(b" ", 1)[0] for part in parts[1:]]


def sent_until_refused(server, beginning: bytes, piece: bytes, most: int) -> int:
    sent = 0
    with connect(server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(beginning)
        while sent < most:
            sent += connection.send(piece)
            time.sleep(0.0005)
    return sent


@pytest.mark.parametrize("beginning", [b"GET /health HTTP/1.1\r\nX-Long: ", b"GET /", GET + b"GET /"])
def test_a_head_that_never_ends_is_refused_before_it_fills_the_memory(serve, beginning):
    server = serve(max_header_bytes=2000)
    assert sent_until_refused(server, beginning, b"a" * 1000, 2_000_000) < 1_000_000
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("piece", [b"a:b\r\n" * 1000, b"a" * 5000])
def test_trailers_that_never_end_are_refused(serve, piece):
    server = serve(max_header_bytes=2000)
    beginning = CHUNKED.format(path="/tokenize").encode() + b"0\r\nX: "
    assert sent_until_refused(server, beginning, piece, 30_000_000) < 15_000_000
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_key_in_a_trailer_opens_nothing(serve):
    server = serve(keys=(Key("secret"),))
    with connect(server) as connection:
        connection.sendall(chunked(SHORT, b"Authorization: Bearer secret\r\n") + LAST)
        assert everything(connection).split(b"\r\n", 1)[0].startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_body_behind_an_offer_to_upgrade_is_read_as_a_body(serve, is_apart):
    """Java's HttpClient offers HTTP/2 so. The server goes on in HTTP/1.1, and the body is no second request."""
    head, body = raw(SHORT, more=UPGRADE).split(b"\r\n\r\n")
    pieces = [head + b"\r\n\r\n", body + LAST] if is_apart else [head + b"\r\n\r\n" + body + LAST]
    assert answered(serve(), *pieces) == [b"200", b"200"]


def test_requests_behind_each_other_are_answered_however_they_are_cut(serve):
    server, request = serve(max_header_bytes=2000), raw(SHORT | {"user": "a" * 50_000})
    assert answered(server, request + GET[:12], GET[12:-2] + b"X: " + b"a" * 500 + b"\r\n\r\n" + LAST) == [b"200"] * 3
    assert answered(server, request[:10], request[10:] + GET[:12], GET[12:] + LAST) == [b"200"] * 3
    assert answered(server, GET[:5], GET[5:] + 50 * GET + LAST) == [b"200"] * 52


def test_no_http_behind_a_request_leaves_its_answer_whole(serve):
    assert answered(serve(), GET + b"\0\0\r\n\r\n") == [b"200", b"400"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_although_it_sent_another_request(engine, serve, stream):
    server = serve()
    with connect(server) as connection:
        connection.sendall(raw(LONG | {"stream": stream}) + GET)
        wait_until(lambda: server.service.calls)
        [call] = server.service.calls
    wait_until(lambda: not server.service.calls)
    assert len(call.requests[0].output_token_ids) < MANY
    settle(engine)


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(serve):
    with connect(serve()) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(raw(SHORT | {"stream": True}, version="1.0"))
        head, body = everything(connection).split(b"\r\n\r\n", 1)
    assert b" 200 " in head and b"chunked" not in head.lower() and body.startswith(b"data: {")
