"""Who is let in, and how much is taken on."""

from __future__ import annotations

import asyncio
import hmac
import threading

import httpx
import pytest
from hypothesis import given, settings, strategies as st

from minillm.serving import keys as keys_module
from minillm.serving.config import ServerConfig
from minillm.serving.errors import ApiError
from minillm.serving.gate import Gate
from minillm.serving.keys import Bucket, Client, Clients, Key, read_key_file

from .conftest import MODEL, PATIENCE, wait_until

ANN, BOB = Key("sk-ann", "ann", priority=1, requests_per_minute=2), Key("sk-bob", "bob", tokens_per_minute=30)
BODY = {"model": MODEL, "prompt": "Once", "max_tokens": 2}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "given_key", [None, "Bearer", "Bearer sk-an", "Bearer sk-ann2", "Basic sk-ann", "sk-ann", "Bearer é"]
)
def test_a_wrong_key_is_refused_everywhere(serve, given_key):
    server = serve(keys=(ANN, BOB))
    headers = {} if given_key is None else {"Authorization": given_key.encode()}
    with httpx.Client(base_url=server.url, headers=headers) as http:
        for method, path in (
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"),
            ("GET", "/v1/models"),
        ):
            answer = http.request(method, path, json=BODY if method == "POST" else None)
            assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
            error = answer.json()["error"]
            assert error["code"] == "invalid_api_key" and "sk-" not in answer.text
        assert http.get("/health").status_code == 200


def test_every_key_is_compared_whichever_fits(monkeypatch):
    clients, compared = Clients([Key(f"key{n}") for n in range(5)]), []
    compare = hmac.compare_digest
    monkeypatch.setattr(keys_module.hmac, "compare_digest", lambda a, b: compared.append(len(b)) or compare(a, b))
    for value in ("Bearer key0", "Bearer key4", "Bearer x"):
        compared.clear()
        try:
            clients.find(value)
        except ApiError:
            assert value == "Bearer x"
        assert compared == [32] * 5


def test_a_keys_requests_and_tokens_a_minute():
    clock = Clock()
    ann, bob = Client(ANN, clock), Client(BOB, clock)
    ann.check_rate(), ann.check_rate()
    with pytest.raises(ApiError, match="2 requests a minute") as refused:
        ann.check_rate()
    assert refused.value.status == 429 and refused.value.retry_after == pytest.approx(30)
    clock.now += 30
    ann.check_rate()
    bob.count_tokens(90)  # more than a minute's worth: two more minutes have to pass, and a token's time
    with pytest.raises(ApiError, match="30 tokens a minute") as refused:
        bob.check_rate()
    assert refused.value.retry_after == pytest.approx(122)
    clock.now += 123
    bob.check_rate()


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 4)), max_size=60), st.integers(5, 50))
def test_no_minute_takes_more_than_the_rate_twice(steps, rate):
    """A full bucket and a minute's filling: twice the rate, and never more, in any sixty seconds."""
    clock = Clock()
    bucket, taken = Bucket(rate, clock), []
    for pause, amount in steps:
        clock.now += pause
        if bucket.seconds_until(amount) == 0:
            bucket.take(amount)
            taken.append((clock.now, amount))
    for start, _ in taken:
        assert sum(amount for at, amount in taken if start <= at < start + 60) <= 2 * rate + 1e-6


def test_a_refused_key_is_told_when_to_come_back(serve):
    server = serve(keys=(ANN,))
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer sk-ann"}) as http:
        statuses = [http.post("/v1/completions", json=BODY) for _ in range(3)]
        assert [answer.status_code for answer in statuses] == [200, 200, 429]
        assert int(statuses[-1].headers["Retry-After"]) > 0
        assert statuses[-1].json()["error"]["code"] == "rate_limit_exceeded"


def test_a_keys_user_and_priority_reach_the_scheduler(serve, engine, monkeypatch):
    server, seen = serve(keys=(ANN, BOB)), []
    add = engine.llm.engine.add_request
    monkeypatch.setattr(engine.llm.engine, "add_request", lambda request: (seen.append(request), add(request))[1])
    for secret in ("sk-ann", "sk-bob"):
        headers = {"Authorization": f"Bearer {secret}"}
        httpx.post(f"{server.url}/v1/completions", json=BODY | {"user": "eve"}, headers=headers).raise_for_status()
    assert [(request.user, request.priority) for request in seen] == [("ann", 1), ("bob", 0)]


