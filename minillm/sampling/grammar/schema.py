"""Whether a JSON Schema has a text at all, where it refers to itself. Built in chapter 19.

An object that has to hold an object like itself has no end: every beginning is viable, and no text is valid.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


def can_end(schema: Any) -> bool:
    """False if every text of the schema would have to be endless.

    The least fixed point: no reference ends at first, then those whose schemas need only what ends, until none is new.
    """
    references = set(_references(schema))
    ending = {reference for reference in references if not reference.startswith("#")}  # by name: not ours to follow
    while True:
        new = {other for other in references - ending if _ends(_resolve(other, schema), ending)}
        if not new:
            return _ends(schema, ending)
        ending |= new


def _ends(schema: Any, ending: set[str]) -> bool:
    if not isinstance(schema, dict):
        return True
    needed = _get(schema, "allOf", [])
    if schema.get("type") == "object":
        properties = _get(schema, "properties", {})
        needed = needed + [
            properties.get(name, schema.get("additionalProperties")) for name in _get(schema, "required", [])
        ]
    if schema.get("type") == "array":
        count, first = _get(schema, "minItems", 0), _get(schema, "prefixItems", [])
        needed = needed + first[:count] + ([schema.get("items")] if count > len(first) else [])
    choices = [options for name in ("anyOf", "oneOf") if (options := _get(schema, name, []))]
    return (
        schema.get("$ref") in {None, *ending}
        and all(_ends(part, ending) for part in needed)
        and all(any(_ends(option, ending) for option in options) for options in choices)
    )


def _get(schema: dict[str, Any], keyword: str, default: Any) -> Any:
    """Its value, if it is of the kind it has to be; the library complains where it is not."""
    value = schema.get(keyword, default)
    return value if isinstance(value, type(default)) else default


def _references(part: Any) -> list[str]:
    if isinstance(part, list):
        return [reference for item in part for reference in _references(item)]
    if not isinstance(part, dict):
        return []
    own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
    return own + [reference for item in part.values() for reference in _references(item)]


def _resolve(reference: str, schema: Any) -> Any:
    """What "#/$defs/node" points to; nothing if there is no such place, which the library says better."""
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdigit() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict) and name in schema:
            schema = schema[name]
        else:
            return None
    return schema
