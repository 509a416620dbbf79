"""Tool calls in a text: four formats, read piece by piece, with arguments that stream. Built in chapter 19.

hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>        Hermes, Qwen
llama3_json   {"name": "f", "parameters": {...}}; {...}                       Llama 3
mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]            Mistral; also [TOOL_CALLS]f{...}
pythonic      [f(x=1, y="a"), ...]                                            Llama 3.2 and 4
"""

from __future__ import annotations

import ast
import json
import re

from minillm.engine.tool_parser import Reading, ToolParser

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")  # of a function, as OpenAI has it


class Hermes(ToolParser):
    begin, end = "<tool_call>", "</tool_call>"

    def parse(self) -> Reading:
        while (yield from self.text_until(self.begin)):
            space, char = yield from self.read_space()
            if char is not None:
                self.unread(char)
            if (yield from self.object(self.begin + space)):
                yield from self._skip_end()

    def _skip_end(self) -> Reading:
        """Leave out the mark behind a call, if it is what follows."""
        space, char = yield from self.read_space()
        seen = char or ""
        while char is not None and seen != self.end and self.end.startswith(seen):
            char = yield from self.read()
            seen += char or ""
        if seen != self.end:
            self.unread(space + seen)


class Llama3Json(ToolParser):
    mark = "<|python_tag|>"

    def parse(self) -> Reading:
        before, char = yield from self.read_space()
        if char == self.mark[0]:
            seen = char
            while seen != self.mark and self.mark.startswith(seen) and char is not None:
                char = yield from self.read()
                seen += char or ""
            before += seen
            if seen == self.mark:
                space, char = yield from self.read_space()
                before += space
            else:
                char = None if char is None else ""
        while char == "{":
            self.unread(char)
            if not (yield from self.object(before)):
                break
            before, char = yield from self.read_space()
            if char == ";":
                space, char = yield from self.read_space()
                before += ";" + space
        else:
            self.say(before + (char or ""))
        yield from self.rest_is_text()


class Mistral(ToolParser):
    mark = "[TOOL_CALLS]"

    def parse(self) -> Reading:
        while (yield from self.text_until(self.mark)):
            space, char = yield from self.read_space()
            before = self.mark + space
            if char == "[":
                yield from self._list(before + char)
            elif char is not None:
                self.unread(char)
                yield from self._named(before)
            else:
                self.say(before)

    def _list(self, before: str) -> Reading:
        """[{...}, {...}] from behind the first bracket on."""
        while True:
            space, char = yield from self.read_space()
            if char is not None:
                self.unread(char)
            if not (yield from self.object(before + space)):
                return
            _, char = yield from self.read_space()
            if char == "]" or char is None:
                return
            if char != ",":
                self.errors.append(f"character {self._place}: {char!r} stands where a comma or ] belongs")
                self.unread(char)
                return
            before = ""

    def _named(self, before: str) -> Reading:
        """f{...} or f[ARGS]{...}"""
        seen = ""
        while (char := (yield from self.read())) is not None and char != "{":
            seen += char
        name = seen.strip().removesuffix("[ARGS]").strip()
        if char is None or not NAME.fullmatch(name):
            self.errors.append(f"character {self._place}: {name!r} is no name of a function")
            self.say(before + seen + (char or ""))
            return
        self.unread(char)
        yield from self.object(before + seen, f'{{"name": {json.dumps(name)}, "arguments": ', "}")


class CallList(Mistral):
    """A list of calls and nothing else, which `tool_choice="required"` holds a text to."""

    def parse(self) -> Reading:
        before, char = yield from self.read_space()
        if char == "[":
            yield from self._list(before + char)
        yield from self.rest_is_text()


class Pythonic(ToolParser):
    def parse(self) -> Reading:
        before, char = yield from self.read_space()
        if char != "[":
            self.say(before + (char or ""))
            yield from self.rest_is_text()
            return
        seen, ending = before + char, ","
        while ending == ",":
            source, ending = yield from self._one_call()
            seen += source + (ending or "")
            try:
                if ending is None:
                    raise ValueError("the text ends inside of a call")
                self.call(*_called(source))
                seen = ""
            except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
                self.errors.append(f"character {self._place}: {error}")
                self.say(seen)
                break
        yield from self.rest_is_text()

    def _one_call(self) -> Reading:
        """(source up to the comma or bracket behind a call, that character or None)."""
        source, depth, quote = "", 0, ""
        while (char := (yield from self.read())) is not None:
            if quote:
                if char == "\\":
                    source += char
                    char = (yield from self.read()) or ""
                elif char == quote:
                    quote = ""
            elif char in "'\"":
                quote = char
            elif char in "([{":
                depth += 1
            elif depth == 0 and char in ",]":
                return source, char
            elif char in ")]}":
                depth -= 1
            source += char
        return source, None


def _called(source: str) -> tuple[str, str]:
    """The name and the arguments, as JSON, of a call in Python. Nothing is evaluated but literals."""
    tree = ast.parse(source.strip(), mode="eval").body
    if not isinstance(tree, ast.Call) or tree.args or any(one.arg is None for one in tree.keywords):
        raise ValueError(f"{source.strip()[:80]!r} is no call with named arguments")
    name = ast.unparse(tree.func)
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no name of a function")
    arguments = {}
    try:
        for one in tree.keywords:
            arguments[one.arg] = _literal(one)
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"{source.strip()[:80]!r} has an argument that is no JSON: {error}") from None


def _literal(given: ast.keyword) -> object:
    try:
        return ast.literal_eval(given.value)
    except ValueError:
        raise ValueError(f"the argument {given.arg}={ast.unparse(given.value)[:40]} is no literal") from None


FORMATS: dict[str, type[ToolParser]] = {
    "hermes": Hermes, "llama3_json": Llama3Json, "mistral": Mistral, "pythonic": Pythonic,
}  # fmt: skip


def tool_parser(name: str, parallel: bool = True) -> ToolParser:
    """A new parser of the format, named as vLLM's `--tool-call-parser`. Raises ValueError for an unknown one."""
    if name not in FORMATS:
        raise ValueError(f"tool_call_parser={name!r} is not allowed; allowed: {', '.join(FORMATS)}")
    return FORMATS[name](parallel)
