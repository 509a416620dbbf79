"""The check of chapter 23's parser of server-sent events, fed in arbitrary pieces. Built in chapter 23."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from minillm.book.checks import Case, Draw
from minillm.book.checks.beside import ClassChecker, Story
from minillm.book.checks.patience import within


class Event(NamedTuple):
    """One event of a stream: its type, its data, and the last id that the stream has named."""

    type: str
    data: str
    id: str


class Reader:
    """Reads all that came so far anew, and returns what is new. The keywords are mistakes."""

    def __init__(
        self, *, codec: str = "utf-8-sig", each: bool = False, waits: bool = False, type_lasts: bool = False,
        id_lasts: bool = True, ends: bool = True, end_type: bool = True, end_line: str = "is", strips: bool = False,
        digits: bool = False, any_id: bool = False, empty: str = "counts", unicode_lines: bool = False,
    ) -> None:  # fmt: skip
        self.retry_ms, self.num_comments, self.is_done = None, 0, False
        self.whole, self.seen, self.codec, self.each, self.waits = [], 0, codec, each, waits
        self.type_lasts, self.id_lasts, self.ends, self.end_type = type_lasts, id_lasts, ends, end_type
        self.end_line, self.strips, self.digits, self.any_id = end_line, strips, digits, any_id
        self.empty, self.unicode_lines = empty, unicode_lines

    def feed(self, data: bytes) -> list[Event]:
        self.whole.append(data)
        events = self.events()
        new, self.seen = events[self.seen :], len(events)
        return new

    def events(self) -> list[Event]:
        """All events of the stream so far."""
        if self.each:
            text = "".join(piece.decode("utf-8", "replace") for piece in self.whole)
        else:
            text = b"".join(self.whole).decode(self.codec, "replace")
        if self.waits and text.endswith("\r"):
            text = text[:-1]
        if self.unicode_lines:
            text = "".join("\n" if sign in "\x0b\x0c\x85\u2028\u2029" else sign for sign in text)
        self.retry_ms, self.num_comments, self.is_done = None, 0, False
        events, kind, parts, last = [], "", [], ""
        for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]:
            if self.is_done and self.ends:
                break
            name, _, value = line.partition(":")
            value = value.strip() if self.strips else value.removeprefix(" ")
            if not line:
                first = parts[:1] if self.end_line == "begins" else parts
                self.is_done = self.is_done or (first == ["[DONE]"] and (self.end_type or not kind))
                there = {"counts": bool(parts), "is none": any(parts), "is one": True}[self.empty]
                if there and not (self.is_done and first == ["[DONE]"]):
                    events.append(Event(kind or "message", "\n".join(parts), last))
                kind, parts, last = kind if self.type_lasts else "", [], last if self.id_lasts else ""
            elif not name:
                self.num_comments += 1
            elif name == "data":
                parts.append(value)
            elif name == "event":
                kind = value
            elif name == "id" and ("\0" not in value or self.any_id):
                last = value
            elif name == "retry" and value.isdigit() and (value.isascii() or self.digits):
                self.retry_ms = int(value)
        return events


_HINTS = (
    (b"\xef\xbb\xbf", "A byte order mark at the very beginning of the stream is skipped; the codec utf-8-sig does it."),
    (b"\xff", "Bytes that are not UTF-8 become U+FFFD; the decoder's mode is 'replace'."),
    (b"\r", "CRLF, CR and LF each end a line; CR and LF in two pieces are still one line end."),
)


def _why(got: Any, expected: Any, reader: Reader, call: tuple) -> str | None:
    """What is particular about the bytes so far."""
    whole = b"".join([*reader.whole, call[1]])
    return next((said for mark, said in _HINTS if mark in whole), None)


def _fed(*pieces: bytes) -> Story:
    return Story((), [("feed", piece) for piece in pieces])


def _one_by_one(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


def _fast(case: Case) -> None:
    """Long texts: an answer that copies them for each piece or line takes too long, a good one a tenth of the limit."""
    pieces = [b"data: ", *[b"x" * 25] * 120_000, b"\n\n"]
    with within(
        case, "a line of three million bytes, 25 at a time", "Keep the parts of a line in a list; join them once."
    ):
        reader = case.run(case.student)
        got = [event for piece in pieces for event in reader.feed(piece)]
    case.equal(len(got), 1, "the number of events in one long line")
    many = (b"data: " + b"a" * 92 + b"\n\n") * 40_000
    with within(case, "40,000 events in one piece", "Split a piece once; do not cut its beginning off line by line."):
        got = case.run(case.student).feed(many)
    case.equal(len(got), 40_000, "the number of events in one long piece")


_PARTS: Sequence[bytes] = (
    b"data: ", b"data:", b"data", b"event: e", b"id: ", b"id: 4", b"retry: 20", b": ", b":", b"x", b" ", b"\n", b"\n",
    b"\n\n", b"\r\n", b"\r\n\r\n", b"\r", "é".encode(), "☕".encode(), b"\xe2\x98", b"\xef\xbb\xbf",
)  # fmt: skip


def _random(draw: Draw) -> Story:
    stream = b"".join(draw.rng.choice(_PARTS) for _ in range(draw.randint(1, 30)))
    if draw.rng.random() < 0.2:
        stream += b"\n\ndata: [DONE]\n\ndata: more\n\n"
    cuts = sorted(draw.randint(0, len(stream) + 1) for _ in range(draw.randint(0, 8)))
    return _fed(*(stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)])))


check_event_reader = ClassChecker(
    "event_reader",
    Reader,
    what="reader",
    shows=("retry_ms", "is_done", "num_comments"),
    observe=lambda got, call: [tuple(event) for event in got] if isinstance(got, list) else got,
    examples=[
        _fed(b'data: {"text": "Once"}\n\ndata: {"te', b'xt": " upon"}\n\n', b"data: [DONE]\n\n"),
        _fed(b"event: error\ndata: one\ndata: two\n\n: still here\n\nid: 7\ndata: three\n\n"),
        _fed(*_one_by_one("data: Café ☕\n\n".encode())),
    ],
    edges={
        "a piece is empty": _fed(b"", b"data: a\n\n", b""),
        "CR and LF come in two pieces": _fed(b"data: a\r", b"\ndata: b\r", b"\n\r", b"\ndata: c\r\n\r\n"),
        "lines end with CR alone": _fed(b"data: a\r\rdata: b\r", b"\r", b"data: c\n\r\n"),
        "a line that ends with CR is complete at once: no LF has to be waited for": _fed(b"data: a\r\r"),
        "a byte order mark comes in two pieces; it is skipped at the beginning only": _fed(
            b"\xef\xbb", b"\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n"
        ),
        "some bytes are not UTF-8": _fed(b"data: a\xff\xc3", b"(\n\ndata: \xe2\x82", b"\xac\n\n"),
        "values are empty, begin with two spaces, or hold a colon": _fed(
            b"data\n\ndata:\ndata:\n\ndata:  two spaces \n\ndata:a:b\n\n"
        ),
        "an event without data has a type": _fed(
            b"event: x\n\ndata: plain\n\nevent: y\ndata: typed\n\nevent:\ndata: plain\n\n"
        ),
        "ids last, are emptied, and hold a NUL": _fed(
            b"id: 1\ndata: a\n\ndata: b\n\nid\ndata: c\n\nid: 2\n\ndata: d\n\nid: 3\x00\ndata: e\n\n"
        ),
        "a value of `retry` has to be of the digits 0 to 9 alone; any other is ignored": _fed(
            b"retry: 1500\nretry: 2s\nretry:\nretry: -1\nretry: \xd9\xa3\n\n"
        ),
        "there are comments and unknown names": _fed(
            b":\n: a comment\n:data: b\n\ndata: a\n:between\ndata: b\n\n unknown: c\nDATA: d\n\n"
        ),
        "there are ends of lines that are none here: split at CRLF, CR and LF only": _fed(
            "data: one\u2028two\x0bthree\x85\u2029\n\n".encode()
        ),
        "the stream goes on after [DONE]: nothing after it counts": _fed(
            b"data: a\n\ndata: [DONE]\n\ndata: b\n\nretry: 3\n\n", b": c\n\ndata: d\n\n"
        ),
        "[DONE] has a type, which does not matter": _fed(b"event: end\nid: 5\ndata: [DONE]\n\ndata: b\n\n"),
        "the data is not exactly [DONE]": _fed(b"data: [DONE]\ndata:\n\ndata: [DONE] \n\ndata: b\n\n"),
        "the last event never ends": _fed(b"data: never ended\n"),
    },
    also={"edges": _fast},
    random=_random,
    trials=250,
    explain=_why,
    hint="Decode first, with a decoder that remembers unfinished characters; then collect lines; then fields.",
    misconceptions={
        "A byte order mark at the very beginning is skipped; the codec utf-8-sig does it.": dict(codec="utf-8"),
        "A character may come in two pieces: one decoder for the whole stream remembers the first half.": dict(
            each=True
        ),
        "A CR at the end of a piece ends its line at once, whatever comes next.": dict(waits=True),
        "Only CRLF, CR and LF end a line; str.splitlines knows more.": dict(unicode_lines=True),
        "A type lasts for one event and is then 'message' again.": dict(type_lasts=True),
        "An id lasts until the next one.": dict(id_lasts=False),
        "An event whose data is exactly [DONE] ends the stream: nothing after it counts.": dict(ends=False),
        "An event whose data is [DONE] ends the stream, whatever its type is.": dict(end_type=False),
        "The whole data has to be [DONE], not its first line alone.": dict(end_line="begins"),
        "One space after the colon is dropped, and no other one.": dict(strips=True),
        "A value of `retry` is of the digits 0 to 9 alone; str.isdigit knows others.": dict(digits=True),
        "An id with a NUL character is ignored.": dict(any_id=True),
        "An event without a data line is not returned.": dict(empty="is one"),
        "An event with a data line is returned, also where the data is empty.": dict(empty="is none"),
    },
)
