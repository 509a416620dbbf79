"""The drawings of chapter 23 say what they draw, and the engine room's picture shows what the records say."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from minillm.book.engine_room import block_states, engine_room, open_page, watched
from minillm.book.loop_watch import watched_loop
from minillm.book.service_figures import (
    blocks_of_clients_that_leave,
    cost_per_token,
    lora_map,
    overload_curves,
    service_map,
)


def record(step, runs, owned=2, waiting=0, generated=0):
    totals = {"steps": step, "prefill": 30, "decoded": 9, "cached": 16, "generated": generated}
    blocks = {"total": 12, "free": 9 - owned, "cached": 2, "owned": owned, "shared": 1, "blocks_each": 1}
    return {
        "time": step / 10, "step": step, "running": 2, "waiting": waiting, "runs": runs, "totals": totals,
        "blocks": blocks | {"map": f"o{owned}sc2f"},
    }  # fmt: skip


def test_the_drawings_are_told_in_words():
    assert "event loop" in service_map().alt and "inbox" in service_map().alt
    assert "shared matrix W" in lora_map().alt


def test_the_charts_are_told_with_their_figures():
    assert "three rounds over 5 steps" in blocks_of_clients_that_leave([1, 2, 3, 2, 0], [1, 0, 2], predicted=3).alt
    told = cost_per_token({"a function": 100.0, "HTTP": 180.0}, predicted=50).alt
    assert "HTTP: 180 µs" in told and "Predicted: 150 µs" in told
    assert "rises to 60 s" in overload_curves((5, 20), (0.1, 60.0), (0.1, 0.9), 30, mu=10.0, bound=0.7).alt


def test_a_pause_of_the_event_loop_is_seen():
    async def watch(block):
        async with watched_loop(type("Engine", (), {"num_steps": 7})) as seen:
            await block()
        return seen

    async def stands_still():
        time.sleep(0.2)

    async def waits():
        await asyncio.sleep(0.2)

    assert asyncio.run(watch(stands_still)).pause > 0.15
    assert asyncio.run(watch(waits)).steps == 0


@pytest.mark.parametrize("text, states", [("o3f", "ooof"), ("o12s", "o" * 12 + "s"), ("", ""), ("c", "c")])
def test_run_lengths_are_spelled_out(text, states):
    assert block_states(text) == states


def test_the_picture_counts_what_the_records_hold():
    runs = [[1, "p", 1, 1, 20, 0, 0], [2, "p", 1, 2, 10, 0, 0], [1, "d", 2, 4, 4, 0, 0], [2, "x", 3, 1, 0, 0, 0]]
    shown = engine_room([record(1, runs[:2], waiting=3), record(5, runs[2:], owned=6, generated=9), record(6, [])])
    for told in ("over 6 steps", "30 prompt tokens and 9 decoded tokens of 2 requests", "At most 3 requests wait"):
        assert told in shown.alt
    assert "6 blocks are owned, 1 shared and 2 cached, of 12" in shown.alt
    assert shown.png.startswith(b"\x89PNG")


def test_no_records_are_refused():
    with pytest.raises(ValueError, match="records is empty"):
        engine_room([])


@contextlib.asynccontextmanager
async def served(answer: bytes):
    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


def test_watching_collects_records_and_nothing_else():
    async def watch():
        events = b': nothing new\n\ndata: {"step":1}\n\ndata: {"step":2}\n\ndata: {"closed":"draining"}\n\n'
        async with served(b"HTTP/1.1 200 OK\r\n\r\n" + events) as url, watched(url) as records:
            return records

    assert [one["step"] for one in asyncio.run(watch())] == [1, 2]


def test_a_server_without_a_page_is_named():
    async def watch():
        async with served(b"HTTP/1.1 404 Not Found\r\n\r\n") as url, watched(url):
            pass

    with pytest.raises(ValueError, match="answers 404; is the server started with its page"):
        asyncio.run(watch())


def test_the_page_is_a_link(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    open_page(type("Server", (), {"url": "http://127.0.0.1:8123"}))
    assert 'href="http://127.0.0.1:8123/"' in shown[0].data
