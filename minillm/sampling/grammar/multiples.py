"""How large an automaton the multiples of a JSON Schema need. Built in chapter 19.

To tell whether digits spell a multiple of m takes a state for each remainder, and the library's limits do not count
them: 999,983 would keep it for 14 s. Where two schemas must both hold, m is the least common multiple of theirs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from minillm.sampling.grammar.params import StructuredOutputsParams

MAX_MULTIPLE = 10_000
IN_GRAMMAR = re.compile(r'"multipleOf"\s*:\s*([\d.eE+-]+)')  # of %json in Lark's text
BOTH = ("allOf", "$ref")  # keywords that join a schema with another


def states_of_multiples(params: StructuredOutputsParams) -> int:
    """Of the largest multipleOf, or of all together where one number may have to meet several; 1 where there is none.
    A number that cannot be read is left to the library, which names it."""
    if params.kind == "grammar":
        schema: Any = [{"multipleOf": _number(found)} for found in IN_GRAMMAR.findall(params.grammar)]
        is_joined = any(f'"{keyword}"' in params.grammar for keyword in BOTH)
    else:
        schema = json.loads(getattr(params, params.kind)) if params.kind in ("json", "structural_tag") else None
        is_joined = any(keyword in part for part in _parts(schema) for keyword in BOTH)
    found = {_states(part["multipleOf"]) for part in _parts(schema) if "multipleOf" in part}
    return math.lcm(*found) if is_joined else max(found, default=1)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _parts(part)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _states(multiple: Any) -> int:
    """Its digits without the zeros at the end, which cost nothing."""
    if type(multiple) not in (int, float) or not math.isfinite(multiple):
        return 1
    return max(1, int("".join(map(str, Decimal(str(multiple)).normalize().as_tuple().digits))))
