"""StructuredOutputsParams: what the text of a request has to look like. Built in chapter 19."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from minillm.sampling import absent
from minillm.sampling.checks import check_int, takes_names_of_vllm

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "begin")
FLAGS = ("disable_any_whitespace", "disable_additional_properties", "jump_forward")
OF_MARKER = ("after", "thinking_token_budget")
OF_JSON = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@takes_names_of_vllm(absent.STRUCTURED, ("json", "regex", "choice", "grammar", "json_object"))
@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one constraint on the whole text, or on what follows `after`; names as in vLLM. Whether it can be served
    is said when it is compiled.

    Raises TypeError or ValueError naming the field, the value and what is allowed.
    """

    # A JSON Schema: text, dictionary or pydantic model; kept as text.
    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None  # the whole text matches, as by `re.fullmatch`
    choice: Sequence[str] | None = None  # the text is one of these
    # A context-free grammar: as Lark writes it, from the rule `start` on, or in EBNF (GBNF), from the rule `root` on.
    grammar: str | None = None
    json_object: bool | None = None  # any JSON object
    disable_any_whitespace: bool = False  # of JSON: write no space at all; else one behind each comma and colon
    disable_additional_properties: bool = False  # of JSON: an object has its declared properties alone
    whitespace_pattern: str | None = None  # of JSON: a regular expression of what may stand between two parts of it
    # Free text, in which a trigger begins JSON of a schema: JSON text or a dictionary with "structures" and "triggers".
    structural_tag: str | Mapping[str, Any] | None = None
    begin: str | None = None  # the text begins so, and is free from there on
    jump_forward: bool = False  # write text that is forced without asking the model for it
    # The constraint holds behind the first occurrence of this text, as `</think>`; up to there any token may come but
    # the end. The marker may also stand at the end of the prompt.
    after: str | None = None
    thinking_token_budget: int | None = None  # tokens before `after` is forced; None sets no limit

    def __post_init__(self):
        for name in FLAGS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, False)
        for name in ("json_object", *FLAGS):
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(f"{name}={getattr(self, name)!r} is not allowed; allowed: True or False")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"structured_outputs has {found}; exactly one is allowed of {', '.join(KINDS)}")
        if self.json is not None:
            object.__setattr__(self, "json", _as_schema_text(self.json))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _as_tag_text(self.structural_tag))
        for name in ("regex", "grammar", "whitespace_pattern", "begin", "after"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name}={shortened(value)} is not allowed; allowed: a string")
            lone = (character for character in value or "" if "\ud800" <= character <= "\udfff")
            if any(name != "begin" or not "\udc80" <= character <= "\udcff" for character in lone):
                raise ValueError(f"{name}={shortened(value)} has a lone surrogate, which no text has; remove it")
        if self.choice is not None:
            object.__setattr__(self, "choice", _as_choices(self.choice))
        if self.whitespace_pattern is not None:
            try:
                re.compile(self.whitespace_pattern)
            except re.error as error:
                raise ValueError(
                    f"whitespace_pattern={self.whitespace_pattern!r} is no regular expression: {error}"
                ) from None
        for name in OF_JSON:
            if getattr(self, name) and self.kind not in ("json", "json_object"):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} says how JSON is written, and {self.kind} is no JSON; leave it out"
                )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                f"disable_any_whitespace=True leaves no place for whitespace_pattern={self.whitespace_pattern!r}; "
                "use only one"
            )

        self._check_marker()

    def _check_marker(self) -> None:
        budget = self.thinking_token_budget
        if self.begin == "" or self.after == "":
            name = "begin" if self.begin == "" else "after"
            raise ValueError(f"{name}='' is not allowed; allowed: at least one character, or None")
        check_int("thinking_token_budget", budget, 0, none_means="no limit")
        if budget is not None and self.after is None:
            raise ValueError(
                f"thinking_token_budget={budget} bounds the text before a marker; name the marker: after='</think>'"
            )

    @property
    def plain(self) -> StructuredOutputsParams:
        """The constraint without the free text in front of it."""
        return replace(self, after=None, thinking_token_budget=None)

    @property
    def kind(self) -> str:
        """Which constraint it is: the name of its field."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def key(self) -> tuple:
        """What two constraints have in common that compile to the same grammar."""
        return (self.kind, getattr(self, self.kind), *(getattr(self, name) for name in (*OF_JSON, *OF_MARKER)))

    @classmethod
    def make(cls, given: object) -> StructuredOutputsParams | None:
        """`given` itself, or made of a dictionary of its fields."""
        if given is None or isinstance(given, cls):
            return given
        names = [field.name for field in fields(cls)]
        allowed = f"allowed: a StructuredOutputsParams, or a dictionary with one of {', '.join(names)}"
        if not isinstance(given, Mapping):
            raise TypeError(f"structured_outputs={shortened(given)} is not allowed; {allowed}")
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"structured_outputs has the unknown field {unknown[0]!r}; {allowed}")
        return cls(**given)


def shortened(value: object) -> str:
    """`value` as an error quotes it: its beginning and its end, if it is long."""
    return cut(repr(value), 200)


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 70]} ... {text[-40:]} ({len(text)} characters)"


def _as_schema_text(schema: object) -> str:
    allowed = "allowed: a JSON Schema as a dictionary or as JSON text, or a pydantic model"
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"json={shortened(schema)} is not JSON: {error}; {allowed}") from None
    elif not isinstance(schema, Mapping):
        raise TypeError(f"json={shortened(schema)} is not allowed; {allowed}")
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"json={shortened(schema)} is JSON, but no schema; {allowed}")
    try:
        return json.dumps(schema, ensure_ascii=False)
    except TypeError as error:
        raise TypeError(f"json={shortened(schema)} cannot be written as JSON: {error}; {allowed}") from None


def _as_tag_text(tag: object) -> str:
    """The tag as JSON text; what is in it is checked when it is compiled."""
    allowed = "allowed: a dictionary with the lists structures and triggers, or the same as JSON text"
    if isinstance(tag, str):
        try:
            tag = json.loads(tag)
        except json.JSONDecodeError as error:
            raise ValueError(f"structural_tag={shortened(tag)} is not JSON: {error}; {allowed}") from None
    if not isinstance(tag, Mapping):
        raise TypeError(f"structural_tag={shortened(tag)} is not allowed; {allowed}")
    return json.dumps(tag, ensure_ascii=False)


def _as_choices(choice: object) -> tuple[str, ...]:
    if isinstance(choice, str) or not isinstance(choice, Sequence):
        raise TypeError(f"choice={shortened(choice)} is not allowed; allowed: a list of strings")
    for index, text in enumerate(choice):
        if not isinstance(text, str):
            raise TypeError(f"choice[{index}]={shortened(text)} is not allowed; allowed: a string")
    if not choice:
        raise ValueError("choice=[] leaves nothing to say; allowed: a list of at least one string")
    return tuple(choice)
