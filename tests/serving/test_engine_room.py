"""/engine_room: every step is counted once, for all who watch, and nothing in it belongs to a client."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import Self

import httpx

from minillm.serving import engine_room as room_module
from minillm.serving.keys import Key
from minillm.serving.room_view import RoomView
from minillm.serving.run import RunningServer

from .conftest import MODEL, PATIENCE, settle, wait_until

SECRET, USER, PROMPT = "sk-of-one-client", "ann-of-green-gables", "The purple elephant"
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "temperature": 1}
HTTP = httpx.Client(timeout=PATIENCE)


class Watcher:
    """Reads the engine room in a thread, until the server ends the stream or `with` does."""

    def __init__(self, server: RunningServer, key: str | None = None):
        self.records: list[dict] = []
        self.text = ""
        self._socket = connect(server, key)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self.records)
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self.wait()

    def wait(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._socket.close()

    def _read(self) -> None:
        with suppress(OSError):
            for line in self._socket.makefile("rb"):
                self.text += line.decode()
                if line.startswith(b"data: "):
                    self.records.append(json.loads(line[len(b"data: ") :]))

    @property
    def totals(self) -> dict[str, int]:
        """Of the newest record, after the engine has come to rest."""
        wait_until(lambda: self.records[-1].get("running") == self.records[-1].get("waiting") == 0)
        return self.records[-1]["totals"]


def connect(server: RunningServer, key: str | None = None) -> socket.socket:
    """A watcher that has asked, and reads nothing."""
    host, port = server.socket.getsockname()[:2]
    connection = socket.create_connection((host, port), timeout=PATIENCE)
    authorization = "" if key is None else f"Authorization: Bearer {key}\r\n"
    connection.sendall(f"GET /engine_room HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{authorization}\r\n".encode())
    return connection


def ask(server: RunningServer, key: str | None = None, **body: object) -> dict:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = HTTP.post(f"{server.url}/v1/completions", json=BODY | body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def runs_of(records: list[dict], kinds: str = "pdr") -> list[list]:
    return [run for record in records for run in record.get("runs", ()) if run[1] in kinds]


def test_every_token_is_counted_once(serve, llm, engine):
    llm.reset_prefix_cache()
    server = serve()
    with Watcher(server) as watcher:
        with ThreadPoolExecutor(8) as threads:
            usages = list(threads.map(lambda n: ask(server, max_tokens=n, n=1 + n % 2)["usage"], range(10, 26)))
        settle(engine)
        wait_until(lambda: watcher.records[-1]["totals"]["finished"] == sum(1 + n % 2 for n in range(10, 26)))
        totals, records = watcher.totals, watcher.records
    assert totals["generated"] == sum(usage["completion_tokens"] for usage in usages)
    assert totals["prompt"] == sum(usage["prompt_tokens"] for usage in usages)
    assert totals["tokens"] == totals["prefill"] + totals["decoded"] + totals["recomputed"]
    assert totals["tokens"] == sum(run[4] for run in runs_of(records))
    assert totals["aborted"] == totals["preempted"] == totals["recomputed"] == 0
    steps = [record for record in records if record["first_step"] is not None]
    assert steps[0]["first_step"] == 1 and steps[-1]["step"] == totals["steps"]
    assert all(later["first_step"] == sooner["step"] + 1 for sooner, later in pairwise(steps))


def test_a_request_is_told_from_its_prompt_to_its_end(serve, llm, engine):
    llm.reset_prefix_cache()
    server = serve()
    with Watcher(server) as watcher:
        ask(server, prompt=list(range(10, 50)))
        wait_until(lambda: any(one["state"] == "finished" for record in watcher.records for one in record["requests"]))
        records = watcher.records
    (end,) = [one for record in records for one in record["requests"] if one["state"] == "finished"]
    assert (end["number"], end["prompt"], end["output"], end["max_tokens"], end["reason"]) == (1, 40, 20, 20, "length")
    assert end["arrived"] == 1 and end["ended"] == 20
    first, *decodes = runs_of(records)
    assert first == [1, "p", 1, 1, 40, 0, 0]
    assert all(run[1] == "d" and run[3] == run[4] for run in decodes) and sum(run[4] for run in decodes) == 19
    assert records[-1]["ttft"]["count"] == 1


def test_prefix_hits_and_the_blocks(serve, llm, engine):
    llm.reset_prefix_cache()
    server = serve()
    with Watcher(server) as watcher:
        for _ in range(2):
            ask(server, prompt=list(range(10, 50)))
        wait_until(lambda: watcher.records[-1]["totals"]["finished"] == 2)
        totals, blocks = watcher.totals, watcher.records[-1]["blocks"]
    assert (totals["prompt"], totals["cached"], totals["prefill"]) == (80, 32, 48)
    assert blocks["total"] == 600 and blocks["free"] + blocks["cached"] == 600 and blocks["cached"] >= 3
    assert blocks["owned"] == blocks["shared"] == 0


def test_requests_that_wait_and_run_are_told(serve, engine):
    server = serve()
    engine.thread.pause()
    try:
        with Watcher(server) as watcher, ThreadPoolExecutor(3) as threads:
            asking = [threads.submit(ask, server, max_tokens=40) for _ in range(3)]
            wait_until(lambda: watcher.records[-1]["waiting"] == 3)
            assert {one["state"] for one in watcher.records[-1]["requests"]} == {"waiting"}
            engine.llm.step_once()
            wait_until(lambda: watcher.records[-1]["running"] == 3)
            requests, blocks = watcher.records[-1]["requests"], watcher.records[-1]["blocks"]
            engine.thread.resume()
            assert [one.result()["usage"]["completion_tokens"] for one in asking] == [40, 40, 40]
    finally:
        engine.thread.resume()
    assert [one["state"] for one in requests] == ["running"] * 3 and all(
        one["blocks"] and one["table"] for one in requests
    )
    assert blocks["owned"] == sum(one["blocks"] for one in requests)


def test_a_client_that_leaves_is_told_as_aborted(serve, engine):
    server = serve()
    with Watcher(server) as watcher:
        body = BODY | {"max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            next(answer.iter_lines())
        wait_until(lambda: watcher.records[-1]["totals"]["aborted"] == 1)
        wait_until(lambda: not watcher.records[-1]["requests"])
    ends = [one for record in watcher.records for one in record["requests"] if one["state"] == "finished"]
    assert [one["reason"] for one in ends] == ["abort"]


def test_nothing_of_a_client_is_told(serve, engine):
    server = serve(keys=(Key(SECRET, USER), Key("sk-watching")))
    with Watcher(server, "sk-watching") as watcher:
        answer = ask(server, SECRET, user="somebody")
        wait_until(lambda: watcher.records[-1]["totals"]["finished"] == 1)
        text = watcher.text
    for secret in (
        SECRET,
        "sk-watching",
        USER,
        "somebody",
        PROMPT,
        "elephant",
        answer["id"],
        answer["choices"][0]["text"],
    ):
        assert secret not in text


def test_the_page_finds_its_own_requests(serve, engine):
    server = serve()
    with Watcher(server) as watcher:
        for name in ("page-0123abcd", "page-0123abcdx", "other"):
            ask(server, request_id=name)
        wait_until(lambda: watcher.records[-1]["totals"]["finished"] == 3)
    tags = {one["number"]: one.get("tag") for record in watcher.records for one in record["requests"]}
    assert tags == {1: "0123abcd", 2: None, 3: None}


def test_a_key_is_asked_for(serve):
    server = serve(keys=(Key(SECRET),))
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = httpx.get(f"{server.url}/engine_room", headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(server.url).status_code == 200  # it asks for the key itself


def test_the_engine_logs_nothing_without_a_watcher(serve, engine):
    server, logs = serve(), engine.llm.engine.step_logs
    assert logs == []
    with Watcher(server), Watcher(server):
        assert len(logs) == 1
    wait_until(lambda: logs == [])
    with Watcher(server) as watcher:  # it opens again, and counts anew
        ask(server)
        wait_until(lambda: watcher.records[-1]["totals"]["generated"] == 20)


def test_fifty_watchers_see_the_same(serve, engine):
    server = serve()
    with ExitStack() as stack:
        watchers = [stack.enter_context(Watcher(server)) for _ in range(50)]
        ask(server, n=4)
        wait_until(lambda: all(one.records[-1]["totals"]["finished"] == 4 for one in watchers))
        room = server.service.room
        assert room.num_watchers == 50 and len(engine.llm.engine.step_logs) == 1
        last = {json.dumps(one.records[-1]) for one in watchers}
    assert len(last) == 1
    wait_until(lambda: room.num_watchers == 0)


def test_no_more_watchers_than_allowed(serve, monkeypatch):
    monkeypatch.setattr(room_module, "MOST_WATCHERS", 2)
    server = serve()
    with Watcher(server), Watcher(server):
        answer = httpx.get(f"{server.url}/engine_room")
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "overloaded"
    wait_until(lambda: server.service.room.num_watchers == 0)
    with Watcher(server):
        pass


def test_a_slow_watcher_misses_records_and_no_count(serve, engine, monkeypatch):
    monkeypatch.setattr(room_module, "EVERY", 0.0005)
    server, padding = serve(), {"padding": "x" * 200_000}
    make = RoomView.record
    monkeypatch.setattr(RoomView, "record", lambda view, steps, tags: make(view, steps, tags) | padding)
    slow = connect(server)
    wait_until(lambda: server.service.room.num_watchers == 1)
    try:
        with Watcher(server) as quick:
            ask(server, max_tokens=300)
            wait_until(lambda: quick.records[-1]["totals"]["finished"] == 1)
            number = len(quick.records)
            found = []
            for line in slow.makefile("rb"):
                if line.startswith(b"data: "):
                    found.append(json.loads(line[len(b"data: ") :]))
                    if found[-1]["totals"]["finished"] == 1:
                        break
    finally:
        slow.close()
    assert len(found) < number and found[-1]["totals"]["generated"] == 300


def test_draining_ends_the_stream(engine):
    with RunningServer(engine) as server:
        watcher = Watcher(server)
        watcher.__enter__()
    watcher.wait()
    assert watcher.records[-1] == {"closed": "draining"}
    assert engine.llm.engine.step_logs == []


def test_a_failure_of_the_room_is_told_and_ends_no_request(serve, engine, monkeypatch):
    server = serve()
    monkeypatch.setattr(RoomView, "_latency", lambda view: 1 / 0)
    watcher = Watcher(server)
    watcher.__enter__()
    watcher.wait()
    assert watcher.records == [{"closed": "failed"}] and engine.llm.engine.step_logs == []
    assert ask(server)["usage"]["completion_tokens"] == 20
