"""A model repository: models come and go over HTTP, and disturb no other."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from minillm import LLM, SamplingParams, zoo
from minillm.serving import loading
from minillm.serving.config import ServerConfig
from minillm.serving.keys import Key
from minillm.serving.memory import Memory, Needs, NoRoom, needs_of, parse_bytes
from minillm.serving.repository import Repository, UnknownModel
from minillm.serving.run import RunningServer

from .conftest import MODEL, PATIENCE, wait_until
from .test_metrics import scraped

OPTIONS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8}
ROOM = 200_000_000  # bytes: enough for several small models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """small/1 and small/2 are the same model, a copy and a link; broken/1 has no weights."""
    root = tmp_path / "models"
    shutil.copytree(zoo.bundled()[MODEL], root / "small" / "1")
    (root / "small" / "2").symlink_to(zoo.bundled()[MODEL])
    (root / "broken" / "1").mkdir(parents=True)
    shutil.copy(root / "small" / "1" / "config.json", root / "broken" / "1")
    return root


class Server:
    """A running server of a repository and a client of it."""

    def __init__(self, running: RunningServer, **headers: str):
        self.running, self.loader = running, running.models.loader
        self.http = httpx.Client(base_url=running.url, timeout=PATIENCE, headers=headers)

    def change(self, name: str, what: str = "load", **parameters: object) -> httpx.Response:
        return self.http.post(f"/v2/repository/models/{name}/{what}", json={"parameters": parameters})

    def ask(self, model: str | None, **body: object) -> httpx.Response:
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0} | body
        return self.http.post("/v1/completions", json=body)

    def states(self) -> dict[str, str]:
        found = self.http.post("/v2/repository/index").json()
        return {f"{one['name']}/{one['version']}": one["state"] for one in found}


@pytest.fixture
def start(folder) -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:

        def begin(load: tuple[str, ...] | None = (), memory: int = ROOM, keys=(), **config: object) -> Server:
            repository = Repository(folder, OPTIONS, Memory(memory), load)
            config = ServerConfig(port=0, keys=keys, **config)
            running = stack.enter_context(RunningServer(None, config, repository))
            wait_until(lambda: not running.models.is_loading)
            return Server(running)

        yield begin


@pytest.fixture(scope="module")
def expected(llm) -> str:
    [output] = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return output.outputs[0].text


def test_a_model_is_loaded_asked_by_both_names_and_unloaded(start, expected):
    server = start()
    assert server.ask("small").status_code == 404 and server.ask(None).status_code == 400
    assert server.change("small").json() == {}
    answers = [server.ask(name).json() for name in ("small", "small/2", None)]
    assert [one["choices"][0]["text"] for one in answers] == [expected] * 3
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


def test_a_broken_folder_is_refused_and_the_others_go_on(start, folder, expected):
    weights = (folder / "small" / "1" / "model.safetensors").read_bytes()
    broken = {
        "no_config": {"model.safetensors": weights},
        "not_json": {"config.json": b"{"},
        "list": {"config.json": b"[]"},
        "cut": {"model.safetensors": weights[: len(weights) // 2]},
        "noise": {"model.safetensors": bytes(range(256)) * 40},
        "no_tokenizer": {"tokenizer.json": b"null"},
        "huge": {
            "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**9}).encode()
        },
        "negative": {"config.json": b'{"architectures": ["LlamaForCausalLM"], "vocab_size": -3, "hidden_size": "x"}'},
    }
    for name, files in broken.items():
        target = folder / name / "1"
        if name == "no_config":
            target.mkdir(parents=True)
        else:
            shutil.copytree(folder / "small" / "1", target)
        for file, content in files.items():
            (target / file).write_bytes(content)
    server = start(load=None)  # all: the broken ones are logged, and the server begins
    assert server.ask("small").json()["choices"][0]["text"] == expected
    held = server.loader.memory.free
    for name in ("broken", *broken):
        answer = server.change(name)
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert f"{name}/1 cannot be loaded: " in error["message"] and str(folder) not in error["message"]
    assert server.loader.memory.free == held
    assert server.states() == {"small/1": "UNAVAILABLE", "small/2": "READY", "broken/1": "UNAVAILABLE"} | {
        f"{name}/1": "UNAVAILABLE" for name in broken
    }
    reasons = {one["name"]: one["reason"] for one in server.http.post("/v2/repository/index").json()}
    assert all("cannot be loaded" in reasons[name] for name in broken)
    assert server.ask("small").json()["choices"][0]["text"] == expected


def test_a_name_cannot_leave_the_repository(start, folder, tmp_path):
    outside = tmp_path / "outside" / "1"
    shutil.copytree(folder / "small" / "1", outside)
    (folder / "link").symlink_to(outside.parent)
    (folder / "inner").mkdir()
    (folder / "inner" / "1").symlink_to(outside)
    shutil.copytree(folder / "small" / "1", folder / "file" / "1")
    (folder / "file" / "1" / "config.json").unlink()
    (folder / "file" / "1" / "config.json").symlink_to(outside / "config.json")
    (folder / "loop").mkdir()
    (folder / "loop" / "1").symlink_to(folder / "loop" / "1")
    shutil.copytree(folder / "small" / "1", folder / "pipe" / "1")
    (folder / "pipe" / "1" / "model.safetensors").unlink()
    os.mkfifo(folder / "pipe" / "1" / "model.safetensors")  # reading it never ends
    server = start()
    assert "neither a file nor a folder" in server.change("pipe").json()["error"]["message"]
    for name in ("link", "inner", "file"):
        answer = server.change(name)
        assert answer.status_code == 400 and "leads out of the repository" in answer.json()["error"]["message"], name
    for name in (
        "..",
        ".",
        "%2e%2e",
        "..%2foutside",
        "%2fetc",
        "small%2f1",
        "small%00",
        "small%0a",
        "~",
        "*",
        "a" * 300,
    ):
        for what in ("load", "unload"):
            assert server.change(name, what).status_code in (400, 404, 405), name
    assert server.change("loop").status_code == 404  # no folder
    assert server.states()["small/2"] == "UNAVAILABLE"
    assert Repository(folder, follow_links=True).folder("inner", "1").samefile(outside)


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


def test_the_loop_serves_others_while_a_model_is_read(start, monkeypatch, expected):
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
        assert server.ask("small").json()["choices"][0]["text"] == expected
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
        server = Server(running)
        loads = [pool.submit(server.change, "small"), pool.submit(server.change, "small")]
        assert begun.wait(PATIENCE)
        running.stop()
        assert [one.result(PATIENCE).status_code for one in loads] == [503, 503]
    go.set()
    wait_until(lambda: ended and not ended[0].llm.engine.is_open)  # what came too late was closed
    assert running.models.loader.memory.free == ROOM


def test_random_changes_from_many_clients_leave_nothing_behind(start, expected):
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
                    assert answer.json()["choices"][0]["text"] == expected
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
    assert server.change("small").status_code == 200 and server.ask("small").json()["choices"][0]["text"] == expected


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


def test_what_does_not_fit_is_refused_with_the_numbers(start, folder):
    needs = needs_of(folder / "small" / "1", OPTIONS)
    server = start(memory=needs.least + needs.weights)
    assert server.change("small").status_code == 200
    (folder / "other").mkdir()
    (folder / "other" / "1").symlink_to(folder / "small" / "1")
    answer = server.change("other")
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_room"
    assert f"{needs.weights / 1e6:.1f} MB for its weights" in message and "held: small/2" in message
    assert server.change("small", "unload").status_code == 200 and server.change("other").status_code == 200


def test_two_models_answer_at_once_as_each_does_alone(start, folder, expected):
    (folder / "large").mkdir()
    (folder / "large" / "1").symlink_to(zoo.bundled()["tinyworld"])
    server = start(load=("small", "large"))
    alone = {name: server.ask(name, max_tokens=60).json()["choices"] for name in ("small", "large")}
    with ThreadPoolExecutor(8) as pool:
        names = ["small", "large"] * 8
        together = list(pool.map(lambda name: server.ask(name, max_tokens=60).json()["choices"], names))
    assert together == [alone[name] for name in names] and alone["small"] != alone["large"]


def test_memory_is_shared_out():
    memory, needs = Memory(1000, share=0.4), Needs(weights=100, block=10, least_blocks=5, most_blocks=1000)
    assert memory.take("a", needs) == 30  # 400: a share
    assert memory.take("b", Needs(500, 10, 5, 1000)) == 5  # more than its share, and no more than it needs
    with pytest.raises(NoRoom, match=r"c needs 0\.0 MB .* raise --memory"):
        memory.take("c", needs)
    assert memory.free == 50
    memory.give_back("a")
    assert memory.take("c", Needs(100, 10, 5, 7)) == 7 and memory.free == 280  # no more than its steps could fill
    assert [parse_bytes(text) for text in ("7", "2 KB", "1.5GiB")] == [7, 2000, 3 * 2**29]
    for wrong in ("", "GB", "-1", "5 parsecs", "nan"):
        with pytest.raises(ValueError, match="memory="):
            parse_bytes(wrong)


def test_the_cache_of_a_model_has_the_size_that_was_taken(start):
    server = start(load=("small",))
    pool = server.loader.services["small", "2"].llm.engine.kv_cache.pool
    needs = needs_of(server.loader.repository.folder("small", "2"), OPTIONS)
    assert ROOM - server.loader.memory.free == needs.weights + pool.num_blocks * needs.block <= ROOM / 4


def test_changes_need_a_key_that_may(start):
    server = start(keys=(Key("sk-user"), Key("sk-admin", admin=True)))
    statuses = {}
    for key in ("none", "sk-user", "sk-admin"):
        server.http.headers["Authorization"] = f"Bearer {key}"
        statuses[key] = [server.change("small", what).status_code for what in ("load", "unload")]
        statuses[key].append(server.http.post("/v2/repository/index").status_code)
    assert statuses == {"none": [401] * 3, "sk-user": [403, 403, 200], "sk-admin": [200] * 3}


def test_a_repository_lists_names_and_numbers_only(folder):
    for odd in (".hidden", "with space", "café"):
        (folder / odd / "1").mkdir(parents=True)
    for odd in ("0", "01", "v1", "1.5", "-1"):
        (folder / "small" / odd).mkdir()
    (folder / "small" / "3").write_text("a file")
    (folder / "small" / "10").mkdir()
    repository = Repository(folder)
    assert repository.names() == ["broken", "small"] and repository.versions("small") == ["1", "2", "10"]
    with pytest.raises(UnknownModel, match="'other'; it has broken, small"):
        repository.versions("other")
    with pytest.raises(ValueError, match="is no folder"):
        Repository(folder / "nothing")
