"""Tool calls: each format, however it is cut, whole and broken."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from minillm.engine.tool_calls import FORMATS, tool_parser

from ..helpers.tiny import examples

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["}", '"', "\\", "</tool_call>", "]"]),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["weather", "a.b-c_1"]),
        st.dictionaries(st.sampled_from(["x", "city", "y_2"]), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
)
TEXTS = st.sampled_from(["", "Let me see. ", "a < b, [1], <tool", "{x} "])


def written(name: str, calls: list, text: str) -> str:
    """The calls as a model of the format writes them."""
    if name == "hermes":
        return text + "".join(
            f"<tool_call>\n{json.dumps({'name': f, 'arguments': a})}\n</tool_call>\n" for f, a in calls
        )
    if name == "mistral":
        return f"{text}[TOOL_CALLS]{json.dumps([{'name': f, 'arguments': a} for f, a in calls])}"
    if name == "mistral named":
        return text + "".join(f"[TOOL_CALLS]{f}{json.dumps(a)}" for f, a in calls)
    if name == "llama3_json":
        return "; ".join(json.dumps({"name": f, "parameters": a}) for f, a in calls)
    inside = (f.replace("-", "_") + "(" + ", ".join(f"{k}={v!r}" for k, v in a.items()) + ")" for f, a in calls)
    return f"[{', '.join(inside)}]"


def read(parser, text: str, cuts: list[int]) -> tuple[str, list]:
    """The text and the calls of an answer that comes in pieces; only its first piece names a call."""
    told, calls, at, place = "", {}, 0, 0
    while at < len(text) or not place:
        size = cuts[place % len(cuts)]
        more, pieces = parser.add(text[at : at + size], at + size >= len(text))
        told, at, place = told + more, at + size, place + 1
        for piece in pieces:
            if "id" in piece:
                assert piece["index"] not in calls and piece["type"] == "function"
                calls[piece["index"]] = [piece["function"]["name"], ""]
            calls[piece["index"]][1] += piece["function"]["arguments"]
    return told, [calls[index] for index in range(len(calls))]


@examples(60)
@given(st.sampled_from([*FORMATS, "mistral named"]), CALLS, TEXTS, st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_what_was_written_is_read_however_it_is_cut(name, calls, text, cuts):
    source = written(name, calls, text)
    told, found = read(tool_parser(name.split()[0]), source, cuts)
    expected = [(f.replace("-", "_") if name == "pythonic" else f, a) for f, a in calls]
    assert [(f, json.loads(a)) for f, a in found] == expected
    assert told.strip() == ("" if name in ("llama3_json", "pythonic") else text.strip())


@examples(150)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "{", "}", '"name"', '"arguments"', ": ", '"f"',
             ", ", "f",
             "(x=1)", "(", ")", " ", "<", "<|python_tag|>", "\\", "{}", '{"name": "f", "arguments": {}}', ";", "é"]
        ),
        max_size=12,
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
)  # fmt: skip
def test_anything_is_read_and_no_text_is_lost_where_there_is_no_call(name, parts, cuts):
    source = "".join(parts)
    told, calls = read(tool_parser(name), source, cuts)
    assert (told.strip(), calls) == tuple(
        part.strip() if isinstance(part, str) else part for part in read(tool_parser(name), source, [1000])
    )
    if not calls:
        assert told == source


def test_arguments_stream_before_they_are_complete():
    parser = tool_parser("hermes")
    assert parser.add('Yes. <tool_call>{"name": "f", "argu') == ("Yes. ", [])
    [piece] = parser.add('ments": {"city": "Ro')[1]
    assert piece["function"] == {"name": "f", "arguments": '{"city": "Ro'}
    assert parser.add('me"')[1] == [{"index": 0, "function": {"arguments": 'me"'}}]
    assert parser.add("}}</tool_call>", True) == ("", [{"index": 0, "function": {"arguments": "}"}}])


def test_a_name_behind_its_arguments_is_waited_for():
    _, [[name, arguments]] = read(tool_parser("llama3_json"), '{"parameters": {"x": 1}, "name": "f"}', [1])
    assert (name, json.loads(arguments)) == ("f", {"x": 1})


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("hermes", "<tool_call>no JSON</tool_call>", "'n' begins no call"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "has no arguments"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "3 is no text"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "they are an object"),
        ("hermes", '<tool_call>{"name": "f", "x": {], "arguments": {}}', "closes no bracket"),
        ("hermes", '<tool_call>{"name": "f"', "ends inside of a call"),
        ("mistral", "[TOOL_CALLS]what is it{", "no name of a function"),
        ("llama3_json", '{"city": "Rome"}', "has no name"),
        ("pythonic", "[f(1)]", "no call with named arguments"),
        ("pythonic", "[f(x=g())]", "x=g() is no literal"),
        ("pythonic", "[f(x={1})]", "no JSON"),
        ("pythonic", "[f(x=1", "ends inside of a call"),
    ],
)
def test_what_is_no_call_is_text_and_says_why(name, text, words):
    parser = tool_parser(name)
    told, calls = read(parser, text, [3])
    assert (told, calls) == (text, []) and words in parser.errors[0], parser.errors


def test_one_call_alone_where_parallel_calls_are_not_wanted():
    for name in FORMATS:
        source = written(name, [("f", {"x": 1}), ("g", {"y": [2]})], "")
        told, calls = read(tool_parser(name, parallel=False), source, [4])
        assert [call[0] for call in calls] == ["f"] and json.loads(calls[0][1]) == {"x": 1} and not told.strip()


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="tool_call_parser='xml' is not allowed; allowed: hermes, llama3_json"):
        tool_parser("xml")
