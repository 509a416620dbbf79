"""The server that is measured: any URL with OpenAI's API, or one that is started for the run. Built in chapter 24."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

START_SECONDS, STOP_SECONDS = 300.0, 20.0
PR_SET_PDEATHSIG = 1
CLI = "from minillm.cli import app; app()"


@dataclass(frozen=True)
class Target:
    """Where requests go, and what is known of the model there."""

    url: str  # up to and without /v1
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    max_model_len: int | None = None  # None where the server does not tell
    root: str = ""  # the folder or name of the model's files, where the server tells

    def endpoint(self, chat: bool) -> str:
        return f"{self.url}/v1/{'chat/completions' if chat else 'completions'}"


def find(url: str, model: str | None = None, api_key: str | None = None) -> Target:
    """The model at `url`, as its /v1/models tells. Raises ValueError where `url` is no URL, it is not served, or there
    is a choice; OSError where no server answers, or it refuses."""
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url={url!r} is not a URL; it begins with http:// or https://")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=30) as answer:
            cards = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        hint = "; give its key with --api-key" if error.code in (401, 403) else ""
        raise OSError(f"{url}/v1/models answered {error.code} {error.reason}{hint}") from None
    except urllib.error.URLError as error:
        raise OSError(f"no server answers at {url}: {error.reason}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{url}/v1/models is no list of models; is it a server with OpenAI's API?") from None
    by_name = {card["id"]: card for card in cards}
    if model is None and len(by_name) != 1:
        raise ValueError(f"{url} serves {len(by_name)} models; choose one with --model: {', '.join(by_name)}")
    model = model or next(iter(by_name))
    card = by_name.get(model, {})
    return Target(url, model, headers, card.get("max_model_len"), card.get("root") or "")


@contextmanager
def own_server(
    model: str, options: Sequence[str] = (), on_start: Callable[[int], object] = lambda pid: None
) -> Iterator[Target]:
    """`minillm serve` in a process of its own on a free port, until the block ends; `on_start` hears its id."""

    def ready(log: str) -> str | None:
        found = re.search(r"serving .* at (http://\S+)", log)
        return found and found[1]

    command = [sys.executable, "-c", CLI, "serve", model, "--port", "0", "--no-access-log", *options]
    with server_process(command, ready, on_start=on_start) as url:
        yield find(url)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block like an exception, so that nothing that was started is left behind."""
    if threading.current_thread() is not threading.main_thread():  # only that one may take signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _dies_with_us() -> Callable[[], object] | None:
    """For a new process: the kernel kills it when this one dies, also of SIGKILL, and also where it stands still. Only
    Linux can."""
    if sys.platform != "linux":
        return None
    return partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def server_process(
    command: Sequence[str],
    ready: Callable[[str], str | None],
    environment: dict[str, str] | None = None,
    on_start: Callable[[int], object] = lambda pid: None,
) -> Iterator[str]:
    """Run a server until the block ends; gives its URL, which `ready` tells from what it has written so far, or None
    before it is there. `on_start` hears the id of the process, which leads a group of its own. Raises RuntimeError,
    with its last words, where it ends or is not there within START_SECONDS."""
    with tempfile.TemporaryFile() as log, ended_by_sigterm():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=(os.environ if environment is None else environment) | {"COLUMNS": "1000"},
            start_new_session=True,  # Ctrl-C is for the client; the server is told below
            preexec_fn=_dies_with_us(),  # noqa: PLW1509 (a call of the kernel, which takes no lock)
        )

        def written() -> str:
            return os.pread(log.fileno(), 2**20, 0).decode("utf-8", "replace")

        try:
            on_start(process.pid)
            deadline = time.monotonic() + START_SECONDS
            while not (url := ready(written())):
                if process.poll() is not None or time.monotonic() > deadline:
                    last = " ".join(written().split())[-500:]
                    raise RuntimeError(f"{' '.join(command[:4])} did not start: {last or 'it wrote nothing'}")
                time.sleep(0.1)
            yield url
        finally:
            try:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGCONT)  # it may have been paused
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
            finally:  # also where a second Ctrl-C ends the waiting; what the server started ends with it
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
