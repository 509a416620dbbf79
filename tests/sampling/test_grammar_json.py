"""JSON Schema and Lark by the library: random walks give valid texts, what cannot be served is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from minillm import StructuredOutputsParams
from minillm.sampling.grammar.compiler import GrammarCompiler
from tests.helpers.grammar_cases import allowed, random_walk, sentencepiece_tokenizer, tinyworld, tinyworld_compiler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMAS = {
    "nested objects": {
        "type": "object",
        "properties": {"who": PERSON,
                       "where": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                                 "additionalProperties": False}},
        "required": ["who", "where"],
        "additionalProperties": False,
    },
    "enums": {"enum": ["red", 'a "quote"', 12, None, True, {"a": [1]}]},
    "const": {"type": "object", "properties": {"kind": {"const": "é"}}, "required": ["kind"],
              "additionalProperties": False},
    "bounded integers": {"type": "integer", "minimum": -17, "maximum": 230},
    "bounded numbers": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 12.25},
    "arrays with bounds": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2,
                           "maxItems": 4},
    "tuples": {"type": "array", "prefixItems": [{"type": "null"}, {"enum": ["x"]}], "items": False, "minItems": 2},
    "required and optional": {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in "abcd"},
        "required": ["b", "d"],
        "additionalProperties": False,
    },
    "strings of bounded length": {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 3},
                                  "minItems": 1, "maxItems": 3},
    "patterns": {"type": "string", "pattern": "^[a-z]{2,3}-[0-9]+$", "maxLength": 8},
    "formats": {"type": "string", "format": "date"},
    "any of": {"anyOf": [{"type": "null"}, PERSON, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
    "references": {
        "$defs": {"node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/leaf"}, "v": {"enum": [1, 2]}},
                           "required": ["v"], "additionalProperties": False},
                           "leaf": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "$ref": "#/$defs/node",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_walk_ends_in_json_that_fits_the_schema(kind):
    schema = SCHEMAS[kind]
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    rules = tinyworld_compiler().compile(StructuredOutputsParams(json=schema))
    texts = set()
    for seed in range(12):
        tokens = random_walk(rules.start(), 1024, {1}, seed, hurry=0.5, jump=seed % 2 == 1)
        assert not set(tokens) & set(tinyworld().added_tokens_decoder)
        texts.add(tinyworld().decode(tokens, clean_up_tokenization_spaces=False))
    for text in texts:
        assert not list(validator.iter_errors(json.loads(text))), text
    assert len(texts) > 1 or kind in ("const", "tuples")


def test_strings_hold_all_of_unicode_within_their_bounds():
    rules = tinyworld_compiler().compile(
        StructuredOutputsParams(json={"type": "string", "minLength": 2, "maxLength": 2})
    )
    lengths, characters = set(), set()
    for seed in range(60):
        text = tinyworld().decode(random_walk(rules.start(), 1024, {1}, seed))
        lengths.add(len(json.loads(text)))
        characters |= set(text)
    assert lengths == {2} and max(map(ord, characters)) > 127, "characters of several tokens are made"


def test_a_sentencepiece_vocabulary_writes_json_too():
    tokenizer = sentencepiece_tokenizer()
    compiler = GrammarCompiler(tokenizer, 280, [2])
    rules = compiler.compile(StructuredOutputsParams(json=PERSON))
    for seed in range(6):
        tokens = random_walk(rules.start(), 280, {2}, seed, jump=seed % 2 == 1)
        text = b"".join(compiler.vocabulary.token_bytes[token_id] for token_id in tokens).decode()
        Draft202012Validator(PERSON).validate(json.loads(text))


def test_added_tokens_are_no_text_and_every_end_is_one():
    compiler = GrammarCompiler(sentencepiece_tokenizer(), 280, [1, 2])
    grammar = compiler.compile(StructuredOutputsParams(json={"type": "string"})).start()
    for byte in b'"a<':
        grammar.accept(compiler.vocabulary.single_bytes[byte])
        assert not allowed(grammar, 280) & set(sentencepiece_tokenizer().added_tokens_decoder)
    grammar.accept(compiler.vocabulary.single_bytes[ord('"')])
    assert allowed(grammar, 280) == {1, 2}


def test_a_pydantic_model_and_any_object():
    class Point(BaseModel):
        x: int = Field(ge=0, le=9)
        label: str = Field(max_length=3)

    rules = tinyworld_compiler().compile(StructuredOutputsParams(json=Point))
    Point.model_validate_json(tinyworld().decode(random_walk(rules.start(), 1024, {1}, 0)))
    anything = tinyworld_compiler().compile(StructuredOutputsParams(json_object=True)).start()
    for byte in b'{"a": [1, {"b": null}]}':
        anything.accept(tinyworld_compiler().vocabulary.single_bytes[byte])
    assert 1 in allowed(anything, 1024)
    assert (
        tinyworld_compiler()
        .compile(StructuredOutputsParams(json_object=True))
        .start()
        .validate([tinyworld().encode("[", add_special_tokens=False)[0]])
        == 0
    )


def test_a_context_free_grammar_counts_its_brackets():
    rules = tinyworld_compiler().compile(StructuredOutputsParams(grammar='start: "(" start ")" | "x" // "<|user|>"'))
    for seed in range(8):
        text = tinyworld().decode(random_walk(rules.start(), 1024, {1}, seed))
        depth = text.index("x")
        assert text == "(" * depth + "x" + ")" * depth


INT = {"type": "integer"}


@pytest.mark.parametrize("schema, said", [
    ({"enum": []}, "anyOf is empty"),
    ({"type": "integer", "minimum": 3, "maximum": 1}, r"minimum \(3\) is greater than maximum \(1\)"),
    ("false", "anyOf is empty"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, r"minLength \(3\) is greater"),
    ({"type": "array", "items": False, "minItems": 1}, "required item is unsatisfiable"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required property 'a' is unsatisfiable"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    ({"not": {"type": "string"}}, r'Unimplemented keys: \["not"\]'),
    ({"type": "array", "uniqueItems": True}, r'Unimplemented keys: \["uniqueItems"\]'),
    ({"if": {}, "then": {}}, "Unimplemented keys"),
    ({"type": "strin"}, "Invalid type: strin"),
    ({"type": "object", "required": 5}, "required"),
    ({"type": "string", "format": "postcode"}, "Unknown format: postcode"),
    ({"$ref": "#/$defs/no"}, "'/$defs/no' does not exist".replace("$", r"\$")),
    ({"$ref": "http://example.com/schema"}, "not present in a registry"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"$defs": {"x/y": {"$ref": "#/$defs/x~1y"}}, "$ref": "#/$defs/x~1y"}, "no text that ends"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no text that ends"),
    ({"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "minItems": 1},
     "no text that ends"),
    ({"type": "object", "properties": {"ab": INT}, "patternProperties": {"^ab$": INT}, "additionalProperties": False},
     r"patternProperties '\^ab\$' match no name but the declared 'ab'"),
    ({"type": "array", "items": {"$ref": "#/$defs/x"},
      "$defs": {"x": {"type": "object", "properties": {"a": INT, "b": INT},
      "patternProperties": {"^a$": {}, "^b$": {}, "^no": False}, "additionalProperties": False}}},
      r"'\^a\$', '\^b\$'.* 'a', 'b'"),
    ({"type": "object", "required": ["ab"], "patternProperties": {"^ab$": INT}, "additionalProperties": False},
     "declared 'ab'"),
])  # fmt: skip
def test_an_impossible_or_unsupported_schema_is_refused_by_name(schema, said):
    with pytest.raises(ValueError, match=f"(?s)^json=.* is not possible: .*{said}.*; supported: JSON Schema's types"):
        tinyworld_compiler().compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("schema", [
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "array", "prefixItems": [{"enum": [1]}], "items": {"$ref": "#"}, "minItems": 1},
    {"$defs": {"x/y": {"type": "array", "prefixItems": [{"$ref": "#/$defs/z"}], "minItems": 1}, "z": {"enum": [1]}},
     "$ref": "#/$defs/x~1y"},
    {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]},
])  # fmt: skip
def test_a_schema_that_refers_to_itself_and_can_end_is_served(schema):
    assert allowed(tinyworld_compiler().compile(StructuredOutputsParams(json=schema)).start(), 1024)


@pytest.mark.parametrize(
    "patterns", [{"^a": INT}, {"^ab?$": {"minimum": 5}}, {"^ab$": INT, "^c$": INT}, {"^c$": INT}, {"^ab$": False}]
)
def test_patterns_that_leave_a_name_are_served(patterns):
    schema = {"type": "object", "properties": {"ab": INT}, "patternProperties": patterns, "additionalProperties": False}
    rules = tinyworld_compiler().compile(StructuredOutputsParams(json=schema))
    for seed in range(4):
        Draft202012Validator(schema).validate(
            json.loads(tinyworld().decode(random_walk(rules.start(), 1024, {1}, seed)))
        )
    open_to_more = schema | {"patternProperties": {"^ab$": INT}, "additionalProperties": True}
    assert tinyworld_compiler().compile(StructuredOutputsParams(json=open_to_more))


@pytest.mark.parametrize("grammar, said", [
    ('first: "a"', "no start rule found"), ('start: "a" other', 'unknown name: "other"'), ("", "Empty grammar"),
    ("start: (", "Expected"), ("start: /(?=a)b/", "look-around"),
    ('start: "a" <|user|>', r"it names the token <\|user\|>"), ("start: <[3]>", r"the token <\[3\]>"),
])  # fmt: skip
def test_a_grammar_that_cannot_be_served_is_refused_by_name(grammar, said):
    with pytest.raises(
        ValueError, match=f"(?s)^grammar=.* is not possible: .*{said}.*; supported: Lark's rules"
    ) as error:
        tinyworld_compiler().compile(StructuredOutputsParams(grammar=grammar))
    assert "backtrace" not in str(error.value)


def test_there_and_back():
    rules = tinyworld_compiler().compile(StructuredOutputsParams(json=PERSON))
    tokens = [*tinyworld().encode('{"name": "Mia é", "age": 42}', add_special_tokens=False), 1]
    grammar, masks = rules.start(), []
    for token_id in tokens:
        masks.append(allowed(grammar, 1024))
        assert token_id in masks[-1] and 0 not in masks[-1]
        grammar.accept(token_id)
    twin = grammar.copy()
    assert grammar.is_terminated and allowed(grammar, 1024) == set()
    with pytest.raises(ValueError, match="the text has ended"):
        grammar.accept(1)
    for place in range(len(tokens) - 1, -1, -1):
        grammar.rollback(1)
        assert allowed(grammar, 1024) == masks[place] and not grammar.is_terminated
        assert grammar.validate(tokens[place:]) == len(tokens) - place == grammar.validate([*tokens[place:], 1])
        grammar.accept(tokens[place])
        grammar.rollback(1)
    assert twin.is_terminated
    for bad in (0, 1, 2, tokens[1], 1024, -1):
        with pytest.raises(ValueError, match=f"token {bad} .* may not come next"):
            grammar.accept(bad)
    assert allowed(grammar, 1024) == masks[0] and grammar.validate([tokens[0], tokens[0]]) == 1
    with pytest.raises(ValueError, match="0 tokens were accepted"):
        grammar.rollback(1)


def test_forced_masks_are_those_the_library_computes():
    """The masks that are written from a forced run of tokens, and what is said instead of it."""
    rules = tinyworld_compiler().compile(StructuredOutputsParams(json=SCHEMAS["nested objects"]))
    vocabulary = tinyworld_compiler().vocabulary
    for seed in range(3):
        tokens = random_walk(rules.start(), 1024, {1}, seed)
        grammar, fresh, num_forced = rules.start(), rules.start(), 0
        for token_id in tokens:
            mask = np.frombuffer(fresh.matcher.compute_bitmask(), np.int32)[:32]
            assert allowed(grammar, 1024) == set(vocabulary.unpack(mask).tolist())
            num_forced += bool(grammar._forced)
            grammar.accept(token_id)
            fresh.accept(token_id)
        assert num_forced > 10
    grammar, fresh = rules.start(), rules.start()
    for byte in b'{"who": {"name": "':  # forced text in other tokens than the forced ones
        mask = np.frombuffer(fresh.matcher.compute_bitmask(), np.int32)[:32]
        assert allowed(grammar, 1024) == set(vocabulary.unpack(mask).tolist())
        grammar.accept(vocabulary.single_bytes[byte])
        fresh.accept(vocabulary.single_bytes[byte])
