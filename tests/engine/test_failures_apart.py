"""What fails ends the requests it belongs to, and the caller is told: drafters, grammars, waits in a callback."""

from __future__ import annotations

import threading

import pytest

from minillm import SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.engine.thread import EngineThread
from minillm.speculative.drafter import Draft
from tests.engine.test_engine_outside import ANOTHER, PATIENCE, PROMPT, alone, folder, make, params

__all__ = ["folder"]  # the fixture


def ask(name: str, **wanted) -> Request:
    return Request(name, PROMPT["prompt_token_ids"], SamplingParams(temperature=0.0, max_tokens=4, **wanted), 4)


class FailsOnce:
    """Drafts nothing, and fails the first time it is asked about a text that begins with `token_id`."""

    def __init__(self, token_id: int):
        self.token_id, self.failed = token_id, False

    def propose(self, requests, counts):
        if not self.failed and any(request.token_ids[0] == self.token_id for request in requests):
            self.failed = True
            raise RuntimeError("the drafter is broken")
        return [Draft([]) for _ in requests]

    def forget(self, request_id):
        pass


def test_a_drafter_that_fails_ends_the_requests_that_it_drafts_for(folder):
    llm = make(folder)
    llm.engine = Engine(llm.model, drafter=FailsOnce(PROMPT["prompt_token_ids"][0]), kv_cache=llm.engine.kv_cache)
    drafted = llm.submit(PROMPT, params(8))
    waiting = llm.submit(ANOTHER, params(8))
    waiting.request.takes_drafts = False
    llm.step()
    with pytest.raises(RuntimeError, match="the drafter is broken"):
        llm.step()
    assert drafted.is_finished and isinstance(drafted.error, RuntimeError)
    assert not waiting.is_finished
    while llm.step():
        pass
    assert [waiting.output().outputs[0].token_ids] == alone(folder, ANOTHER, params(8))
    assert [one.token_ids for one in llm.generate(PROMPT, params(8), use_tqdm=False)[0].outputs] == alone(
        folder, PROMPT, params(8)
    )


def test_an_engine_without_grammars_refuses_a_request_that_asks_for_one(folder):
    llm = make(folder)
    engine = Engine(llm.model, kv_cache=llm.engine.kv_cache)
    plain = ask("plain")
    engine.add_request(plain)
    guided = ask("guided", structured_outputs={"choice": ["a", "b"]})
    with pytest.raises(
        ValueError, match=r"request guided asks for structured_outputs=.* use LLM, or engine.use_grammars"
    ):
        engine.add_request(guided)
    while engine.has_unfinished:
        engine.step()
    assert plain.finish_reason == "length"


def test_a_grammar_that_cannot_be_made_ready_ends_its_own_request(folder):
    llm = make(folder)

    def broken(given):
        raise OSError("no compiler here")

    engine = Engine(llm.model, kv_cache=llm.engine.kv_cache)
    engine.use_grammars(broken)
    plain, guided = ask("plain"), ask("guided", structured_outputs={"choice": ["a", "b"]})
    engine.add_request(plain), engine.add_request(guided)
    while engine.has_unfinished:
        engine.step()
    assert plain.finish_reason == "length"
    assert guided.finish_reason == "error" and "no compiler here" in guided.error


@pytest.mark.parametrize("method", ["drain", "pause"])
@pytest.mark.parametrize("where", ["callback", "call"])
def test_a_wait_for_the_own_thread_is_refused(folder, method, where):
    told: list[BaseException] = []
    done = threading.Event()
    with EngineThread(make(folder)) as thread:

        def wait(*_):
            try:
                getattr(thread, method)()
            except RuntimeError as error:
                told.append(error)
            done.set()

        if where == "call":
            thread.call(wait)
        else:
            thread.submit(PROMPT, params(2), on_delta=wait)
        refused = done.wait(PATIENCE)
        thread.resume()
    if where == "callback" and method == "pause":  # the text thread waits for another one, which answers
        assert refused and not told
    else:
        assert refused and f"{method}() would wait for the thread that it is called in" in str(told[0])
