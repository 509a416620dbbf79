"""`minillm serve` as a process: signals under load, death and restart, and what its log keeps to itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from .conftest import MODEL, PATIENCE, wait_until

SECRET, PROMPT = "sk-not-for-any-log", "The purple elephant told nobody"


class Process:
    """A running `minillm serve`, its address and all that it has written."""

    def __init__(self, *options: str):
        command = ["minillm", "serve", MODEL, "--port", "0", "--device", "cpu", "--dtype", "float32"]
        environment = os.environ | {"MINILLM_API_KEY": SECRET, "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [*command, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self._reader.start()
        wait_until(lambda: self.url is not None or self.process.poll() is not None)
        assert self.url, self.log
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {SECRET}"}, timeout=PATIENCE)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str | None:
        found = re.search(r"serving .* at (http://\S+)", self.log)
        return found and found[1]

    def ask(self, **body: object) -> httpx.Response:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | body
        return self.http.post("/v1/completions", json=body)

    def stream(self, on_chunk: Callable[[], object] = lambda: None, **body: object) -> list[dict]:
        """The chunks until the stream ends."""
        body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True} | body
        chunks = []
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunks.append(json.loads(line[len("data: ") :]))
                    on_chunk()
        return chunks

    def end(self) -> int:
        """Wait for it, and for the last line of its log."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status


@contextmanager
def serving(*options: str) -> Iterator[Process]:
    process = Process(*options)
    try:
        yield process
    finally:
        process.process.kill()
        process.end()
        process.http.close()


def text_of(chunks: list[dict]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_killed_under_load_it_starts_again_with_its_prefixes(tmp_path: Path, llm):
    tier = ("--disk-kv-path", str(tmp_path / "blocks"), "--disk-kv-bytes", str(2**26), "--host-kv-bytes", str(2**18))
    prompt = [7 + place % 50 for place in range(400)]
    with serving(*tier, "--num-kv-blocks", "120") as first:
        whole = first.ask(prompt=prompt).json()
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for number in range(8):  # others take its blocks, so that they go to the disk
            first.ask(prompt=[100 + number, *prompt])
        wait_until(lambda: len(list((tmp_path / "blocks").iterdir())) >= 30)
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(first.stream, begun.release, max_tokens=400) for _ in range(4)]
            for _ in futures:
                assert begun.acquire(timeout=PATIENCE)
            first.process.send_signal(signal.SIGKILL)
            for future in futures:
                with pytest.raises(httpx.HTTPError):
                    future.result(PATIENCE)
        assert first.end() == -signal.SIGKILL
    with serving(*tier, "--num-kv-blocks", "120") as second:
        again = second.ask(prompt=prompt).json()
        assert again["choices"] == whole["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_sigterm_finishes_what_runs_and_takes_nothing_new(llm):
    with serving("--drain-seconds", "60") as process:
        expected = process.ask(max_tokens=450).json()["choices"][0]["text"]
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(process.stream, begun.set, max_tokens=450)
            assert begun.wait(PATIENCE)
            process.process.send_signal(signal.SIGTERM)
            chunks = future.result(PATIENCE)
        assert text_of(chunks) == expected and chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert process.end() in (0, -signal.SIGTERM)
        with pytest.raises(httpx.HTTPError):
            process.ask()
        log = process.log
    assert "POST /v1/completions" in log  # it has written of the requests
    assert "Traceback" not in log and "exception" not in log
    assert SECRET not in log and "elephant" not in log and expected[:20] not in log


def test_a_second_signal_ends_it():
    with serving("--drain-seconds", "600", "--max-num-seqs", "1") as process:
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(process.stream, begun.set, max_tokens=490, temperature=1, n=100)  # one after the other
            assert begun.wait(PATIENCE)
            process.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not answers(process.url))
            process.process.send_signal(signal.SIGTERM)
            assert process.end() in (0, -signal.SIGTERM)
            try:
                chunks = future.result(PATIENCE)
            except httpx.HTTPError:  # cut off, or ended with a last chunk
                chunks = []
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons.count("length") < 100


def answers(url: str) -> bool:
    """Whether a new connection is taken."""
    try:
        return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
    except httpx.HTTPError:
        return False
