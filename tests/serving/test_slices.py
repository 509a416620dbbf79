"""Short time slices: of the threads that a token passes through, and of no other."""

from __future__ import annotations

import sys
import threading
import urllib.request

import pytest

from minillm import LLM
from minillm.engine import slices
from minillm.engine.async_llm import AsyncLLM
from minillm.engine.slices import SHORT, USUAL, ask_for_slices, slice_of_thread
from minillm.engine.thread import EngineThread
from minillm.serving.run import RunningServer
from tests.helpers.tiny import save_tiny_llama


def in_a_thread(function):
    """What `function` returns in a thread of its own: a wish lasts as long as its thread."""
    told = []
    started = threading.Thread(target=lambda: told.append(function()))
    started.start()
    started.join()
    return told[0]


@pytest.fixture(scope="module")
def usual() -> int:
    """What a thread has that asked for nothing, where the kernel tells."""

    def is_granted() -> bool:
        return ask_for_slices(SHORT) and slice_of_thread() == SHORT

    if not in_a_thread(is_granted):
        pytest.skip("slices are granted by Linux 6.12 and later")
    return slice_of_thread()


@pytest.fixture
def tiny_llm(tmp_path) -> LLM:
    save_tiny_llama(tmp_path)
    return LLM(tmp_path, device="cpu", dtype="float32", num_kv_blocks=20)


def test_a_thread_passes_its_slices_on_and_can_go_back(usual):
    def asked() -> list[int]:
        ask_for_slices()
        mine, child = slice_of_thread(), in_a_thread(slice_of_thread)
        ask_for_slices(USUAL)
        return [mine, child, slice_of_thread()]

    assert in_a_thread(asked) == [SHORT, SHORT, usual]
    assert slice_of_thread() == usual


def test_where_there_are_none_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(slices.platform, "machine", lambda: "vax")
    assert not ask_for_slices() and slice_of_thread() is None
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not ask_for_slices() and slice_of_thread() is None


def test_tokens_pass_through_threads_with_short_slices_and_the_engine_keeps_its_own(usual, tiny_llm):
    """Also where the thread that starts the engine has short ones, as an event loop has that loads a model."""

    def served() -> dict[str, int]:
        ask_for_slices()
        told, is_told = {}, threading.Event()
        with EngineThread(tiny_llm) as running:
            told["engine"] = running.call(slice_of_thread).result()
            running.pass_on(lambda: told.update(text=slice_of_thread()) or is_told.set())
            assert is_told.wait(60)
        return told

    assert in_a_thread(served) == {"engine": usual, "text": SHORT}


def test_the_event_loop_of_a_server_has_short_slices(usual, tiny_llm):
    engine, told = AsyncLLM(tiny_llm), []
    try:
        with RunningServer(engine) as server:
            server.server._loop.call_soon_threadsafe(lambda: told.append(slice_of_thread()))
            urllib.request.urlopen(f"{server.url}/version", timeout=60).close()
    finally:
        engine.shutdown()
    assert told == [SHORT]
