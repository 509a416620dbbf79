"""How vLLM spells constraints: spaces of JSON, EBNF, structural tags; walks meet a parser, texts a verdict."""

from __future__ import annotations

import json
import re

import pytest

from minillm import StructuredOutputsParams
from minillm.sampling.grammar.spelling import as_lark, closed
from tests.helpers.grammar_cases import random_walk, tinyworld, tinyworld_compiler

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "in": {"type": "object", "properties": {"y": {"type": "null"}}, "required": ["y"]},
    },
    "required": ["x", "on", "in"],
}
EBNF = """
root  ::= "SELECT " names " FROM " table
names ::= name | name ", " names
name  ::= [a-c]{1,2}
table ::= "t" [0-9]
"""
TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<call=add>", "schema": {"type": "integer", "minimum": 0, "maximum": 9}, "end": "</call>"},
        {"begin": "<call=not>", "schema": json.dumps({"type": "boolean"}), "end": "</call>"},
    ],
    "triggers": ["<call="],
}
EOS = tinyworld().eos_token_id


def walks(count: int = 25, **fields) -> list[str]:
    """Texts that the constraint allows."""
    compiled = tinyworld_compiler().compile(StructuredOutputsParams(**fields))
    texts = []
    for seed in range(count):
        token_ids = random_walk(compiled.start(), 1024, {EOS}, seed)
        texts.append(tinyworld().decode([one for one in token_ids if one != EOS]))
    return texts


def takes(text: str, **fields) -> bool:
    """Whether the whole text is allowed, and may end there."""
    grammar = tinyworld_compiler().compile(StructuredOutputsParams(**fields)).start()
    token_ids = [*tinyworld().encode(text, add_special_tokens=False), EOS]
    return grammar.validate(token_ids) == len(token_ids)


def test_an_object_has_its_declared_properties_alone_where_it_is_asked_for():
    [*texts] = walks(json=POINT, disable_additional_properties=True)
    assert all(list(json.loads(text)) == ["x", "on", "in"] and list(json.loads(text)["in"]) == ["y"] for text in texts)
    more = '{"x": 1, "on": [], "in": {"y": null}, "more": 1}'
    assert takes(more, json=POINT) and not takes(more, json=POINT, disable_additional_properties=True)
    assert not takes('{"x": 1, "on": [], "in": {"y": null, "z": 1}}', json=POINT, disable_additional_properties=True)


def test_only_schemas_are_closed_and_what_they_say_themselves_stays():
    schema = {"properties": {"type": {"type": "object"}, "a": {"type": "object", "additionalProperties": True}},
              "$defs": {"properties": {"type": "object"}}, "const": {"type": "object"}}  # fmt: skip
    assert closed(schema) == {
        "properties": {"type": {"type": "object", "additionalProperties": False},
                       "a": {"type": "object", "additionalProperties": True}},
        "$defs": {"properties": {"type": "object", "additionalProperties": False}},
        "const": {"type": "object"}, "additionalProperties": False,
    }  # fmt: skip


def test_json_has_the_spaces_that_are_asked_for():
    fields = {"json": POINT, "disable_additional_properties": True}
    for text in walks(**fields):
        assert text == json.dumps(json.loads(text))
    for text in walks(**fields, disable_any_whitespace=True):
        assert text == json.dumps(json.loads(text), separators=(",", ":"))
    loose = walks(**fields, whitespace_pattern=r"[ \n]{0,2}")
    assert all(not re.search(r"[ \n]{3}|\t", text) and json.loads(text)["in"] == {"y": None} for text in loose)
    assert len({re.sub(r"\d", "", text) for text in loose}) > len({re.sub(r"\d", "", text) for text in walks(**fields)})
    assert takes('{\n"x" : 1}', json_object=True, whitespace_pattern=r"[ \n]?")


def test_a_grammar_in_ebnf_is_the_same_in_lark():
    pattern = re.compile(r"SELECT [a-c]{1,2}(, [a-c]{1,2})* FROM t[0-9]")
    assert all(pattern.fullmatch(text) for text in walks(grammar=EBNF))
    assert takes("SELECT a, bc FROM t7", grammar=EBNF) and not takes("SELECT a FROM t", grammar=EBNF)
    lark = 'start: "a" | "::=" start'
    assert as_lark(lark) == lark
    with pytest.raises(ValueError, match="has ::= and is no EBNF"):
        tinyworld_compiler().compile(StructuredOutputsParams(grammar='root ::= "a" [0-9'))


def test_a_tag_begins_in_free_text_and_goes_on_as_its_schema():
    for text in (
        "no call at all", "one is <call=add>7</call> and <call=not>true</call>.", "<call=not>false</call>", "a < b",
    ):  # fmt: skip
        assert takes(text, structural_tag=TAG), text
        assert takes(text, structural_tag=json.dumps(TAG))
    for text in ("<call=add>70</call>", "<call=add>true</call>", "<call=or>1</call>", "<call=add>7</cal>"):
        assert not takes(text, structural_tag=TAG), text


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern=' ' says how JSON is written, and regex is no"),
        ({"json": POINT, "whitespace_pattern": "["}, r"whitespace_pattern='\[' is no regular expression"),
        ({"json": POINT, "whitespace_pattern": " ", "disable_any_whitespace": True}, "use only one"),
        ({"structural_tag": "{"}, "structural_tag='{' is not JSON"),
        ({"structural_tag": {"format": {}}}, '"format" is not served: write the tag as a list of structures'),
        ({"structural_tag": TAG | {"triggers": []}}, r"triggers=\[\] is not a list of at least one"),
        ({"structural_tag": TAG | {"triggers": [1]}}, r"triggers=\[1\] has one that is no text"),
        ({"structural_tag": TAG | {"triggers": ["<tool"]}}, "structures.0. begins with '<call=add>', and no trigger"),
        ({"structural_tag": TAG | {"structures": [{"begin": "<"}]}}, r"structures\[0\]=\{'begin': '<'\} is not"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(fields, told):
    with pytest.raises(ValueError, match=told):
        tinyworld_compiler().compile(StructuredOutputsParams(**fields))


def test_backends_are_not_chosen():
    assert StructuredOutputsParams(json_object=True, backend=None, disable_any_whitespace=None).kind == "json_object"
    with pytest.raises(NotImplementedError, match="backend='xgrammar' is not served"):
        StructuredOutputsParams(json_object=True, backend="xgrammar")
