"""Adapters behind HTTP: chosen by model=NAME, listed, loaded and unloaded while the server serves."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from minillm import LLM, AsyncLLM, LoRARequest, SamplingParams, zoo
from minillm.cli.serving import named_folder
from minillm.serving.config import ServerConfig
from minillm.serving.keys import Key
from minillm.serving.run import RunningServer
from tests.helpers.adapters import save_adapter
from tests.serving.conftest import MODEL, PATIENCE, settle, wait_until

ASK = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
NAMES = ("pirate", "poet")
OPENAI = {name: value for name, value in ASK.items() if name != "ignore_eos"} | {"extra_body": {"ignore_eos": True}}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(zoo.bundled()[MODEL], top / name, seed, size=3.0) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(LLM(MODEL, dtype="float32", device="cpu", num_kv_blocks=300, enable_lora=True, max_loras=2))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def said(engine, folders) -> dict[str, str]:
    """What the model and each adapter say, by the offline call."""
    adapters = [None, *(LoRARequest(name, 900 + at, folders[name]) for at, name in enumerate(NAMES))]
    outputs = engine.llm.generate([ASK["prompt"]] * 3, PARAMS, lora_request=adapters, use_tqdm=False)
    texts = {name: output.outputs[0].text for name, output in zip((MODEL, *NAMES), outputs)}
    assert len(set(texts.values())) == 3
    return texts


@pytest.fixture
def server(engine, folders) -> Iterator[RunningServer]:
    with RunningServer(engine, ServerConfig(port=0, load_adapters=True)) as server:
        yield server
    settle(engine)


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        yield http


def load(http: httpx.Client, name: str, folder: Path | str, **more) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)} | more)


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_an_adapter_is_a_model_of_its_own(server, http, folders, said):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert client.completions.create(model=MODEL, **OPENAI).choices[0].text == said[MODEL]
    with pytest.raises(openai.NotFoundError, match="'pirate' is not served"):
        client.completions.create(model="pirate", **OPENAI)
    for name in NAMES:
        answer = load(http, name, folders[name])
        assert answer.status_code == 200 and name in answer.text
    cards = {card.id: card for card in client.models.list().data}
    assert list(cards) == [MODEL, *NAMES]
    assert cards["poet"].parent == MODEL and cards["poet"].root == str(folders["poet"]) and cards[MODEL].parent is None
    assert client.models.retrieve("pirate").parent == MODEL
    for name in (*NAMES, MODEL):
        answer = client.completions.create(model=name, **OPENAI)
        assert answer.choices[0].text == said[name] and answer.model == name
        pieces = list(client.completions.create(model=name, stream=True, **OPENAI))
        assert "".join(piece.choices[0].text for piece in pieces) == said[name] and pieces[0].model == name
    message = [{"role": "user", "content": "Hello"}]
    chats = [
        client.chat.completions.create(model=name, messages=message, max_tokens=8, temperature=0) for name in NAMES
    ]
    assert len({chat.choices[0].message.content for chat in chats}) == 2
    assert http.post("/tokenize", json={"model": "poet", "prompt": "a"}).status_code == 200


def test_metrics_tell_adapters_apart(http, folders, said):
    load(http, "pirate", folders["pirate"])
    assert http.post("/v1/completions", json=ASK | {"model": "pirate"}).status_code == 200
    wait_until(lambda: 'adapter="pirate"' in http.get("/metrics").text)
    text = http.get("/metrics").text
    assert any('adapter="pirate"' in line and "request_success" in line for line in text.splitlines())
    assert 'vllm:lora_requests_info{max_lora="2"' in text


def test_unloading_lets_requests_end_and_frees_the_name(http, engine, folders, said):
    load(http, "pirate", folders["pirate"])
    with http.stream(
        "POST", "/v1/completions", json=ASK | {"model": "pirate", "stream": True, "max_tokens": 150}
    ) as one:
        lines = one.iter_lines()
        next(lines)
        assert unload(http, "pirate").status_code == 200
        rest = "\n".join(lines)
    assert '"finish_reason":"length"' in rest.replace(" ", "")
    assert http.post("/v1/completions", json=ASK | {"model": "pirate"}).status_code == 404
    assert unload(http, "pirate").status_code == 404
    load(http, "pirate", folders["poet"])
    assert http.post("/v1/completions", json=ASK | {"model": "pirate"}).json()["choices"][0]["text"] == said["poet"]
    again = load(http, "pirate", folders["pirate"])
    assert again.status_code == 400 and again.json()["error"]["param"] == "lora_name"
    assert load(http, "pirate", folders["pirate"], load_inplace=True).status_code == 200
    assert http.post("/v1/completions", json=ASK | {"model": "pirate"}).json()["choices"][0]["text"] == said["pirate"]


def test_a_broken_folder_is_answered_with_the_reason_and_disturbs_nothing(http, folders, said, tmp_path):
    load(http, "poet", folders["poet"])
    truncated = tmp_path / "truncated"
    shutil.copytree(folders["poet"], truncated)
    file = truncated / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for name, folder, told in (
        ("a", truncated, "is damaged"),
        ("a", tmp_path / "nowhere", "is not a folder"),
        ("a", "/dev/null", "is not a folder"),
        ("a", "\0", "lora_path"),
        (MODEL, folders["poet"], "is the name of the model"),
    ):
        answer = load(http, name, folder)
        assert answer.status_code == 400 and told in answer.json()["error"]["message"], answer.text
    broken = load(http, "poet", truncated, load_inplace=True)
    assert broken.status_code == 400 and broken.json()["error"]["param"] == "lora_path"
    assert http.post("/v1/completions", json=ASK | {"model": "poet"}).json()["choices"][0]["text"] == said["poet"]
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [MODEL, "poet"]
    assert http.post("/v1/load_lora_adapter", json={"lora_name": "x"}).status_code == 400


def test_adapters_come_and_go_under_load(server, engine, folders, said):
    """Clients ask without a pause while another one loads and unloads: each answer is right, or says 404."""
    wrong, done, counts = [], threading.Event(), {200: 0, 404: 0}

    def ask(name: str) -> None:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            while not done.is_set():
                answer = http.post("/v1/completions", json=ASK | {"model": name})
                counts[answer.status_code] += 1
                if answer.status_code == 200 and answer.json()["choices"][0]["text"] != said[name]:
                    wrong.append((name, answer.json()))

    threads = [threading.Thread(target=ask, args=(name,)) for name in (MODEL, *NAMES)]
    for thread in threads:
        thread.start()
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        for _ in range(6):
            for name in NAMES:
                assert load(http, name, folders[name]).status_code == 200
            assert http.post("/v1/completions", json=ASK | {"model": "poet"}).status_code == 200
            for name in NAMES:
                assert unload(http, name).status_code == 200
    done.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong and counts[200] > 0


def test_loading_needs_the_flag_and_a_key_that_may(engine, folders, said):
    with (
        RunningServer(engine, ServerConfig(port=0, adapters=(("poet", str(folders["poet"])),))) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as http,
    ):
        answer = load(http, "pirate", folders["pirate"])
        assert answer.status_code == 403 and "--enable-lora" in answer.json()["error"]["message"]
        assert unload(http, "poet").status_code == 403
        assert http.post("/v1/completions", json=ASK | {"model": "poet"}).json()["choices"][0]["text"] == said["poet"]
    keys = (Key("secret-secret-secret", admin=False),)
    with (
        RunningServer(engine, ServerConfig(port=0, load_adapters=True, keys=keys)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as http,
    ):
        assert load(http, "pirate", folders["pirate"]).status_code == 401
        http.headers["Authorization"] = "Bearer secret-secret-secret"
        assert load(http, "pirate", folders["pirate"]).status_code == 403
    settle(engine)


def test_the_command_line_names_folders():
    assert named_folder("pirate=a/b=c") == ("pirate", "a/b=c")
    for given in ("pirate", "=x", "x="):
        with pytest.raises(ValueError, match="NAME=FOLDER"):
            named_folder(given)


def test_the_async_engine_takes_adapters(engine, folders, said):
    async def run() -> None:
        request = LoRARequest("pirate", 5, folders["pirate"])
        assert await engine.add_lora(request) and not await engine.add_lora(request)
        assert 5 in await engine.list_loras() and await engine.pin_lora(5)
        outputs = [one async for one in engine.generate(ASK["prompt"], PARAMS, lora_request=request)]
        assert outputs[-1].outputs[0].text == said["pirate"] and outputs[-1].lora_request == request
        assert await engine.remove_lora(5) and not await engine.remove_lora(5)

    asyncio.run(run())
