"""A model repository: models come and go over HTTP, and disturb no other."""

from __future__ import annotations

import gc
import json
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from minillm import LLM, zoo
from minillm.serving import loading
from minillm.serving.config import ServerConfig
from minillm.serving.memory import Memory
from minillm.serving.repository import Repository
from minillm.serving.run import RunningServer

from .conftest import OPTIONS, PATIENCE, ROOM, RepositoryServer, wait_until
from .test_metrics import scraped


def test_a_model_is_loaded_asked_by_both_names_and_unloaded(start, once):
    server = start()
    assert server.ask("small").status_code == 404 and server.ask(None).status_code == 400
    assert server.change("small").json() == {}
    answers = [server.ask(name).json() for name in ("small", "small/2", None)]
    assert [one["choices"][0]["text"] for one in answers] == [once] * 3
    assert {one["model"] for one in answers} == {"small/2"}  # the version that answered
    assert server.ask("small/1").status_code == 404
    listed = [card["id"] for card in server.http.get("/v1/models").json()["data"]]
    assert listed == ["small", "small/2"] and server.http.get("/v1/models/small").json()["id"] == "small"
    assert server.states() == {"broken/1": "UNAVAILABLE", "small/1": "UNAVAILABLE", "small/2": "READY"}
    assert server.http.get("/v2/models/small").json()["versions"] == ["2"]
    assert server.http.get("/v2").json()["extensions"] == ["model_repository"]
    assert [server.http.get(f"/v2/health/{which}").status_code for which in ("live", "ready")] == [200, 200]
    for path, status in (("", 200), ("/versions/2", 200), ("/versions/1", 404), ("/versions/9", 404)):
        assert server.http.get(f"/v2/models/small{path}/ready").status_code == status
    assert server.change("small", "unload").status_code == 200
    assert server.ask("small").status_code == 404 and server.http.get("/v2/models/small/ready").status_code == 404
    assert server.loader.memory.free == ROOM and not server.http.get("/v1/models").json()["data"]


def test_versions_are_chosen_as_triton_has_it(start):
    server = start()

    def choose(**policy: object) -> httpx.Response:
        return server.change("small", config=json.dumps({"version_policy": policy}))

    assert choose(specific={"versions": [1]}).status_code == 200
    assert server.ask("small").json()["model"] == "small/1"
    assert choose(all={}).status_code == 200
    assert server.ask("small").json()["model"] == "small/2" and server.ask("small/1").json()["model"] == "small/1"
    models = {labels["model_name"] for labels, _ in scraped(server.running)["vllm:prompt_tokens_total"]}
    assert models == {"small/1", "small/2"}
    assert server.change("small").status_code == 200  # the highest version alone
    assert server.ask("small/1").status_code == 404
    for policy, param in (
        ({"specific": {"versions": [7]}}, "model"),
        ({"specific": {"versions": []}}, "parameters.config.version_policy.specific.versions"),
        ({"latest": {}, "all": {}}, "parameters.config.version_policy"),
        ({"newest": {}}, "parameters.config.version_policy.newest"),
    ):
        refused = choose(**policy)
        assert refused.status_code in (400, 404) and refused.json()["error"]["param"] == param, refused.text
    assert server.change("small", config="{").status_code == 400
    assert server.ask("small/2").status_code == 200


def test_a_second_load_waits_for_the_first_and_both_are_answered(start, monkeypatch):
    server, makes = start(), []
    real = loading.LLM

    def slow(*arguments: object, **options: object) -> LLM:
        makes.append(1)
        wait_until(lambda: len(server.loader._locks["small"]._waiters or ()) == 1)
        return real(*arguments, **options)

    monkeypatch.setattr(loading, "LLM", slow)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(server.change, ["small"] * 2))
    assert [one.status_code for one in answers] == [200, 200] and len(makes) == 1


def test_the_loop_serves_others_while_a_model_is_read(start, monkeypatch, once):
    server = start(load=("small",))
    begun, go = threading.Event(), threading.Event()
    real = loading.LLM

    def slow(*arguments: object, **options: object) -> LLM:
        begun.set()
        assert go.wait(PATIENCE)
        return real(*arguments, **options)

    monkeypatch.setattr(loading, "LLM", slow)
    everything = json.dumps({"version_policy": {"all": {}}})
    with ThreadPoolExecutor(1) as pool:
        loads = pool.submit(server.change, "small", config=everything)
        assert begun.wait(PATIENCE)
        assert server.ask("small").json()["choices"][0]["text"] == once
        assert server.states()["small/1"] == "LOADING"
        go.set()
        assert loads.result(PATIENCE).status_code == 200


