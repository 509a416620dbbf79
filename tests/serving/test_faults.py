"""Clients that misbehave, and an engine that fails: the others get what they asked for, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading

import httpx
import openai
import pytest

from minillm import SamplingParams

from .conftest import MODEL, PATIENCE, settle, wait_until
from .wire import connect, everything, raw

LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}


def test_a_thousand_clients_that_leave_at_random_moments(llm, engine, serve):
    server, generator = serve(), random.Random(0)
    prompts = [f"{word} {number}" for number in range(4) for word in ("Once", "A dog", "The sun")]
    params = SamplingParams(temperature=0, max_tokens=60)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]

    async def leave(place: int) -> None:
        """Sends all or a part of a request, reads a little or nothing, and is gone."""
        host, port = server.socket.getsockname()[:2]
        reader, writer = await asyncio.open_connection(host, port)
        body = LONG | {"prompt": f"Leaving {place}", "stream": place % 3 != 0}
        request = raw(body)
        writer.write(request[: generator.choice([len(request), len(request), generator.randrange(len(request))])])
        await writer.drain()
        await asyncio.sleep(generator.random() * 0.03)
        if generator.random() < 0.4:
            await asyncio.wait([asyncio.ensure_future(reader.read(generator.randrange(1, 2000)))], timeout=0.05)
        writer.transport.abort() if generator.random() < 0.5 else writer.close()

    async def stay(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=60, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            staying = [asyncio.ensure_future(stay(client, prompt)) for prompt in prompts]
            for wave in range(0, 1000, 50):
                await asyncio.gather(*(leave(place) for place in range(wave, wave + 50)))
            return await asyncio.gather(*staying)

    assert asyncio.run(all_of_them()) == expected
    settle(engine)
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_a_client_that_leaves_frees_its_blocks_within_one_step(engine, serve):
    """The engine is paused while it leaves; then it takes one more step at most for that request."""
    server = serve()
    with connect(server) as connection:
        connection.sendall(raw(LONG | {"stream": True}))
        connection.recv(100)
        engine.thread.pause()
    wait_until(lambda: not server.service.calls)
    steps = engine.llm.engine.num_steps
    engine.thread.resume()
    settle(engine)
    assert engine.llm.engine.num_steps <= steps + 1


def test_a_client_that_never_reads_is_let_go(engine, serve):
    server = serve(send_seconds=0.3)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.socket.getsockname())
        connection.settimeout(PATIENCE)
        body = LONG | {"stream": True, "logprobs": 1000, "max_tokens": 500}  # some 20 MB
        connection.sendall(raw(body))
        wait_until(lambda: server.service.calls)
        wait_until(lambda: not server.service.calls)
        settle(engine)


@pytest.mark.parametrize("part", [b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_half_a_head_loses_its_connection(serve, part):
    server = serve(head_seconds=0.2)
    with connect(server) as connection:
        connection.sendall(part)
        assert everything(connection) == b""
    with connect(server) as connection:  # and so does one after a request that was answered
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
        connection.sendall(part)
        assert everything(connection) == b""


def test_half_a_body_is_refused(serve):
    server = serve(body_seconds=0.2)
    with connect(server) as connection:
        connection.sendall(raw(LONG)[:-10])
        answer = everything(connection)
    assert b" 408 " in answer.split(b"\r\n")[0] and b"body_seconds=0.2" in answer


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(serve, chunked):
    server = serve(max_body_bytes=1000)
    body = json.dumps(LONG | {"prompt": "a" * 2000}).encode()

    def parts():
        yield from (body[at : at + 100] for at in range(0, len(body), 100))

    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=parts() if chunked else body, headers=headers)
    assert answer.status_code == 413 and "at most 1000" in answer.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_head_that_is_too_large_is_refused(serve):
    server = serve(max_header_bytes=2000)
    answer = httpx.get(f"{server.url}/health", headers={"X-Long": "a" * 10000})
    assert answer.status_code == 431 and "at most 2000" in answer.text
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_five_hundred_malformed_requests(serve):
    """Bytes that are no HTTP, and requests with some of their bytes changed: never a 5xx, and the server goes on."""
    server, generator = serve(head_seconds=0.5, body_seconds=0.5), random.Random(1)
    good = raw({"model": MODEL, "prompt": "Once", "max_tokens": 1})

    async def send(data: bytes) -> bytes:
        host, port = server.socket.getsockname()[:2]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(data)
        writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), PATIENCE)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    def malformed() -> bytes:
        if generator.random() < 0.3:
            return generator.randbytes(generator.randrange(1, 200))
        data = bytearray(good)
        for _ in range(generator.randrange(1, 6)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        return bytes(data)

    async def all_of_them() -> list[bytes]:
        found = []
        for _ in range(20):
            found += await asyncio.gather(*(send(malformed()) for _ in range(25)))
        return found

    for answer in asyncio.run(all_of_them()):
        assert not answer or answer.split()[1][:1] in (b"2", b"4"), answer
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_raises_ends_its_requests_alone(engine, serve, monkeypatch, stream):
    server, execute, failed = serve(), engine.llm.engine.executor.execute, threading.Event()

    def fails(output):
        if output.rows and not failed.is_set():
            failed.set()
            raise OSError("the device is gone")
        return execute(output)

    monkeypatch.setattr(engine.llm.engine.executor, "execute", fails)
    answer = httpx.post(f"{server.url}/v1/completions", json=LONG | {"stream": stream}, timeout=PATIENCE)
    if stream:
        events = answer.text.split("\n\n")
        assert answer.status_code == 200 and events[-2] == "data: [DONE]"
        error = json.loads(events[-3].removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 500
        error = answer.json()["error"]
    assert error["type"] == "server_error" and "OSError" in error["message"]
    assert "device is gone" not in answer.text  # what is inside stays inside
    short = LONG | {"max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=short, timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(engine, serve, stream):
    server = serve(request_seconds=0.2)
    engine.thread.pause()
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json=LONG | {"stream": stream}, timeout=PATIENCE)
    finally:
        engine.thread.resume()
    assert answer.status_code == (200 if stream else 503)
    assert "request_seconds=0.2" in answer.text and '"code":"timeout"' in answer.text.replace(": ", ":")


def test_draining_finishes_what_runs_and_takes_nothing_new(llm, engine, serve):
    server = serve()
    [expected] = llm.generate(LONG["prompt"], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    with connect(server) as connection:
        connection.sendall(raw(LONG | {"stream": True, "temperature": 0}))
        first = connection.recv(300)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        with pytest.raises(httpx.HTTPError):  # the door closes: refused, or closed before an answer
            while True:
                answer = httpx.get(f"{server.url}/ready", timeout=PATIENCE)
                assert answer.status_code in (200, 503)
        text = (first + everything(connection)).decode()
        stopping.join(PATIENCE)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected.outputs[0].text
    assert events[-1]["choices"][0]["finish_reason"] == "length" and "data: [DONE]" in text


def test_what_does_not_end_in_time_gets_a_last_piece(engine, serve):
    server = serve(drain_seconds=0.1)
    with connect(server) as connection:
        engine.thread.pause()
        connection.sendall(raw(LONG | {"stream": True}))
        wait_until(lambda: server.service.calls)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        wait_until(lambda: server.service.gate.is_closed)
        threading.Timer(0.3, engine.thread.resume).start()
        text = everything(connection).decode()
        stopping.join(PATIENCE)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "abort" and "data: [DONE]" in text


def test_ten_times_what_is_allowed_at_once(llm, serve):
    """Those that are admitted get their texts, all others an answer that says when to come back."""
    server = serve(max_queued_requests=8)
    [expected] = llm.generate("Once", SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 40}

    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_connections=80)) as http:
            return await asyncio.gather(*(http.post(f"{server.url}/v1/completions", json=body) for _ in range(80)))

    answers = asyncio.run(all_of_them())
    admitted = [answer for answer in answers if answer.status_code == 200]
    assert len(admitted) >= 8 and {answer.status_code for answer in answers} == {200, 429}
    assert all(answer.json()["choices"][0]["text"] == expected.outputs[0].text for answer in admitted)
    assert all("Retry-After" in answer.headers for answer in answers if answer.status_code == 429)


def test_256_streams_at_once_lose_nothing(llm, serve):
    server, params = serve(), SamplingParams(temperature=0, max_tokens=16)
    prompts = [f"Story {number}: once" for number in range(256)]
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]

    async def read(http: httpx.AsyncClient, prompt: str) -> str:
        body, text = {"prompt": prompt, "temperature": 0, "max_tokens": 16, "stream": True}, ""
        async with http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=256)
        async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as http:
            return await asyncio.gather(*(read(http, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == expected
