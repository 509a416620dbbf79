"""Where requests are made: short ones in the event loop, which never waits for a tokenizer; others in a thread."""

from __future__ import annotations

import threading

import httpx
import pytest

from minillm.serving.service import Service

from .conftest import CONVERSATION, MODEL, PATIENCE

BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
LOOP = "http"  # the name of the server's thread
SLOW = {
    "a long text": {"prompt": "Once upon a time. " * 60},
    "many ids": {"prompt": [5] * 1025},  # more than the model takes
    "several prompts": {"prompt": ["Once", "Twice"]},
    "a grammar": {"structured_outputs": {"choice": ["yes", "no"]}},
    "a format": {"response_format": {"type": "json_object"}},
    "words": {"bad_words": ["cow"]},
    "ids": {"allowed_token_ids": [5, 6, 7]},
}


@pytest.fixture
def made_by(serve, monkeypatch):
    """A server that has made a request before, a client, and the names of the threads that make requests."""
    names, make = [], Service._make

    def noted(self, *args):
        names.append(threading.current_thread().name)
        return make(self, *args)

    monkeypatch.setattr(Service, "_make", noted)
    server = serve()
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        first = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        yield server, http, first, names


def test_a_short_prompt_is_made_ready_in_the_loop_but_for_the_first(made_by):
    _, http, first, names = made_by
    again = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    ids = http.post("/v1/completions", json=BODY | {"prompt": [5, 6, 7]})
    assert ids.status_code == 200 and again == first
    assert names[0] != LOOP and names[1:] == [LOOP, LOOP]


@pytest.mark.parametrize("fields", SLOW.values(), ids=SLOW)
def test_what_may_take_longer_is_made_in_a_thread(made_by, fields):
    _, http, _, names = made_by
    status = 400 if fields == SLOW["many ids"] else 200
    assert http.post("/v1/completions", json=BODY | fields).status_code == status
    assert len(names) == 2 and LOOP not in names


def test_a_conversation_is_made_in_a_thread(made_by):
    _, http, _, names = made_by
    body = {"model": MODEL, "messages": CONVERSATION, "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert len(names) == 2 and LOOP not in names


def test_the_loop_goes_on_while_a_thread_has_the_tokenizer(made_by):
    server, http, first, names = made_by
    answers = []
    asking = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=BODY).json()))
    with server.service.llm.inputs.lock:
        asking.start()
        while len(names) < 2:  # its thread waits for the tokenizer
            assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
        assert not answers
    asking.join(PATIENCE)
    assert answers[0]["choices"][0]["text"] == first and names[1] != LOOP


def test_a_short_prompt_that_is_wrong_is_refused_and_gives_its_place_back(made_by):
    server, http, _, names = made_by
    answer = http.post("/v1/completions", json=BODY | {"prompt": [10**6]})
    assert answer.status_code == 400 and "token id 1000000" in answer.json()["error"]["message"]
    assert names[1:] == [LOOP] and not server.service.gate.num_requests