def test_a_server_that_ends_does_not_wait_for_a_model(folder, monkeypatch):
    begun, go, ended = threading.Event(), threading.Event(), []
    real = loading.AsyncLLM

    def slow(llm: LLM) -> object:
        begun.set()
        assert go.wait(PATIENCE)
        engine = real(llm)
        ended.append(engine)
        return engine

    monkeypatch.setattr(loading, "AsyncLLM", slow)
    repository = Repository(folder, OPTIONS, Memory(ROOM), ())
    with ThreadPoolExecutor(2) as pool, RunningServer(None, ServerConfig(port=0), repository) as running:
        server = RepositoryServer(running)
        loads = [pool.submit(server.change, "small"), pool.submit(server.change, "small")]
        assert begun.wait(PATIENCE)
        running.stop()
        assert [one.result(PATIENCE).status_code for one in loads] == [503, 503]
    go.set()
    wait_until(lambda: ended and not ended[0].llm.engine.is_open)  # what came too late was closed
    assert running.models.loader.memory.free == ROOM


def test_random_changes_from_many_clients_leave_nothing_behind(start, once):
    """Loads, unloads and questions at once: each is answered with one of its statuses."""
    server = start(drain_seconds=0.2)
    allowed = {"load": {200, 400}, "unload": {200}, "ask": {200, 404, 503}, "index": {200}}
    seen, generator = [], random.Random(3)
    plan = [
        [generator.choice(["load", "load", "unload", "ask", "ask", "ask", "index"]) for _ in range(12)]
        for _ in range(4)
    ]

    def run(steps: list[str]) -> None:
        for number, step in enumerate(steps):
            if step == "ask":
                answer = server.ask(("small", "small/1", "small/2")[number % 3])
                if answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "length":
                    assert answer.json()["choices"][0]["text"] == once
            elif step == "index":
                answer = server.http.post("/v2/repository/index", json={"ready": True})
            else:
                policy = {"version_policy": {"specific": {"versions": [1 + number % 2]}}}
                answer = server.change("small", step, **({"config": json.dumps(policy)} if step == "load" else {}))
            seen.append((step, answer.status_code))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, plan))
    assert all(status in allowed[step] for step, status in seen), seen
    assert server.change("small", "unload").status_code == 200
    assert server.loader.memory.free == ROOM and not server.running.models.services
    assert server.change("small").status_code == 200 and server.ask("small").json()["choices"][0]["text"] == once


@pytest.mark.parametrize("seconds, reason", [(60.0, "length"), (0.0, "abort")], ids=["in time", "at the limit"])
def test_unloading_drains(start, seconds, reason):
    server = start(load=("small",), drain_seconds=seconds)
    engine = server.loader.services["small", "2"].engine
    reasons, begun = [], threading.Event()

    def stream() -> None:
        body = {"model": "small", "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.running.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                begun.set()
                if line.startswith("data: {"):
                    reasons.append(json.loads(line[6:])["choices"][0]["finish_reason"])

    if reason == "abort":
        engine.thread.pause()
        begun.set()
    client = threading.Thread(target=stream)
    client.start()
    assert begun.wait(PATIENCE)
    wait_until(lambda: engine.thread.streams or reasons)
    with ThreadPoolExecutor(1) as pool:
        unload = pool.submit(server.change, "small", "unload")
        wait_until(lambda: server.ask("small", max_tokens=1).status_code == 404)  # nothing new is taken
        engine.thread.resume()
        assert unload.result(PATIENCE).status_code == 200
    client.join(PATIENCE)
    assert reasons[-1] == reason and server.loader.memory.free == ROOM


def test_unloading_frees_the_weights_and_the_cache(start):
    server = start(load=("small",))
    llm = server.loader.services["small", "2"].llm
    seen = [weakref.ref(one) for one in (llm, llm.model, llm.engine.runner.cache)]
    del llm
    assert server.change("small", "unload").status_code == 200
    assert seen[1]() is None and seen[2]() is None  # whatever refers to the LLM
    wait_until(lambda: gc.collect() >= 0 and seen[0]() is None)


def test_two_models_answer_at_once_as_each_does_alone(start, folder, once):
    (folder / "large").mkdir()
    (folder / "large" / "1").symlink_to(zoo.bundled()["tinyworld"])
    server = start(load=("small", "large"))
    alone = {name: server.ask(name, max_tokens=60).json()["choices"] for name in ("small", "large")}
    with ThreadPoolExecutor(8) as pool:
        names = ["small", "large"] * 8
        together = list(pool.map(lambda name: server.ask(name, max_tokens=60).json()["choices"], names))
    assert together == [alone[name] for name in names] and alone["small"] != alone["large"]
