"""What is wrong is refused by name, in OpenAI's shape, and disturbs nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from .conftest import CONVERSATION, MODEL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": MODEL, "prompt": "Once"}
MESSAGES = {"model": MODEL, "messages": CONVERSATION}

WRONG = [
    (COMPLETIONS, {"temperature": -1}, 400, "temperature", "temperature=-1"),
    (COMPLETIONS, {"temperature": "hot"}, 400, "temperature", "temperature='hot'"),
    (COMPLETIONS, {"temperature": True}, 400, "temperature", "temperature=True"),
    (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens", "max_tokens=0"),
    (COMPLETIONS, {"n": 0}, 400, "n", "n=0"),
    (COMPLETIONS, {"n": 10**6}, 400, "n", "n=1000000"),
    (COMPLETIONS, {"top_p": 0}, 400, "top_p", "top_p=0"),
    (COMPLETIONS, {"logit_bias": {"one": 1.0}}, 400, "logit_bias", "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"100000": 1.0}}, 400, "logit_bias", "vocabulary"),
    (COMPLETIONS, {"logprobs": 10**6}, 400, "logprobs", "logprobs=1000000"),
    (COMPLETIONS, {"seed": -5}, 400, "seed", "seed=-5"),
    (COMPLETIONS, {"stop": 3}, 400, "stop", "stop=3"),
    (COMPLETIONS, {"colour": "red"}, 400, "colour", "colour"),
    (COMPLETIONS, {"best_of": 3}, 400, "best_of", "best_of=3 is not served"),
    (COMPLETIONS, {"suffix": "end"}, 400, "suffix", "suffix='end' is not served"),
    (COMPLETIONS, {"use_beam_search": True}, 400, "use_beam_search", "not served"),
    (COMPLETIONS, {"priority": 3}, 400, "priority", "'fcfs'"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
    (COMPLETIONS, {"stream_options": {"colour": 1}, "stream": True}, 400, "stream_options.colour", "no field"),
    (COMPLETIONS, {"structured_outputs": {"regex": "["}}, 400, "regex", "regex"),
    (COMPLETIONS, {"model": "gpt-9"}, 404, "model", "gpt-9"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "empty"),
    (COMPLETIONS, {"prompt": "word " * 5000}, 400, "prompt", "max_model_len"),
    (COMPLETIONS, {"prompt": [99999]}, 400, "prompt", "vocabulary"),
    (COMPLETIONS, {"prompt": "\ud800"}, 400, "prompt", "surrogate"),
    (COMPLETIONS, {"prompt": ["x"] * 300}, 400, "prompt", "256"),
    (COMPLETIONS, {"cache_salt": ""}, 400, "prompt", "cache_salt"),
    (CHAT, {"messages": []}, 400, "messages", "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "image_url"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens", "differ"),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format.type", "xml"),
    (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format", "json_schema"),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice", "tools"),
    (CHAT, {"modalities": ["audio"]}, 400, "modalities", "not served"),
    (CHAT, {"functions": [{"name": "f"}]}, 400, "functions", "use tools"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path, wrong, status, param, words", WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named(http, path, wrong, status, param, words, stream):
    body = (PROMPT if path == COMPLETIONS else MESSAGES) | ({"stream": True} if stream else {}) | wrong
    if stream and wrong.get("stream_options") == {"include_usage": True}:
        body.pop("stream")
    content = json.dumps(body)  # httpx would not write half a UTF-16 pair
    answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.parametrize(
    "neutral",
    [
        {"best_of": 1, "suffix": "", "use_beam_search": False, "store": False, "metadata": {}, "length_penalty": 1},
        {"n": None, "stop": None, "temperature": None, "logit_bias": None, "stream": None, "echo": None},
    ],
    ids=["neutral", "null"],
)
def test_a_value_that_asks_for_nothing_is_taken(http, neutral):
    assert http.post(COMPLETIONS, json=PROMPT | {"max_tokens": 1} | neutral).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"model": 1e999}', b"[" * 100000]
)
def test_a_body_that_is_no_object_is_refused(http, body):
    for path in (COMPLETIONS, CHAT, "/tokenize"):
        answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", answer.text


def test_paths_and_methods_that_are_none(http):
    assert http.get("/v1/nothing").status_code == 404 and http.get("/v1/nothing").json()["error"]["message"]
    assert http.get(COMPLETIONS).status_code == 405 and http.get(COMPLETIONS).headers["Allow"] == "POST"
    assert http.get("/v1/models/other").status_code == 404


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
NAMES = sorted(
    "n temperature top_p max_tokens stop seed presence_penalty frequency_penalty logit_bias user top_k min_p stream "
    "repetition_penalty min_tokens stop_token_ids ignore_eos bad_words allowed_token_ids prompt_logprobs priority "
    "structured_outputs response_format cache_salt request_id logprobs echo suffix prompt tools tool_choice messages "
    "chat_template chat_template_kwargs stream_options best_of model".split()
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([COMPLETIONS, CHAT]), st.dictionaries(st.sampled_from(NAMES), JSON, min_size=1, max_size=3))
def test_no_body_makes_the_server_fail(http, path, fields):
    """Any JSON in any field: answered, or refused as the client's fault."""
    body = (PROMPT if path == COMPLETIONS else MESSAGES) | {"max_tokens": 2} | fields
    content = json.dumps(body)
    answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
