"""The conversation with the process that runs a submission: what it says, what of it is believed, what it is given."""

from __future__ import annotations

import json
import secrets
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minillm.course.grading.confine import Limits
from minillm.course.grading.plan import Source, Step

GRACE = 10.0  # seconds beyond a limit before the process is stopped from outside
_LINE = 1 << 20  # bytes of a message
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_SAYS_WHO = getattr(socket, "SCM_CREDENTIALS", None)
_SPACE = socket.CMSG_SPACE(_CREDENTIALS.size)
_OF_JUDGE, _OF_ANY = ("part", "verdict", "stub"), ("seen", "modules")
Seeds = Callable[[str, str], int]


@dataclass
class Verdict:
    """Of one graded line. message: why it did not pass."""

    passed: bool
    message: str
    seconds: float = 0.0


@dataclass
class Event:
    """What the process saw while it ran: in a cell and line of the submission, or in an exercise's graded lines."""

    reason: str
    refused: bool
    cell: int = -1
    line: int = 0
    exercise: str = ""


@dataclass
class Outcome:
    """All that is known of one submission after it has run.

    verdicts: (exercise, part) -> verdict. errors: cell -> what it raised, and in which line. given_errors: what the
    lecturer's locked cells raised. broken: why it could not run at all, through no fault of the student's.
    """

    verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)
    errors: dict[int, tuple[str, int]] = field(default_factory=dict)
    given_errors: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    walls: str = ""  # what shut it in: "namespaces", "landlock", or "none" but Python
    modules: set[str] = field(default_factory=set)  # imported while it ran, where that was asked for
    notes: list[str] = field(default_factory=list)
    broken: str = ""
    forged: bool = False  # other code than our own spoke in the process's name

    @property
    def failed(self) -> list[tuple[str, str]]:
        """(exercise, part) of the lines that did not pass."""
        return [line for line, verdict in self.verdicts.items() if not verdict.passed]

    def fail_rest(self, exercise: str, parts: Sequence[str], why: str) -> None:
        """The lines of an exercise that have no verdict have not passed."""
        for part in parts:
            self.verdicts.setdefault((exercise, part), Verdict(False, why))


class Reader:
    """Lines of a socket that begin with the token; all others are dropped, since a student's code may write there."""

    def __init__(self, channel: socket.socket, token: str) -> None:
        self._channel, self._token, self._buffer = channel, token, b""

    def lines(self, deadline: Callable[[], float]) -> Iterator[tuple[int | None, list[str]]]:
        """Each with the id of the process that wrote it, as the kernel has it; None where the kernel does not say.

        Until the stream ends. Raises TimeoutError at the deadline, OSError where the stream breaks."""
        while True:
            left = deadline() - time.monotonic()
            ready, _, _ = select.select([self._channel], [], [], max(0.0, left))
            if not ready or left <= 0:
                raise TimeoutError
            data, told, _, _ = self._channel.recvmsg(1 << 16, _SPACE)
            if not data:
                return
            pid = next((_CREDENTIALS.unpack(c)[0] for _, kind, c in told if kind == _SAYS_WHO), None)
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            if len(self._buffer) > _LINE:
                raise TimeoutError
            yield from ((pid, fields) for fields in map(self._fields, lines) if fields)

    def _fields(self, line: bytes) -> list[str] | None:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            return None
        known = isinstance(fields, list) and fields and all(isinstance(f, str) for f in fields)
        is_ours = known and secrets.compare_digest(fields[0].encode("utf-8", "replace"), self._token.encode())
        return fields[1:] if is_ours else None


