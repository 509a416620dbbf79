"""The server under load: whatever some clients do, the others get exactly their texts, and each of them once."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Awaitable, Callable

import httpx
import pytest

from minillm import SamplingParams
from minillm.serving.keys import Key

from .conftest import MODEL, PATIENCE, settle, wait_until
from .test_faults import LONG, raw

PROMPTS = ["Once upon a time", "A dog", "The sun", "Tom has 3 apples"]
BODY = {"model": MODEL, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
KEY = "sk-survivor"
PARAMS = SamplingParams(temperature=0, max_tokens=BODY["max_tokens"], ignore_eos=True)
Fault = Callable[["httpx.AsyncClient", "tuple[str, int]", random.Random], Awaitable[None]]


async def stream(http: httpx.AsyncClient, **fields: object) -> tuple[int, str, str]:
    """The status, the text and the last finish reason of one answer."""
    text, reason = "", ""
    async with http.stream("POST", "/v1/completions", json=BODY | fields | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return answer.status_code, text, "error"
                text += chunk["choices"][0]["text"]
                reason = chunk["choices"][0]["finish_reason"] or reason
    return answer.status_code, text, reason


def client_of(server, key: str = "none", **options: object) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=512)
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits, headers=headers, **options)


async def one_that_never_reads(http: httpx.AsyncClient, address: tuple[str, int], rng: random.Random) -> None:
    """Its answer is more than the sockets hold; the server closes the connection."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.run_in_executor(None, connection.connect, address)
        request = raw(LONG | {"stream": True, "logprobs": 1000, "max_tokens": 300})
        await loop.run_in_executor(
            None, connection.sendall, request.replace(b"Host", b"Authorization: Bearer " + KEY.encode() + b"\r\nHost")
        )
        await asyncio.sleep(0.5)


async def halves_of_requests(http: httpx.AsyncClient, address: tuple[str, int], rng: random.Random) -> None:
    """60 requests that end anywhere, each on an open connection that the server gives up."""

    async def half() -> None:
        request = raw(LONG | {"prompt": "half"})
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request[: rng.randrange(1, len(request) - 1)])
        await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()

    await asyncio.gather(*(half() for _ in range(60)))


async def bodies_that_are_malformed(http: httpx.AsyncClient, address: tuple[str, int], rng: random.Random) -> None:
    """500 of them, of every kind; each is refused with a sentence that helps."""
    values = [None, True, -1, 0, 1.5, 1e308, 10**400, "", "x", [], [[]], {}, {"a": 1}, ["a", 1], "\ud800"]
    fields = ["prompt", "max_tokens", "temperature", "n", "stop", "logit_bias", "stream", "seed", "model", "top_p"]
    fields += ["structured_outputs", "stream_options", "logprobs", "priority", "user", "no_such_field"]

    def malformed() -> bytes:
        kind = rng.randrange(5)
        good = json.dumps(BODY | {"prompt": "Once", "max_tokens": 1})
        if kind == 0:
            return good[: rng.randrange(1, len(good) - 1)].encode()
        if kind == 1:
            return rng.randbytes(rng.randrange(1, 100))
        if kind == 2:
            return b"[" * rng.choice([10, 1000, 50_000])
        if kind == 3:
            return json.dumps(rng.choice(values)).encode()
        changed = {rng.choice(fields): rng.choice(values) for _ in range(rng.randrange(1, 4))}
        return json.dumps(BODY | {"prompt": "Once", "max_tokens": 1} | changed).encode()

    async def send() -> None:
        headers = {"Content-Type": "application/json"}
        answer = await http.post("/v1/completions", content=malformed(), headers=headers)
        assert answer.status_code in (200, 400, 404, 413), answer.text
        if answer.status_code != 200 and not answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.json()["error"]["message"]

    for _ in range(20):
        await asyncio.gather(*(send() for _ in range(25)))


