"""What the server's tests share: one small engine, and servers on free ports that leave nothing behind in it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from minillm import AsyncLLM, SamplingParams, zoo
from minillm.engine.llm import LLM
from minillm.serving.config import ServerConfig
from minillm.serving.memory import Memory
from minillm.serving.repository import Repository
from minillm.serving.run import RunningServer

PATIENCE = 60.0  # seconds after which a wait counts as a hang
MODEL = "tinyworld-draft"
OPTIONS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8}  # of the models of a repository
ROOM = 200_000_000  # bytes: enough for several small models
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
CONVERSATION = [{"role": "user", "content": "What does a cow say?"}]


@pytest.fixture(scope="package")
def llm() -> LLM:
    return LLM(MODEL, dtype="float32", device="cpu", num_kv_blocks=600, max_num_seqs=64)


@pytest.fixture(scope="package")
def engine(llm) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(llm)
    yield engine
    engine.shutdown()


@pytest.fixture
def serve(engine) -> Iterator[Callable[..., RunningServer]]:
    """Starts a server with this configuration. After the test the engine holds nothing of any request."""
    with ExitStack() as stack:
        yield lambda **config: stack.enter_context(RunningServer(engine, ServerConfig(port=0, **config)))
    settle(engine)


@pytest.fixture(scope="module")
def server(engine) -> Iterator[RunningServer]:
    with RunningServer(engine) as server:
        yield server
        settle(engine)
        assert not server.service.calls and server.service.gate.num_requests == server.service.gate.num_tokens == 0


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def http(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        yield http


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium) -> Iterator[Callable[..., object]]:
    """Opens a server's page as a new visitor. At the end no page has logged an error."""
    contexts, problems = [], []

    def visit(server: RunningServer, is_let_in: bool = True, **options: object):
        contexts.append(chromium.new_context(**{"viewport": {"width": 1280, "height": 800}} | options))
        page = contexts[-1].new_page()
        page.set_default_timeout(1000 * PATIENCE)
        page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.url)
        if is_let_in:
            page.wait_for_selector("#room-state.live")
            page.wait_for_selector("#model option", state="attached")
        page.problems = problems
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []


def settle(engine: AsyncLLM) -> None:
    """Wait until nothing is under way, and check what is left: no request, no block that is owned."""
    wait_until(lambda: not engine.thread.streams and not engine.llm.engine.has_unfinished)
    engine.llm.engine.scheduler.check_integrity()
    pool = engine.llm.engine.kv_cache.pool
    assert pool.num_free == pool.num_blocks


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class RepositoryServer:
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
def folder(tmp_path: Path) -> Path:
    """small/1 and small/2 are the same model, a copy and a link; broken/1 has no weights."""
    root = tmp_path / "models"
    shutil.copytree(zoo.bundled()[MODEL], root / "small" / "1")
    (root / "small" / "2").symlink_to(zoo.bundled()[MODEL])
    (root / "broken" / "1").mkdir(parents=True)
    shutil.copy(root / "small" / "1" / "config.json", root / "broken" / "1")
    return root


@pytest.fixture
def start(folder) -> Iterator[Callable[..., RepositoryServer]]:
    """Starts a server of that folder; the memory is in bytes."""
    with ExitStack() as stack:

        def begin(load: tuple[str, ...] | None = (), memory: int = ROOM, keys=(), **config: object) -> RepositoryServer:
            repository = Repository(folder, OPTIONS, Memory(memory), load)
            config = ServerConfig(port=0, keys=keys, **config)
            running = stack.enter_context(RunningServer(None, config, repository))
            wait_until(lambda: not running.models.is_loading)
            return RepositoryServer(running)

        yield begin


@pytest.fixture(scope="package")
def once(llm) -> str:
    [output] = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return output.outputs[0].text
