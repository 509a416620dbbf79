"""The holes in the text of chapter 23: the book's answers, and what is wrong with others. Built in chapter 23."""

from __future__ import annotations

from collections.abc import Callable


def leave(thread, request):
    thread.tell(lambda: thread.end(request))


def sse_event(data):
    return "".join(f"data: {line}\n" for line in data.split("\n")).encode() + b"\n"


def adapter_bytes(num_adapters, width, height, rank):
    merged = num_adapters * width * height * 4
    grouped = (width * height + num_adapters * rank * (width + height)) * 4
    return merged, grouped


class _Thread:
    """Stands for the toy's engine thread: notes what is called, and whether a message called it."""

    def __init__(self):
        self.messages: list[Callable[[], object]] = []
        self.ended: list[object] = []

    def tell(self, message: Callable[[], object]) -> None:
        self.messages.append(message)

    def end(self, request: object) -> None:
        self.ended.append(request)


def check_leave(function: Callable) -> str | None:
    thread, request = _Thread(), object()
    function(thread, request)
    if thread.ended:
        return "it ends the request in the caller's thread; tell the engine thread to do it"
    for message in thread.messages:
        if not callable(message):
            return f"a message is a function without arguments, and it sent {message!r}"
        message()
    if thread.ended != [request]:
        return "the engine thread has to call thread.end(request), once"
    return None


def check_event(function: Callable) -> str | None:
    for data in ("one line", '{"text": " é"}', "two\nlines", "", "ends with a line break\n"):
        got, expected = function(data), sse_event(data)
        if got != expected:
            return f"for {data!r} it returns {got!r}, expected {expected!r}"
    return None


def check_bytes(function: Callable) -> str | None:
    for arguments in ((1, 576, 576, 8), (16, 576, 1536, 8), (3, 10, 20, 2)):
        got, expected = function(*arguments), adapter_bytes(*arguments)
        if got != expected:
            return f"for {arguments} it returns {got!r}, expected {expected!r}"
    return None
