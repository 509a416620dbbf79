"""Tools: functions that a model may ask its client to call. Built in chapter 23.

    tool_choice      what the grammar holds the text to                                    how it is read
    "none"           nothing, and the template hears of no tool                            text
    "auto"           free text; calls in Hermes's format are valid                         text and calls
    "required"       [{"name": …, "parameters": …}, …]                                     calls
    one function     its arguments                                                         one call

A model writes calls in the format that it was trained on; `ServerConfig.tool_call_parser` names it, and
`minillm.engine.tool_calls` reads it. By default it is that of Hermes and Qwen models. Only its marks are text, so only
there the grammar of "auto" sees to it that a call is valid.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from minillm.engine.tool_calls import CallList, tool_parser
from minillm.serving.fields import Strict

BEGIN, END = "<tool_call>", "</tool_call>"


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON Schema; none: an object of any fields
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object"}


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    name: str


class Chosen(Strict):
    type: Literal["function"]
    function: ChosenFunction


class WithTools(Strict):
    """The fields of a request that may use tools."""

    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Chosen | None = None
    parallel_tool_calls: bool | None = None  # false: one call at most

    @model_validator(mode="after")
    def _chooses_a_tool(self):
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError(f"tools names {max(names, key=names.count)!r} twice; give each function its own name")
        if self.tools is None and self.tool_choice not in (None, "none"):
            raise ValueError("tool_choice needs tools; give them, or leave it out")
        if isinstance(self.tool_choice, Chosen) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}; tools has {', '.join(names)}")
        return self

    @property
    def mode(self) -> str:
        """ "none", "auto", "required", or the name of a function behind "function:"."""
        if isinstance(self.tool_choice, Chosen):
            return f"function:{self.tool_choice.function.name}"
        if self.tools is None:
            return "none"
        return self.tool_choice or "auto"

    def tool_constraint(self, tool_call_parser: str = "hermes") -> dict[str, Any] | None:
        """What the grammar holds the answer to, as `structured_outputs` has it. Of the formats that "auto" may be
        written in, only Hermes's has marks that are text, so that a grammar can begin at them."""
        functions = [tool.function for tool in self.tools or ()]
        if self.mode == "none" or (self.mode == "auto" and tool_call_parser != "hermes"):
            return None
        if self.mode == "auto":
            structures = [
                {
                    "begin": f'{BEGIN}\n{{"name": {json.dumps(one.name)}, "arguments": ',
                    "schema": one.schema_of_arguments,
                    "end": f"}}\n{END}",
                }
                for one in functions
            ]
            return {"structural_tag": {"structures": structures, "triggers": [BEGIN]}}
        if self.mode == "required":
            calls = [
                {
                    "type": "object",
                    "properties": {"name": {"const": one.name}, "parameters": one.schema_of_arguments},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
                for one in functions
            ]
            most = {"maxItems": 1} if self.parallel_tool_calls is False else {}
            return {"json": {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}}
        [chosen] = [one for one in functions if self.mode == f"function:{one.name}"]
        return {"json": chosen.schema_of_arguments}


class Reader:
    """Reads one answer, piece by piece, as text and tool calls. What may be the beginning of a call waits."""

    def __init__(self, mode: str, parallel: bool = True, tool_call_parser: str = "hermes"):
        self.mode = mode
        self.parser = CallList(parallel) if mode == "required" else tool_parser(tool_call_parser, parallel)

    @property
    def num_calls(self) -> int:
        return self.parser.num_calls

    def add(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The text and the pieces of calls that are new, as OpenAI's chunks have them, each with its `index`."""
        if self.mode == "none":
            return text, []
        if self.mode.startswith("function:"):
            return "", self._arguments(text)
        told, pieces = self.parser.add(text, is_last)
        return ("" if self.mode == "required" else told), pieces

    def _arguments(self, text: str) -> list[dict[str, Any]]:
        """All text is the arguments of the one function, as it comes."""
        if self.num_calls == 0:
            self.parser.call(self.mode.removeprefix("function:"), text)
            return self.parser.add("")[1]
        return [{"index": 0, "function": {"arguments": text}}] if text else []


def whole_calls(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls of an answer that is not streamed: without their index."""
    return [{name: value for name, value in call.items() if name != "index"} for call in calls]
