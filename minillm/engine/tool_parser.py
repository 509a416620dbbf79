"""What all parsers of tool calls share: they are sent characters, and tell text and calls. Built in chapter 19.

A parser is a generator that is sent one character after the other, and None at the end. So it reads the same text in
the same way however the text is cut, and its code is written as if it had the whole text.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any
from uuid import uuid4

from minillm.engine.tool_objects import CallObject

Reading = Generator[None, str | None, Any]  # is sent characters


class ToolParser:
    """Reads one answer as text and tool calls. `parallel` False keeps the first call alone.

    What looks like a call and is not stays text. `errors` says for each of these what was wrong, and at which
    character of the answer.
    """

    def __init__(self, parallel: bool = True):
        self.parallel = parallel
        self.num_calls = 0
        self.errors: list[str] = []
        self._text: list[str] = []
        self._pieces: list[dict[str, Any]] = []
        self._place = 0  # characters read
        self._has_ended = False
        self._back = ""  # characters that were read too far
        self._reading = self._run()
        next(self._reading)

    def add(self, text: str, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """The text and the pieces of calls that are new. The first piece of a call has its id and name; the `arguments`
        of all its pieces, joined, are its arguments as JSON."""
        for char in text:
            self._reading.send(char)
        if is_last:
            self._reading.send(None)
        told, pieces = "".join(self._text), joined(self._pieces)
        self._text, self._pieces = [], []
        return (told if told.strip() or not self.num_calls else ""), pieces

    def parse(self) -> Reading:
        """Reads the whole answer; overridden by each format."""
        raise NotImplementedError

    def _run(self) -> Reading:
        yield from self.parse()
        while True:  # what follows the end
            yield

    def read(self) -> Reading:
        """The next character, or None at the end."""
        if self._back:
            char, self._back = self._back[0], self._back[1:]
            return char
        if self._has_ended:
            return None
        char = yield
        self._place += char is not None
        self._has_ended = char is None
        return char

    def unread(self, text: str) -> None:
        self._back = text + self._back

    def say(self, text: str) -> None:
        self._text.append(text)

    def read_space(self) -> Reading:
        """(white space, the character behind it or None)."""
        space = ""
        while (char := (yield from self.read())) is not None and char.isspace():
            space += char
        return space, char

    def text_until(self, mark: str) -> Reading:
        """Tell text up to `mark`. Returns whether the mark came. What may begin a mark waits."""
        held = ""
        while (char := (yield from self.read())) is not None:
            held += char
            while held and not mark.startswith(held):
                self.say(held[0])
                held = held[1:]
            if held == mark:
                return True
        self.say(held)
        return False

    def rest_is_text(self) -> Reading:
        while (char := (yield from self.read())) is not None:
            self.say(char)

    def object(self, before: str, given: str = "", closing: str = "") -> Reading:
        """A call as JSON, told while it comes: {"name": ..., "arguments": {...}}. Returns whether it is one. If
        not, and nothing of it was told, it is text, with the characters `before` it. `given` and `closing` are put
        around what is read: the name where it stands outside of the JSON."""
        call, seen = CallObject(), before
        begun = self.num_calls
        try:
            call.add(given)
            while not call.done:
                char = yield from self.read()
                if char is None:
                    raise ValueError("the text ends inside of a call")
                seen += char
                call.add(char)
                if closing and call.depth == 1:
                    call.add(closing)
                self._tell(call)
            return True
        except ValueError as error:
            self.errors.append(f"character {self._place}: {error}")
            if self.num_calls == begun:
                self.say(seen)
            return False

    def _tell(self, call: CallObject) -> None:
        name, arguments = call.fresh()
        if name is not None:
            self.call(name, arguments)
        elif arguments and (self.parallel or self.num_calls == 1):
            self._pieces.append({"index": self.num_calls - 1, "function": {"arguments": arguments}})

    def call(self, name: str, arguments: str) -> None:
        """A call begins, with as much of its arguments as is known."""
        self.num_calls += 1
        if self.parallel or self.num_calls == 1:
            function = {"name": name, "arguments": arguments}
            call_id = f"call_{uuid4().hex[:24]}"
            self._pieces.append({"index": self.num_calls - 1, "id": call_id, "type": "function", "function": function})


def joined(pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with one piece for each call."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if (call := calls.setdefault(piece["index"], piece)) is not piece:
            call["function"]["arguments"] += piece["function"]["arguments"]
    return list(calls.values())
