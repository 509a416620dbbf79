"""Checks of parameters: each error names the field, its value and what is allowed. Built in chapter 01."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from reprlib import repr as shown
from typing import Any, NamedTuple


def is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_int(name: str, value: object, low: int, high: int | None = None, none_means: str | None = None) -> None:
    if value is None and none_means:
        return
    allowed = f"a whole number from {low}" + (f" to {high}" if high is not None else " on")
    allowed += f", or None ({none_means})" if none_means else ""
    if not is_int(value):
        raise TypeError(f"{name}={value!r} is not allowed; allowed: {allowed}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={value!r} is not allowed; allowed: {allowed}")


def check_float(name: str, value: object, low: float, high: float) -> None:
    allowed = f"a number from {low} to {high}"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not allowed; allowed: {allowed}")
    if not low <= value <= high:  # NaN fails this too
        raise ValueError(f"{name}={value!r} is not allowed; allowed: {allowed}")


def check_flags(owner: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(owner, name), bool):
            raise TypeError(f"{name}={getattr(owner, name)!r} is not allowed; allowed: True or False")


def as_strings(name: str, given: object) -> list[str]:
    """One string or several, as a list."""
    if given is None:
        return []
    strings = (given,) if isinstance(given, str) else given
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise TypeError(f"{name}={given!r} is not allowed; allowed: a string or a list of strings")
    if not all(strings):
        raise ValueError(f"{name}={given!r} holds an empty string, which every text contains; leave it out")
    return list(dict.fromkeys(strings))


def as_token_ids(name: str, token_ids: object) -> list[int]:
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes) or not all(map(is_int, token_ids)):
        raise TypeError(f"{name}={token_ids!r} is not allowed; allowed: a list of token ids")
    if any(token_id < 0 for token_id in token_ids):
        raise ValueError(f"{name}={token_ids!r} is not allowed; allowed: token ids from 0 on")
    return list(dict.fromkeys(token_ids))


def as_some_token_ids(name: str, token_ids: object) -> list[int] | None:
    """The same where an empty list leaves nothing."""
    if token_ids is None:
        return None
    if not (checked := as_token_ids(name, token_ids)):
        raise ValueError(f"{name}=[] names no token; allowed: a list of at least one token id, or None")
    return checked


def as_bias(bias: object) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping) or not all(map(is_int, bias)):
        raise TypeError(f"logit_bias={bias!r} is not allowed; allowed: a dictionary from token id to a number")
    for token_id, value in bias.items():
        if token_id < 0:
            raise ValueError(f"logit_bias has token id {token_id}; allowed: token ids from 0 on")
        check_float(f"logit_bias[{token_id}]", value, -100, 100)
    return dict(bias)


def bias_of_json(bias: object) -> dict[int, float]:
    """The same as JSON has it: token ids may be strings, and values are cut to -100 and 100."""
    allowed = "allowed: a dictionary from token id, or its digits, to a number"
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias={bias!r} is not allowed; {allowed}")
    made: dict[int, float] = {}
    for key, value in bias.items():
        if not is_int(key) and not (isinstance(key, str) and len(key) < 20 and key.strip().isdecimal()):
            raise ValueError(f"logit_bias has token id {shown(key)}; {allowed}")
        check_float(f"logit_bias[{key!r}]", value, float("-inf"), float("inf"))
        made[int(key)] = min(100.0, max(-100.0, value))
    return made


def as_callables(name: str, given: object) -> list[Callable[..., Any]]:
    if given is None:
        return []
    if not isinstance(given, Sequence) or not all(map(callable, given)):
        raise TypeError(
            f"{name}={given!r} is not allowed; allowed: a list of functions (output token ids, logits) -> logits"
        )
    return list(given)


class Absent(NamedTuple):
    """A name of vLLM's that the book does not build."""

    why: str  # and what to use instead, if there is something near
    default: Any = None  # vLLM's own: it asks for nothing, and is taken

    def asks_for_nothing(self, value: object) -> bool:
        return value is None or value is False or (type(value) is type(self.default) and value == self.default)


def refuse_absent(absent: Mapping[str, Absent], given: dict[str, Any]) -> dict[str, Any]:
    """`given` without those of vLLM's names that ask for nothing here.
    Raises NotImplementedError for one that asks for something."""
    for name in given.keys() & absent.keys():
        if not absent[name].asks_for_nothing(given[name]):
            raise NotImplementedError(f"{name}={given[name]!r} is not served: {absent[name].why}")
    return {name: value for name, value in given.items() if name not in absent}


def takes_names_of_vllm(absent: Mapping[str, Absent], positional: Sequence[str]) -> Callable[[type], type]:
    """Let the fields of a dataclass be given with vLLM's names: by position those of `positional`, whose order all
    versions of vLLM share; `absent` ones are refused by name."""

    def decorate(cls: type) -> type:
        initialize, names = cls.__init__, {one.name for one in fields(cls) if one.init}

        @functools.wraps(initialize)
        def __init__(self, *args: Any, **given: Any) -> None:
            if len(args) > len(positional):
                raise TypeError(
                    f"{cls.__name__} has {len(args)} values without a name; allowed: {', '.join(positional)} in this "
                    "order. The order of the others differs between versions of vLLM: name them"
                )
            if not absent.keys().isdisjoint(given):
                given = refuse_absent(absent, given)
            if not given.keys() <= names:
                raise TypeError(_unknown(cls.__name__, next(name for name in given if name not in names)))
            initialize(self, *args, **given)

        def _unknown(owner: str, name: str) -> str:
            near = difflib.get_close_matches(name, sorted(names), n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            return f"{owner} has no argument {name}{hint} Its arguments: {', '.join(sorted(names))}"

        cls.__init__ = __init__
        return cls

    return decorate
