"""Checks of chapter 23 about streams: an SSE parser fed in arbitrary pieces, a client that reconnects.
Built in chapter 23."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch23_oracle import Event, Line, events_of
from minillm.book.checks.patience import within

check_event_reader = Checker(
    "event_reader",
    hint="Decode first, with a decoder that remembers unfinished characters; then collect lines; then fields.",
)
check_resume = Checker(
    "resume",
    hint="Remember the tokens that were yielded; ask for what follows them; skip what is repeated.",
)

# 2 · the parser

_HINTS = (
    (b"\xef\xbb\xbf", "A byte order mark at the very beginning of the stream is skipped; the codec utf-8-sig does it."),
    (b"\xff", "Bytes that are not UTF-8 become U+FFFD; the decoder's mode is 'replace'."),
    (b"\r", "CRLF, CR and LF each end a line; CR and LF in two pieces are still one line end."),
)


@check_event_reader.part("example")
def _reader_example(case: Case) -> None:
    _reads(case, [b'data: {"text": "Once"}\n\ndata: {"te', b'xt": " upon"}\n\n', b"data: [DONE]\n\n"])
    _reads(case, [b"event: error\ndata: one\ndata: two\n\n: still here\n\nid: 7\ndata: three\n\n"])
    _reads(case, _one_by_one("data: Café ☕\n\n".encode()))


@check_event_reader.part("edges")
def _reader_edges(case: Case) -> None:
    _reads(case, [])
    _reads(case, [b"", b"data: a\n\n", b""])
    _reads(case, [b"data: a\r", b"\ndata: b\r", b"\n\r", b"\ndata: c\r\n\r\n"])  # CRLF in two pieces
    _reads(case, [b"data: a\r\rdata: b\r", b"\r", b"data: c\n\r\n"])  # CR alone
    _reads(case, [b"data: a\r\r"])  # complete at once: no LF has to be waited for
    _reads(case, [b"\xef\xbb", b"\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n"])  # the mark is skipped at the beginning only
    _reads(case, [b"data: a\xff\xc3", b"(\n\ndata: \xe2\x82", b"\xac\n\n"])
    _reads(case, [b"data\n\ndata:\ndata:\n\ndata:  two spaces \n\ndata:a:b\n\n"])
    _reads(case, [b"event: x\n\ndata: plain\n\nevent: y\ndata: typed\n\nevent:\ndata: plain\n\n"])
    _reads(case, [b"id: 1\ndata: a\n\ndata: b\n\nid\ndata: c\n\nid: 2\n\ndata: d\n\nid: 3\x00\ndata: e\n\n"])
    _reads(case, [b"retry: 1500\nretry: 2s\nretry:\nretry: -1\nretry: \xd9\xa3\n\n"])
    _reads(case, [b":\n: a comment\n:data: b\n\ndata: a\n:between\ndata: b\n\n unknown: c\nDATA: d\n\n"])
    _reads(case, ["data: one\u2028two\x0bthree\x85\u2029\n\n".encode()])  # ends of lines elsewhere, not here
    _reads(case, [b"data: a\n\ndata: [DONE]\n\ndata: b\n\nretry: 3\n\n", b": c\n\ndata: d\n\n"])
    _reads(case, [b"event: end\nid: 5\ndata: [DONE]\n\ndata: b\n\n"])  # its type does not matter
    _reads(case, [b"data: [DONE]\ndata:\n\ndata: [DONE] \n\ndata: b\n\n"])  # not quite the end
    _reads(case, [b"data: never ended\n"])
    line = b"data: " + b"x" * 300_000 + b"\n\n"
    with within(case, "a line of 300,000 bytes, one at a time", "Keep the parts of a line in a list; join them once."):
        reader = case.run(case.student)
        got = [event for byte in _one_by_one(line) for event in reader.feed(byte)]
    case.equal(len(got), 1, "the number of events in one long line")
    many = b"data: a\n\n" * 150_000
    with within(case, "150,000 events in one piece", "Split a piece once; do not cut its beginning off line by line."):
        got = case.run(case.student).feed(many)
    case.equal(len(got), 150_000, "the number of events in one long piece")


@check_event_reader.part("random")
def _reader_random(case: Case) -> None:
    parts = [
        *(b"data: ", b"data:", b"data", b"event: e", b"id: ", b"id: 4", b"retry: 20", b": ", b":", b"x", b" "),
        *(
            b"\n",
            b"\n",
            b"\n\n",
            b"\r\n",
            b"\r\n\r\n",
            b"\r",
            "é".encode(),
            "☕".encode(),
            b"\xe2\x98",
            b"\xef\xbb\xbf",
        ),
    ]
    for _ in range(250):
        stream = b"".join(case.rng.choice(parts) for _ in range(case.randint(1, 30)))
        if case.rng.random() < 0.2:
            stream += b"\n\ndata: [DONE]\n\ndata: more\n\n"
        _reads(case, _cut(case, stream))


def _one_by_one(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


def _cut(case: Case, data: bytes) -> list[bytes]:
    cuts = sorted(case.randint(0, len(data) + 1) for _ in range(case.randint(0, 8)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)])]


def _reads(case: Case, pieces: list[bytes]) -> None:
    """Events, in the call that completes each; and what the reader knows then."""
    reader, whole = case.run(case.student), b""
    told = f"the pieces {pieces!r}" if sum(map(len, pieces)) < 160 else "these pieces"
    seen: list[Event] = []
    for number, piece in enumerate(pieces):
        whole += piece
        got = case.run(reader.feed, piece)
        case.is_a(got, list, "what feed returns")
        # A character that is not complete yet belongs to a line that is not complete either.
        expected, retry, is_done, comments = events_of(whole)
        hint = next((said for mark, said in _HINTS if mark in whole), None)
        if len(got) > len(expected) - len(seen) and b"[DONE]" in whole:
            hint = "An event whose data is exactly [DONE] ends the stream: nothing after it counts."
        elif [event[1] for event in got] == [event.data for event in expected[len(seen) :]]:
            hint = "A type lasts for one event and is then 'message' again; an id lasts until the next one."
        got = [tuple(event) for event in got]
        case.equal(
            got, [tuple(event) for event in expected[len(seen) :]], f"the events of piece {number} of {told}", hint=hint
        )
        seen = expected
        case.equal(
            reader.retry_ms,
            retry,
            f"retry_ms after piece {number} of {told}",
            hint="Use a value of the digits 0 to 9 alone; ignore any other.",
        )
        case.equal(reader.is_done, is_done, f"is_done after piece {number} of {told}", hint=hint)
        case.equal(reader.num_comments, comments, f"num_comments after piece {number} of {told}", hint=hint)


# 6 · the client that reconnects

WAITS = (0.5, 30.0)  # seconds before the first attempt, and at most


class _Server:
    """Hands out prepared connections, and notes what it was asked for."""

    def __init__(self, case: Case, connections: list[Any]):
        self.case, self.connections, self.made, self.asked = case, connections, [], []
        self.waits: list[float] = []

    def connect(self, last_id: int | None) -> Iterable[tuple[int, str | None]]:
        self.asked.append(last_id)
        if len(self.asked) > len(self.connections):
            self.case.fail(f"connect was called {len(self.asked)} times; {len(self.connections)} would have been right")
        made = self.connections[len(self.asked) - 1]
        if made is None:
            raise ConnectionError("no connection")
        self.made.append(made)
        return made

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def check_closed(self) -> None:
        for number, line in enumerate(self.made):
            self.case.equal(
                line.num_closed,
                1,
                f"how often connection {number} of {len(self.made)} was closed",
                hint="Close each connection exactly once, however it ended: try ... finally.",
            )


def _play(case: Case, connections: list[Any], asked: list[int | None], waits: list[float], most: int = 3) -> list[str]:
    """The tokens until the generator ends; an error that the statement asks for is the last element, as its type."""
    server, got = _Server(case, connections), []
    answer = case.run(case.student, server.connect, server.sleep, most)
    try:
        got.extend(answer)  # what came before an error is kept
    except (LookupError, ValueError, ConnectionError) as error:
        got.append(type(error).__name__)
    case.equal(
        server.asked,
        asked,
        "the ids that connect was called with",
        hint="None at first; then the id of the last token that was yielded.",
    )
    case.equal(
        server.waits,
        waits,
        "the seconds that were slept",
        hint="Sleep min(30, 0.5 * 2**f) s before the next attempt, with f fruitless attempts in a row.",
    )
    server.check_closed()
    return got


def _says(case: Case, got: list[str], expected: list[str]) -> None:
    hint = "A connection may repeat tokens with ids that you have: skip them, and compare them." if got else None
    case.equal(got, expected, "the tokens", hint=hint)


def _story(count: int) -> list[tuple[int, str | None]]:
    return [*((place, f"t{place} ") for place in range(count)), (count, None)]


def _texts(count: int) -> list[str]:
    return [f"t{place} " for place in range(count)]


@check_resume.part("example")
def _resume_example(case: Case) -> None:
    story = _story(6)
    _says(case, _play(case, [Line(story, False)], [None], []), _texts(6))
    lines = [Line(story[:3], True), Line(story[3:], False)]
    _says(case, _play(case, lines, [None, 2], [0.5]), _texts(6))
    lines = [Line(story[:3], True), Line(story[1:], False)]  # the server repeats two tokens
    _says(case, _play(case, lines, [None, 2], [0.5]), _texts(6))


@check_resume.part("edges")
def _resume_edges(case: Case) -> None:
    story = _story(4)
    _says(case, _play(case, [Line(_story(0), False)], [None], []), [])
    _says(case, _play(case, [None, Line(story, False)], [None, None], [1.0]), _texts(4))
    lines = [Line(story[:2], False), Line(story, False)]  # ended without its last event: lost, too
    _says(case, _play(case, lines, [None, 1], [0.5]), _texts(4))
    lines = [Line(story[:2], True), Line(story[:2], True), None, Line(story, False)]  # two fruitless ones
    _says(case, _play(case, lines, [None, 1, 1, 1], [0.5, 1.0, 2.0]), _texts(4))
    lines = [Line(story[:1], True), None, Line(story[:2], True), None, None, Line(story, True)]
    _says(case, _play(case, lines, [None, 0, 0, 1, 1, 1], [0.5, 1.0, 0.5, 1.0, 2.0]), _texts(4))
    _says(case, _play(case, [None] * 3, [None] * 3, [1.0, 2.0]), ["ConnectionError"])
    _says(case, _play(case, [Line([], True)] * 1, [None], [], most=1), ["ConnectionError"])
    lines = [Line(story[:2], True), None, None]
    _says(case, _play(case, lines, [None, 1, 1], [0.5, 1.0], most=2), [*_texts(2), "ConnectionError"])
    _says(
        case,
        _play(case, [None] * 9 + [Line(story, False)], [None] * 10, [1.0, 2.0, 4.0, 8.0, 16.0] + [30.0] * 4, most=20),
        _texts(4),
    )
    lines = [Line(story[:2], True), Line(story[3:], False)]  # token 2 is gone
    _says(case, _play(case, lines, [None, 1], [0.5]), [*_texts(2), "LookupError"])
    _says(case, _play(case, [Line(story[1:], False)], [None], []), ["LookupError"])
    _says(case, _play(case, [Line([*story[:2], story[4]], False)], [None], []), [*_texts(2), "LookupError"])
    lines = [Line(story[:2], True), Line([(0, "t0 "), (1, "other "), (2, "t2 ")], False)]  # another answer
    _says(case, _play(case, lines, [None, 1], [0.5]), [*_texts(2), "ValueError"])
    lines = [Line(story[:3], True), Line([(2, None)], False)]  # it ends where a token was
    _says(case, _play(case, lines, [None, 2], [0.5]), [*_texts(3), "ValueError"])
    server = _Server(case, [Line(story, False)])
    answer = case.run(case.student, server.connect, server.sleep, 3)
    case.equal(len(server.asked), 0, "the connections before the first token is asked for", hint="A generator is lazy.")
    case.equal(next(answer), "t0 ", "the first token")
    case.equal(
        server.made[0].given, 1, "the events read for one token", hint="Yield each token before you read the next pair."
    )
    answer.close()
    server.check_closed()


@check_resume.part("random")
def _resume_random(case: Case) -> None:
    for _ in range(120):
        count = case.randint(0, 12)
        story, lines, asked, waits, have, failures = _story(count), [], [], [], 0, 0
        while True:
            asked.append(have - 1 if have else None)
            if case.rng.random() < 0.25:
                lines.append(None)
                new = 0
            else:
                start, end = case.randint(0, have + 1), case.randint(have, count + 2)
                lines.append(Line(story[start:end], end <= count and case.rng.random() < 0.7))
                new = min(end, count) - have
                if end > count:
                    break
            have, failures = have + new, 0 if new else failures + 1
            waits.append(min(WAITS[1], WAITS[0] * 2**failures))
        _says(case, _play(case, lines, asked, waits, most=10**6), _texts(count))
