"""Constraints as llguidance spells them: EBNF becomes Lark, a schema gets its spaces, tags become a grammar.
Built in chapter 19."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import StructTag
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from minillm.sampling.grammar.params import StructuredOutputsParams

# As json.dumps writes it: one way to put spaces, so that brackets, names and colons are forced and can be jumped over.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
EBNF_RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")
SCHEMAS_INSIDE = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose values are named schemas
TAG = {"begin", "schema", "end"}


def as_lark(grammar: str) -> str:
    """Lark's spelling of a grammar; one in EBNF is what has the sign ::= behind a rule's name. Raises ValueError for
    one that cannot be read."""
    if not EBNF_RULE.search(grammar):
        return grammar
    try:
        return any_to_lark(grammar)
    except (GbnfToLarkError, ValueError) as error:
        raise ValueError(f"grammar={grammar!r} is not possible: it has ::= and is no EBNF: {error}") from None


def style_of(params: StructuredOutputsParams) -> dict[str, Any]:
    """How the JSON is spaced."""
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    if params.whitespace_pattern is not None:
        pattern = params.whitespace_pattern
        return {
            "whitespace_flexible": True, "whitespace_pattern": pattern, "item_separator": ",", "key_separator": ":",
        }  # fmt: skip
    return JSON_STYLE


def schema_of(params: StructuredOutputsParams) -> dict[str, Any]:
    """The JSON Schema that the text has to meet."""
    schema = {"type": "object"} if params.kind == "json_object" else json.loads(params.json)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return closed(schema) if params.disable_additional_properties else schema


def closed(schema: Any) -> Any:
    """The schema whose objects have no properties but the declared ones, where it does not say otherwise itself."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        name: {key: closed(one) for key, one in value.items()}
        if name in SCHEMAS_INSIDE and isinstance(value, dict)
        else value
        if name in ("enum", "const", "default", "examples")
        else closed(value)
        for name, value in schema.items()
    }
    if schema.get("type") == "object" or "properties" in schema:
        made.setdefault("additionalProperties", False)
    return made


def tagged_text(tag: dict[str, Any]) -> str:
    """Free text, in which each trigger goes on as one of the structures that begin with it, in Lark.
    Raises ValueError naming what is not understood."""
    if "format" in tag:
        raise ValueError('the key "format" is not served: write the tag as a list of structures and a list of triggers')
    structures, triggers = tag.get("structures"), tag.get("triggers")
    for name, value in (("structures", structures), ("triggers", triggers)):
        if not isinstance(value, list) or not value:
            raise ValueError(f"{name}={value!r} is not a list of at least one")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError(f"triggers={triggers!r} has one that is no text")
    tags = []
    for index, one in enumerate(structures):
        if not isinstance(one, dict) or one.keys() != TAG or not all(isinstance(one[n], str) for n in ("begin", "end")):
            raise ValueError(f"structures[{index}]={one!r} is not {{'begin': text, 'schema': ..., 'end': text}}")
        trigger = next((trigger for trigger in triggers if one["begin"].startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"structures[{index}] begins with {one['begin']!r}, and no trigger of {triggers} does")
        schema = one["schema"] if isinstance(one["schema"], dict) else json.loads(one["schema"])
        tags.append(
            StructTag(trigger=trigger, begin=one["begin"], grammar={**schema, "x-guidance": JSON_STYLE}, end=one["end"])
        )
    return StructTag.to_grammar(tags, assume_special=False)
