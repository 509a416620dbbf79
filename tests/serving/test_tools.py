"""Tools: what the grammar holds the answer to, and how an answer is read as calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from minillm.serving.config import ServerConfig
from minillm.serving.tools import Reader, WithTools

from .conftest import CONVERSATION, MODEL

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(client, stream=False, tools=(WEATHER, CLOCK), **options):
    return client.chat.completions.create(
        model=MODEL, messages=CONVERSATION, max_tokens=100, seed=1, tools=list(tools), stream=stream, **options
    )


def test_a_named_function_gets_its_arguments(client):
    [choice] = ask(client, tool_choice=NAMED).choices
    [call] = choice.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert choice.finish_reason == "stop" and choice.message.content is None and call.id.startswith("call_")


def test_required_calls_some_of_them(client):
    [choice] = ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).choices
    [call] = choice.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", [NAMED, "required", "auto", "none"], ids=str)
def test_a_stream_joins_to_the_same_calls(client, choice):
    whole = ask(client, tool_choice=choice).choices[0]
    text, calls, reasons = "", {}, []
    for chunk in ask(client, True, tool_choice=choice):
        [piece] = chunk.choices
        text += piece.delta.content or ""
        reasons.append(piece.finish_reason)
        for call in piece.delta.tool_calls or ():
            if call.id:
                assert call.index not in calls
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
    expected = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or ()]
    assert [calls[index] for index in sorted(calls)] == expected
    assert text == (whole.message.content or "") and reasons[-1] == whole.finish_reason


def test_without_tools_the_model_is_free(llm, client):
    plain = client.chat.completions.create(model=MODEL, messages=CONVERSATION, temperature=0, max_tokens=20)
    none = client.chat.completions.create(
        model=MODEL, messages=CONVERSATION, temperature=0, max_tokens=20, tools=[WEATHER], tool_choice="none"
    )
    assert none.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"tools": []}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "'clock' twice"),
        ({"tools": [CLOCK], "tool_choice": NAMED}, "tools has clock"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_object"}}, "use one"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_wrong_with_tools_is_named(http, wrong, words):
    answer = http.post("/v1/chat/completions", json={"messages": CONVERSATION} | wrong)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def marked(name: str, arguments: dict) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


PARTS = st.lists(
    st.one_of(
        st.sampled_from(["a ", "<", "<tool", "</tool_call>", "<tool_call>not JSON</tool_call>", "x < y", "{}"]),
        st.builds(marked, st.sampled_from(["weather", "clock"]), st.dictionaries(st.text(max_size=3), st.integers())),
    ),
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(PARTS, st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_an_answer_reads_the_same_however_it_is_cut(parts, cuts):
    text = "".join(parts)
    whole_text, whole = Reader("auto").add(text, True)
    reader, said, calls, at, place = Reader("auto"), "", [], 0, 0
    while at < len(text):
        size = cuts[place % len(cuts)]
        more, new = reader.add(text[at : at + size], at + size >= len(text))
        said, at, place = said + more, at + size, place + 1
        calls += new
    assert functions(calls) == functions(whole)
    assert "".join(said.split()) == "".join(whole_text.split())


def functions(pieces) -> list:
    """Name and arguments of each call, its pieces joined."""
    calls: dict[int, list] = {}
    for piece in pieces:
        name, more = piece["function"].get("name"), piece["function"]["arguments"]
        calls.setdefault(piece["index"], [name, ""])[1] += more
    return [calls[index] for index in sorted(calls)]


def test_another_format_is_read_and_not_constrained():
    tools = WithTools(tools=[WEATHER], tool_choice=None)
    assert tools.tool_constraint("pythonic") is None
    assert tools.tool_constraint("hermes") is not None
    said, pieces = Reader("auto", tool_call_parser="pythonic").add("[weather(city='Rome')]", True)
    assert said == "" and functions(pieces) == [["weather", '{"city": "Rome"}']]
    with pytest.raises(ValueError, match="tool_call_parser='xml'"):
        ServerConfig(tool_call_parser="xml")


def test_the_answer_may_be_constrained_behind_a_marker(http):
    """As a reasoning model writes: free text, then JSON."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    marked = {"json": schema, "after": "</think>", "thinking_token_budget": 5}
    body = {"messages": CONVERSATION, "max_tokens": 60, "seed": 1, "structured_outputs": marked}
    text = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert json.loads(text.partition("</think>")[2])["n"] in (1, 2)
    wrong = http.post("/v1/chat/completions", json=body | {"structured_outputs": {"json": schema, "after": ""}})
    assert wrong.status_code == 400 and "after='' is not allowed" in wrong.json()["error"]["message"]


def test_what_stands_around_a_call_is_text():
    text = f"Let me see. {marked('weather', {'city': 'Rome'})}"
    said, [call] = Reader("auto").add(text, True)
    assert said == "Let me see. " and call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    said, calls = Reader("auto").add("<tool_call>\nno JSON\n</tool_call>", True)
    assert said == "<tool_call>\nno JSON\n</tool_call>" and calls == []


def test_the_grammar_of_auto_begins_at_the_mark():
    constraint = WithTools(tools=[WEATHER], tool_choice=None).tool_constraint()
    [structure] = constraint["structural_tag"]["structures"]
    assert structure["begin"].startswith("<tool_call>") and structure["schema"] == WEATHER["function"]["parameters"]
