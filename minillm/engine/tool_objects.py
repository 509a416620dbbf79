"""A tool call as a JSON object, read character by character. Built in chapter 19."""

from __future__ import annotations

import json
from typing import Any

ARGUMENTS = ("arguments", "parameters")
CLOSING = {"{": "}", "[": "]"}


class CallObject:
    """{"name": ..., "arguments": {...}}: its arguments are known before it is complete. Raises ValueError where it is
    no JSON, or no call."""

    def __init__(self):
        self.text = ""
        self.name: str | None = None
        self.arguments: str | None = None  # as far as they have come
        self.done = False
        self._open: list[str] = []  # brackets that have to be closed
        self._quoted = self._escaped = False
        self._key: str | None = None
        self._mark = 0  # where the key or the value begins that is being read
        self._told: int | None = None  # characters of the arguments; None: not even the name

    @property
    def depth(self) -> int:
        return len(self._open)

    def add(self, text: str) -> None:
        for char in text:
            self._add(char)

    def fresh(self) -> tuple[str | None, str]:
        """What is new: the name, the first time that it is known with the beginning of the arguments; and arguments."""
        if self.name is None or self.arguments is None:
            return None, ""
        name = self.name if self._told is None else None
        new = self.arguments[self._told or 0 :]
        self._told = len(self.arguments)
        return name, new

    def _add(self, char: str) -> None:
        self.text += char
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._quoted = True
        elif char in CLOSING:
            if not self._open and (char != "{" or len(self.text) > 1):
                raise ValueError(f"{char!r} begins no call; a call is an object")
            self._open.append(CLOSING[char])
            self._mark = self._mark if self.depth > 1 else 1
        elif char in "}]":
            if not self._open or self._open.pop() != char:
                raise ValueError(f"{char!r} closes no bracket")
            self.done = not self._open
        elif not self._open:
            raise ValueError(f"{char!r} begins no call; a call is an object")
        if self._quoted:
            pass
        elif self.done or (self.depth == 1 and char == ","):
            self._close()
        elif self.depth == 1 and char == ":" and self._key is None:
            self._key = self._value(self.text[self._mark : -1])
            self._mark = len(self.text)
            given = {"name": self.name} | dict.fromkeys(ARGUMENTS, self.arguments)
            if not isinstance(self._key, str) or given.get(self._key) is not None:
                raise ValueError(f"the key {self._key!r} is no text, or comes twice")
        if self._key in ARGUMENTS and self.depth:
            self._grow(self.text[self._mark :].lstrip())

    def _grow(self, arguments: str) -> None:
        if arguments and arguments[0] != "{":
            raise ValueError(f"{self._key} begins with {arguments[0]!r}; they are an object")
        last = self.text[-1]
        if arguments and self.depth == 1 and last != "}" and not last.isspace():
            raise ValueError(f"{last!r} stands behind {self._key}, where a comma or }} belongs")
        if arguments:
            self.arguments = arguments.rstrip() if self.depth == 1 else arguments

    def _close(self) -> None:
        """A field is complete, or the object is."""
        source = self.text[self._mark : -1]
        if self._key is None:
            if source.strip() or not self.done:
                raise ValueError(f"{source.strip()[:40]!r} has no value")
        else:
            value = self._value(source)
            if self._key == "name":
                if not isinstance(value, str) or not value:
                    raise ValueError(f"the name {value!r:.40} is no text")
                self.name = value
            elif self._key in ARGUMENTS:
                self.arguments = source.strip()
        self._key, self._mark = None, len(self.text)
        if self.done and (self.name is None or self.arguments is None):
            raise ValueError(f"the object has no {'name' if self.name is None else 'arguments'}")

    @staticmethod
    def _value(source: str) -> Any:
        try:
            return json.loads(source)
        except ValueError:
            raise ValueError(f"{source.strip()[:40]!r} is no JSON") from None
