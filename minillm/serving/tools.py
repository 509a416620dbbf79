"""Tools: functions that a model may ask its client to call. Built in chapter 23.

    tool_choice      what the grammar holds the text to                                    how it is read
    "none"           nothing, and the template hears of no tool                            text
    "auto"           free text; <tool_call> begins {"name": …, "arguments": …} of a tool   text and calls
    "required"       [{"name": …, "parameters": …}, …]                                     calls
    one function     its arguments                                                         one call

The marks of "auto" are those that Hermes and Qwen models were trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field, model_validator

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

    def tool_constraint(self) -> dict[str, Any] | None:
        """What the grammar holds the answer to, as `structured_outputs` has it."""
        functions = [tool.function for tool in self.tools or ()]
        if self.mode == "none":
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

    def __init__(self, mode: str, parallel: bool = True):
        self.mode, self.parallel = mode, parallel
        self.num_calls = 0
        self._held = ""  # text that has not been told yet

    def add(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The text and the calls that are new: calls as OpenAI's chunks have them, each with its `index`."""
        if self.mode == "none":
            return text, []
        if self.mode.startswith("function:"):
            return "", self._arguments(text)
        self._held += text
        if self.mode == "required":
            return "", self._array(is_last)
        return self._marked(is_last)

    def _arguments(self, text: str) -> list[dict[str, Any]]:
        """All text is the arguments of the one function, as it comes."""
        if self.num_calls == 0:
            self.num_calls = 1
            return [self._call(0, self.mode.removeprefix("function:"), text)]
        return [{"index": 0, "function": {"arguments": text}}] if text else []

    def _array(self, is_last: bool) -> list[dict[str, Any]]:
        """A call is told when its object is complete."""
        calls, decoder = [], json.JSONDecoder()
        while (start := self._held.find("{")) >= 0:
            try:
                value, end = decoder.raw_decode(self._held, start)
            except json.JSONDecodeError:
                break
            self._held = self._held[end:]
            calls.append(self._next_call(value["name"], value["parameters"]))
        return calls

    def _marked(self, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        told, calls = "", []
        while (start := self._held.find(BEGIN)) >= 0 and (end := self._held.find(END, start)) >= 0:
            inside, after = self._held[start + len(BEGIN) : end], self._held[end + len(END) :]
            try:
                value = json.loads(inside)
                call = self._next_call(value["name"], value["arguments"])
            except (ValueError, TypeError, KeyError):
                told += self._held[: end + len(END)]  # marks around something else: text
            else:
                told += self._held[:start]
                if self.parallel or call["index"] == 0:
                    calls.append(call)
            self._held = after
        keep = 0 if is_last else _may_begin(self._held)
        told += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return (told if told.strip() or not self.num_calls else ""), calls

    def _next_call(self, name: str, arguments: Any) -> dict[str, Any]:
        self.num_calls += 1
        return self._call(self.num_calls - 1, name, json.dumps(arguments, ensure_ascii=False))

    @staticmethod
    def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"index": index, "id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def _may_begin(text: str) -> int:
    """How many characters at the end of `text` belong to a call that is not complete, or may begin one."""
    if (start := text.find(BEGIN)) >= 0:
        return len(text) - start
    return next((size for size in range(min(len(BEGIN) - 1, len(text)), 0, -1) if BEGIN.startswith(text[-size:])), 0)


def whole_calls(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls of an answer that is not streamed: without their index."""
    return [{name: value for name, value in call.items() if name != "index"} for call in calls]
