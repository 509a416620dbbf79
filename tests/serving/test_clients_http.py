"""What HTTP itself promises, and what clients of any language rely on."""

from __future__ import annotations

import gzip
import json
import socket

import httpx
import pytest

from .conftest import MODEL, PATIENCE

BODY = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
JSON = {"Content-Type": "application/json"}


def test_a_connection_serves_many_requests(server):
    with socket.create_connection(server.socket.getsockname()[:2], timeout=PATIENCE) as connection:
        file = connection.makefile("rb")
        content = json.dumps(BODY).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        for _ in range(3):
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
            status, headers = file.readline(), {}
            while (line := file.readline().strip()) != b"":
                name, _, value = line.partition(b": ")
                headers[name.lower()] = value
            assert status.startswith(b"HTTP/1.1 200") and b"connection" not in headers
            assert json.loads(file.read(int(headers[b"content-length"])))["object"] == "text_completion"


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/version", "/metrics"])
def test_head_is_get_without_a_body(http, path):
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers.get("content-type") == get.headers.get("content-type")


def test_methods_that_a_path_does_not_take(http):
    for method, path, allowed in (
        ("OPTIONS", "/v1/completions", "POST"),
        ("HEAD", "/v1/completions", "POST"),
        ("DELETE", "/v1/models", "GET"),
    ):
        answer = http.request(method, path)
        assert answer.status_code == 405 and answer.headers["Allow"] == allowed


def test_a_chunked_body_is_a_body(http):
    content = json.dumps(BODY).encode()
    pieces = (content[at : at + 7] for at in range(0, len(content), 7))
    assert http.post("/v1/completions", content=pieces, headers=JSON).status_code == 200


def test_a_body_that_waits_for_leave_gets_it(server):
    """curl asks with Expect: 100-continue before it sends a long body."""
    content = json.dumps(BODY).encode()
    with socket.create_connection(server.socket.getsockname()[:2], timeout=PATIENCE) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n".encode())
        file = connection.makefile("rb")
        assert file.readline().startswith(b"HTTP/1.1 100") and file.readline() == b"\r\n"
        connection.sendall(content)
        assert file.readline().startswith(b"HTTP/1.1 200")
        file.read()


def test_a_compressed_body_is_refused_by_name(http):
    content = gzip.compress(json.dumps(BODY).encode())
    answer = http.post("/v1/completions", content=content, headers=JSON | {"Content-Encoding": "gzip"})
    assert answer.status_code == 415 and "Content-Encoding: gzip" in answer.json()["error"]["message"]
    answer = http.post(
        "/v1/completions", json=BODY, headers={"Content-Encoding": "identity", "Accept-Encoding": "gzip"}
    )
    assert answer.status_code == 200 and "content-encoding" not in answer.headers


def test_a_slash_at_the_end_leads_to_the_path(server):
    with httpx.Client(base_url=server.url, follow_redirects=True) as client:
        assert client.post("/v1/completions/", json=BODY).status_code == 200
        assert client.get("/v1/models/").json()["object"] == "list"


def test_every_answer_has_a_request_id(http):
    mine = {"X-Request-Id": "trace-1"}
    for answer in (
        http.get("/health", headers=mine),
        http.get("/nothing", headers=mine),
        http.post("/tokenize", content=b"{", headers=mine),
    ):
        assert answer.headers["x-request-id"] == "trace-1"
    assert len({http.get("/health").headers["x-request-id"] for _ in range(3)}) == 3
    for odd in ("x" * 200, "a\tb", "ü"):
        made = http.get("/health", headers={"X-Request-Id": odd.encode()}).headers.get_list("x-request-id")
        assert len(made) == 1 and made[0] != odd


def test_headers_of_other_services_change_nothing(http):
    headers = {"OpenAI-Organization": "org-1", "OpenAI-Beta": "assistants=v2", "Origin": "http://evil", "Cookie": "a=b"}
    answer = http.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_a_path_that_is_not_served_says_what_is(http):
    assert "use /v1/chat/completions" in http.post("/v1/responses", json={}).json()["error"]["message"]
    assert "/openapi.json" in http.get("/v1/responsesx").json()["error"]["message"]
