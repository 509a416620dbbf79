"""Objects of a JSON Schema whose patterns match no name but the declared ones. Built in chapter 19.

The parser takes each declared name once and leaves it out of the patterns. If nothing is left of a pattern,
as of "^id$" beside the property id, the parser still allows a comma after the last declared property,
and then no name may follow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

DATA = ("const", "enum", "default", "examples")  # what stands below these is a value, not a schema
ZERO = {"const": 0}


def used_up_patterns(schema: Any) -> tuple[list[str], list[str]] | None:
    """(patterns, declared names) of the first object that has such patterns, and allows no other names."""
    for part in _parts(schema):
        patterns = [pattern for pattern, values in _get(part, "patternProperties", {}).items() if values is not False]
        names = list(dict.fromkeys([*_get(part, "properties", {}), *_get(part, "required", [])]))
        if patterns and names and part.get("additionalProperties") is False and not _leave_a_name(patterns, names):
            return patterns, names
    return None


def _leave_a_name(patterns: list[str], names: list[str]) -> bool:
    """Whether a name may follow when all declared ones are written: asked of the parser, in an object full of zeros."""
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, ZERO),
        "required": names,
        "patternProperties": dict.fromkeys(patterns, ZERO),
        "additionalProperties": False,
    }
    text = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    matcher = LLMatcher(_byte_tokenizer(), text, log_level=0)
    written = "{" + "".join(json.dumps(name, ensure_ascii=False) + ":0," for name in names)
    token_ids = _byte_tokenizer().tokenize_str(written)
    if matcher.try_consume_tokens(token_ids) < len(token_ids):
        return True  # the parser spells a name in another way: what it allows shows when it runs
    # One token a byte; the end is another.
    return bool(np.frombuffer(matcher.compute_bitmask(), np.int32)[: 256 // 32].any())


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for keyword, part in schema.items():
            if keyword not in DATA:
                yield from _parts(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _parts(part)


def _get(schema: dict[str, Any], keyword: str, default: Any) -> Any:
    value = schema.get(keyword, default)
    return value if isinstance(value, type(default)) else default