def test_a_key_file_is_read_and_its_faults_are_named(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nkey = "sk-secret"\nuser = "ann"\nrequests_per_minute = 3\n[[keys]]\nkey = "b"\n')
    first, second = read_key_file(file)
    assert (first.value, first.user, first.requests_per_minute, second.user) == ("sk-secret", "ann", 3, "")
    assert "secret" not in repr(first) and "secret" not in repr(ServerConfig(keys=(first,)))
    for text, words in (
        ("", r"no \[\[keys\]\]"),
        ("keys = 3", r"no \[\[keys\]\]"),
        ('[[keys]]\nuser = "a"', "entry 1 has no key"),
        ('[[keys]]\nkey = "sk-secret"\ncolour = 1', "unknown 'colour'"),
        ('[[keys]]\nkey = ""', "entry 1: a key is empty"),
        ('[[keys]]\nkey = "sk-secret"\npriority = "high"', "priority='high'"),
        ('[[keys]]\nkey = "sk-secret"\ntokens_per_minute = 0', "tokens_per_minute=0"),
        ('[[keys]]\nkey = "sk-secret"\nadmin = 1', "admin=1"),
        ("[[keys", "TOMLDecodeError"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=words) as refused:
            read_key_file(file)
        assert "sk-secret" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong", [dict(port=-1), dict(port=70000), dict(max_body_bytes=0), dict(drain_seconds=-1), dict(max_choices=True)]
)
def test_a_wrong_configuration_is_named(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        ServerConfig(**wrong)
    with pytest.raises(ValueError, match="two keys are the same"):
        ServerConfig(keys=(Key("a"), Key("a", "other")))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), max_size=40), st.integers(1, 8), st.integers(1, 60))
def test_the_gate_never_holds_more_than_its_limits(asked, most_requests, most_tokens):
    gate, inside = Gate(most_requests, most_tokens), []
    for count, tokens in asked:
        try:
            gate.enter(count)
        except ApiError as refused:
            assert refused.status == 429 and refused.retry_after >= 1
            assert gate.num_requests + count > most_requests
        else:
            try:
                gate.take_tokens(tokens)
                inside.append((count, tokens))
            except ApiError:
                assert gate.num_tokens and gate.num_tokens + tokens > most_tokens
                gate.leave(count, 0)
        assert gate.num_requests == sum(count for count, _ in inside) <= most_requests
        assert gate.num_tokens == sum(tokens for _, tokens in inside)
        assert gate.num_tokens <= most_tokens or len(inside) == 1
        if len(inside) > 2:
            gate.leave(*inside.pop(0))


def test_beyond_the_limit_a_request_is_refused_and_the_others_go_on(serve, engine):
    """The engine is paused, so that nothing ends meanwhile."""
    server = serve(max_queued_requests=2)
    statuses, threads = [], []

    def ask() -> None:
        statuses.append(httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE).status_code)

    engine.thread.pause()
    try:
        for _ in range(2):
            threads.append(threading.Thread(target=ask))
            threads[-1].start()
        wait_until(lambda: server.service.gate.num_requests == 2)
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY)
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
        assert "max_queued_requests=2" in answer.json()["error"]["message"]
    finally:
        engine.thread.resume()
    for thread in threads:
        thread.join(PATIENCE)
    assert statuses == [200, 200]
    assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 200


def test_tokens_beyond_the_limit_are_refused_but_never_the_first(serve, engine):
    server = serve(max_queued_tokens=40)
    assert httpx.post(f"{server.url}/v1/completions", json=BODY | {"max_tokens": 200}).status_code == 200

    async def three() -> list[int]:
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            engine.thread.pause()
            first = asyncio.ensure_future(http.post(f"{server.url}/v1/completions", json=BODY | {"max_tokens": 30}))
            while not server.service.gate.num_tokens:
                await asyncio.sleep(0.005)
            second = await http.post(f"{server.url}/v1/completions", json=BODY | {"max_tokens": 30})
            engine.thread.resume()
            return [(await first).status_code, second.status_code]

    assert asyncio.run(three()) == [200, 429]