class Talk:
    """With one process, from its first message to its last. at: the step that it is in; done: it came to the end."""

    def __init__(self, source: Source, limits: Limits, steps: dict[int, Step], outcome: Outcome, seeds: Seeds) -> None:
        self.source, self.limits, self.steps, self.outcome, self.seeds = source, limits, steps, outcome, seeds
        self.at: int | None = None
        self._due = list(steps)  # each begins once, in this order
        self.done, self._nonce, self._end = False, "", time.monotonic() + 60
        self._runs: int | None = None  # the process that runs the cells, and the one that judges now
        self._judges: int | None = None

    def listen(self, channel: socket.socket, token: str) -> str:
        """Until the process ends; why it has to be stopped, empty where it ended by itself."""
        self._channel = channel
        try:
            for pid, (kind, *fields) in Reader(channel, token).lines(lambda: self._end):
                if not (self._is_speaker(pid, kind) and self._believes(kind, fields)):
                    return self._forged()
        except TimeoutError:
            return "it did not end in time and was stopped from outside"
        except OSError:
            return ""
        return ""

    def _is_speaker(self, pid: int | None, kind: str) -> bool:
        """Whether this process may say so: the one that spoke first, and its only child where an exercise is judged."""
        if pid is None or kind in _OF_ANY:
            return True
        self._runs = self._runs or pid  # before the first cell only our own code runs
        if kind == "ready":
            self._judges = pid if pid != self._runs and _only_child(self._runs) in (pid, None) else -1
        return pid == (self._judges if kind == "ready" or kind in _OF_JUDGE else self._runs)

    def _believes(self, kind: str, fields: list[str]) -> bool:
        """Take a message; False for one that our own code does not send at this place."""
        in_place = {
            "broken": self.at is None,
            "confined": self.at is None,
            "begin": bool(self._due) and fields[:1] == [str(self._due[0])],
            "end": fields[:1] == [str(self.at)],
            "judged": fields[:1] == [str(self.at)],
            "done": not self._due,
        }
        handler = getattr(self, f"_on_{kind}", None)
        if handler is None or self.done or not in_place.get(kind, kind == "modules" or self.at is not None):
            return False
        try:
            handler(*fields)
        except (TypeError, ValueError):  # other fields than ours
            return False
        return True

    def _forged(self) -> str:
        """Nothing that this process said counts."""
        self.outcome.forged = True
        self.outcome.verdicts.clear()
        self.outcome.events.append(Event("speaks to the grader in the grader's own name", True))
        return "it spoke out of turn and was stopped"

    def _on_broken(self, why: str) -> None:
        self.outcome.broken = clean(why)

    def _on_confined(self, walls: str, *wrong: str) -> None:
        self.outcome.walls, self.outcome.notes = walls, list(wrong)

    def _on_begin(self, index: str) -> None:
        self.at, self._nonce = self._due.pop(0), ""
        step = self.steps[self.at]
        if step.kind == "grade":  # each line has an alarm of its own, and the empty stub is tried as well
            count = len(self.source.exercises[step.exercise].lines) + 1
            self._end = time.monotonic() + count * (self.limits.line_seconds + GRACE)
        else:
            self._end = time.monotonic() + self.limits.cell_seconds + GRACE

    def _on_end(self, index: str, seconds: str, error: str, line: str, *changed: str) -> None:
        step = self.steps[int(index)]
        if error and step.kind == "given":
            self.outcome.given_errors.append(clean(error))
        elif error:
            self.outcome.errors[step.cell] = (clean(error), int(line))
        self._note_changes(changed, step)

    def _on_ready(self, exercise: str) -> None:
        if self._nonce or self.steps[self.at].exercise != exercise:
            return
        self._nonce = secrets.token_hex(16)
        seeds = [str(self.seeds(exercise, part)) for part in self.source.exercises[exercise].lines]
        self._channel.sendall(" ".join([self._nonce, *seeds]).encode() + b"\n")

    def _on_part(self, nonce: str, part: str, *put_back: str) -> None:
        """A line begins."""
        for name in put_back:
            reason = f"sets {clean(name)} for all that runs after it; for the check it was put back"
            event = Event(reason, False, exercise=self.steps[self.at].exercise)
            self.outcome.events += [event] if event not in self.outcome.events else []

    def _on_verdict(self, nonce: str, part: str, passed: str, seconds: str, message: str, *changed: str) -> None:
        step = self.steps[self.at]
        if self._nonce and secrets.compare_digest(nonce, self._nonce):
            verdict = Verdict(passed == "yes", clean(message), float(seconds))
            self.outcome.verdicts.setdefault((step.exercise, part), verdict)
            self._note_changes(changed, step)

    def _on_stub(self, nonce: str, part: str) -> None:
        if part:
            reason = "makes the check pass for an empty answer too: something that it calls was changed"
            self.outcome.events.append(Event(reason, True, exercise=self.steps[self.at].exercise))

    def _on_seen(self, reason: str, level: str, cell: str, line: str) -> None:
        step = self.steps[self.at]
        at = int(cell) if int(cell) >= 0 else step.cell
        self.outcome.events.append(Event(clean(reason), level == "refused", at, int(line), step.exercise))

    def _on_judged(self, index: str, code: str, late: str) -> None:
        name = self.steps[int(index)].exercise
        why = f"the answer ended the process while it was checked: {ended(int(code))}"
        if late:
            why = f"the check took more than {self.limits.line_seconds:g} s and was stopped"
        self.outcome.fail_rest(name, list(self.source.exercises[name].lines), why)

    def _on_modules(self, *names: str) -> None:
        self.outcome.modules.update(names)

    def _on_done(self) -> None:
        self.done = True

    def _note_changes(self, changed: Sequence[str], step: Step) -> None:
        for name in changed:
            reason = f"changes {clean(name)}, which the checks rely on; it was put back"
            self.outcome.events.append(Event(reason, True, step.cell, 0, step.exercise))


def know_speakers(channel: socket.socket) -> None:
    """Have the kernel say of each message which process wrote it, from now on."""
    if _SAYS_WHO is not None:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def _only_child(pid: int) -> int | None:
    """-1 where it has none or several; None where the kernel does not list them."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return None
    return int(found[0]) if len(found) == 1 else -1


def clean(text: str) -> str:
    """Without what no file can hold (half of a surrogate pair) and what moves a terminal's cursor."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def ended(code: int) -> str:
    """The end of a process in words; `code` as `os.waitstatus_to_exitcode` gives it, or 128 + the signal."""
    number = -code if code < 0 else code - 128
    if number <= 0:
        return f"exit status {code}"
    known = number in {s.value for s in signal.Signals}
    return f"killed by {signal.Signals(number).name if known else f'signal {number}'}"