async def keys_that_are_wrong(http: httpx.AsyncClient, address: tuple[str, int], rng: random.Random) -> None:
    async def send() -> None:
        wrong = rng.choice(
            ["", "Bearer", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Basic {KEY}", "Bearer " + "x" * 5000]
        )
        answer = await http.post("/v1/completions", json=LONG, headers={"Authorization": wrong})
        assert answer.status_code == 401 and KEY not in answer.text

    await asyncio.gather(*(send() for _ in range(100)))


@pytest.mark.parametrize(
    "fault", [one_that_never_reads, halves_of_requests, bodies_that_are_malformed, keys_that_are_wrong]
)
def test_others_get_exactly_their_texts_beside(fault: Fault, llm, engine, serve):
    # Slow clients are cut off where slowness is tested: 100 requests in one loop may hold up each other for as long.
    send_seconds = 0.3 if fault is one_that_never_reads else 30
    come_seconds = 0.5 if fault is halves_of_requests else 30
    server = serve(keys=(Key(KEY),), send_seconds=send_seconds, head_seconds=come_seconds, body_seconds=come_seconds)
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]

    async def main() -> int:
        answered, is_over = 0, asyncio.Event()

        async def survive(http: httpx.AsyncClient, prompt: str, text: str) -> None:
            nonlocal answered
            while not is_over.is_set():
                assert await stream(http, prompt=prompt) == (200, text, "length")
                answered += 1

        async with client_of(server, KEY) as http:
            survivors = [asyncio.ensure_future(survive(http, *pair)) for pair in zip(PROMPTS, expected)]
            try:
                await fault(http, server.socket.getsockname()[:2], random.Random(7))
            finally:
                is_over.set()
                await asyncio.gather(*survivors)
        return answered

    assert asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE)) >= len(PROMPTS)
    settle(engine)


def test_a_step_that_raises_ends_those_in_it_and_the_waiting_get_their_texts(llm, engine, serve, monkeypatch):
    """100 streams, at most 64 in a step: each ends once, with its exact text or with an error."""
    server, execute, failed = serve(), engine.llm.engine.executor.execute, threading.Event()
    prompts = [f"Story {number}: once" for number in range(100)]
    expected = [output.outputs[0].text for output in llm.generate(prompts, PARAMS, use_tqdm=False)]

    def fails(output):
        if len(output.rows) == 64 and not failed.is_set():
            failed.set()
            raise OSError("the device is gone")
        return execute(output)

    async def all_of_them() -> list[tuple[int, str, str]]:
        async with client_of(server) as http:
            return await asyncio.gather(*(stream(http, prompt=prompt) for prompt in prompts))

    monkeypatch.setattr(engine.llm.engine.executor, "execute", fails)
    answers = asyncio.run(all_of_them())
    assert failed.is_set()
    ended = [text for _, text, reason in answers if reason == "error"]
    for (_, text, reason), whole in zip(answers, expected):
        assert (reason, text) == ("length", whole) if reason != "error" else whole.startswith(text)
    assert 64 <= len(ended) < 100


def test_far_above_capacity_nothing_is_lost_or_doubled(llm, engine, serve):
    """200 clients before a gate for 4, each of which comes back until it is served: every refusal says when, every
    client gets its text, and the engine generates each of them once."""
    server, rng = serve(max_queued_requests=4), random.Random(3)
    prompts = [f"Number {number}" for number in range(200)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    before = engine.counters.by_adapter[""].ended["length"], server.app.state.models.metrics.num_refused[429]

    async def until_served(http: httpx.AsyncClient, prompt: str) -> tuple[str, int]:
        refusals = 0
        while True:
            answer = await http.post("/v1/completions", json=BODY | {"prompt": prompt, "max_tokens": 8})
            if answer.status_code == 200:
                return answer.json()["choices"][0]["text"], refusals
            assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
            refusals += 1
            await asyncio.sleep(0.05 * rng.random() * min(refusals, 10))

    async def all_of_them() -> list[tuple[str, int]]:
        async with client_of(server) as http:
            return await asyncio.gather(*(until_served(http, prompt) for prompt in prompts))

    answers = asyncio.run(asyncio.wait_for(all_of_them(), 2 * PATIENCE))
    assert [text for text, _ in answers] == expected
    settle(engine)
    assert engine.counters.by_adapter[""].ended["length"] - before[0] == len(prompts)
    refused = sum(count for _, count in answers)
    assert refused and server.app.state.models.metrics.num_refused[429] - before[1] == refused


def test_a_piece_is_not_held_back_until_the_one_before_is_acknowledged(serve):
    server = serve()
    with socket.create_connection(server.socket.getsockname()):
        wait_until(lambda: server.server.server_state.connections)
        [protocol] = server.server.server_state.connections
        accepted = protocol.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs(serve):
    """httpx takes 5 s and aiohttp 15 s; where the server closes first, it may do so under the next request."""
    assert serve().server.config.timeout_keep_alive > 60
