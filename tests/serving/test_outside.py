"""Requests found by trying random ones: each is refused by name at once, and holds up no other."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from minillm import zoo
from minillm.bench.load.events import read_answer
from minillm.serving.adapters import ServedAdapters
from minillm.serving.config import ServerConfig
from minillm.serving.keys import Key

from .conftest import CONVERSATION, MODEL, PATIENCE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
MESSAGES = {"model": MODEL, "messages": CONVERSATION, "max_tokens": 2}
SURROGATE = "\ud800"
QUICK = 2.0  # seconds; unrefused, each of the slow ones takes from ten seconds to hours


def nested(depth: int) -> list:
    inside: list = []
    for _ in range(depth):
        inside = [inside]
    return inside


def constrained(**rule: object) -> dict:
    return {"structured_outputs": rule}


def asked_by(**message: object) -> dict:
    return {"messages": [{"role": "assistant", "content": "x"} | message]}


CALL = {"function": {"name": "f", "arguments": "[" * 100_000}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": nested(500)}}}
DEEP_GRAMMAR = "root ::= " + "(" * 3000 + "'a'" + ")" * 3000


@pytest.mark.parametrize("name", ["the path of a file", "~no_such_user/x", "x" * 5000, "a\0b", "{{ 'a' }}", ""])
def test_a_request_brings_no_chat_template(http, name):
    """A template is a program, and the path of one would let a client read the files of this machine."""
    given = str(zoo.bundled()[MODEL] / "config.json") if name == "the path of a file" else name
    answer = http.post(CHAT, json=MESSAGES | {"chat_template": given})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template"
    answer = http.post(CHAT, json=MESSAGES | {"chat_template_kwargs": {"chat_template": given}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    "path, wrong, param",
    [
        (CHAT, asked_by(tool_calls=[CALL]), "messages"),
        (CHAT, asked_by(tool_calls=5), "messages"),
        (CHAT, asked_by(tool_calls=[{"function": {"name": "f", "arguments": "9" * 5000}}]), "messages"),
        (CHAT, asked_by(tool_call_id=nested(500)), None),
        (CHAT, asked_by(content=SURROGATE), "messages"),
        (CHAT, {"tools": [TOOL]}, None),
        (COMPLETIONS, constrained(grammar=DEEP_GRAMMAR), None),
        (COMPLETIONS, constrained(grammar=SURROGATE), "grammar"),
        (COMPLETIONS, {"bad_words": [SURROGATE]}, "bad_words"),
        (COMPLETIONS, {"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_odd_values_are_the_fault_of_the_client(http, path, wrong, param):
    content = json.dumps((PROMPT if path == COMPLETIONS else MESSAGES) | wrong)  # httpx sends no lone surrogate itself
    answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
    "wrong, words",
    [
        (constrained(json={"type": "integer", "multipleOf": 999_983}), "multipleOf"),
        (constrained(json={"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}), "multipleOf"),
        (constrained(grammar='start: %json {"type": "integer", "multipleOf": 999983}'), "multipleOf"),
        (constrained(choice=[str(number) * 30 for number in range(20_000)]), "shorter choices"),
        ({"prompt": "a" * 3_000_000}, "characters"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_would_take_long_is_refused_at_once(http, wrong, words):
    began = time.monotonic()
    answer = http.post(COMPLETIONS, json=PROMPT | wrong, timeout=5)
    assert answer.status_code == 400 and words in answer.text
    assert time.monotonic() - began < QUICK


def test_an_empty_host_does_not_listen_on_every_network():
    with pytest.raises(ValueError, match="host=''"):
        ServerConfig(host="")


@pytest.mark.parametrize("value", [" sk-1", "sk-1\n", "sk-\u00e9"])
def test_a_key_that_no_header_can_carry_is_refused(value):
    with pytest.raises(ValueError, match="a key has") as refused:
        Key(value)
    assert value.strip() not in str(refused.value)


def test_an_unloaded_adapter_leaves_nothing_of_its_name():
    adapters = ServedAdapters(Mock(), MODEL, may_load=True)

    async def come_and_go() -> None:
        for number in range(3):
            await adapters.load(f"adapter {number}", "folder")
            await adapters.unload(f"adapter {number}")

    asyncio.run(come_and_go())
    assert not adapters.known and not adapters._created


@pytest.mark.parametrize(
    "event", [5, None, [], {"choices": 5}, {"choices": [5]}, {"usage": {"completion_tokens": "x"}}]
)
def test_a_load_run_survives_a_server_that_answers_in_another_form(event):
    answer = read_answer([(1.0, f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())])
    assert "OpenAI" in answer.error and answer.is_done


def test_a_long_list_of_bad_words_is_refused(http):
    answer = http.post(COMPLETIONS, json=PROMPT | {"bad_words": ["e"] * 1025})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "bad_words"
    assert http.post(COMPLETIONS, json=PROMPT | {"bad_words": ["e"] * 1024}).status_code == 200


def test_tokenize_waits_for_no_request_and_no_request_for_it(http, llm):
    """A text there may have any length, and a tokenizer serves one thread at a time."""
    with ThreadPoolExecutor(1) as other:
        held, given_back = threading.Event(), threading.Event()

        def hold() -> None:
            with llm.inputs.lock:
                held.set()
                given_back.wait(PATIENCE)

        http.post("/tokenize", json={"prompt": "Once"})  # its own tokenizer is there
        holding = other.submit(hold)
        assert held.wait(PATIENCE)
        try:
            answer = http.post("/tokenize", json={"prompt": "Once upon a time"})
        finally:
            given_back.set()
        holding.result()
    assert answer.json()["tokens"] == llm.get_tokenizer().encode("Once upon a time")


def test_an_adapter_takes_no_name_of_another_model(start):
    server = start(load=("small",), load_adapters=True)
    for name in ("small/2", "small", "broken/1"):
        body = {"lora_name": name, "lora_path": "/nothing", "model": "small"}
        answer = server.http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400 and "another model" in answer.json()["error"]["message"], name
