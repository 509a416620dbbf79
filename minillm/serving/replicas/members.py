"""Members: the replicas of a fleet as the front knows them, from their start to their end. Built in chapter 22.

    STARTING  --Ready-->  READY  --remove-->  DRAINING  --its last flight ends-->  GONE
        |                   |                                    |
        +----- the process dies: it is started again ------------+          (after too many failed starts: FAILED)

All methods belong to the engine thread; the processes' own threads hand it what they hear through `post`.
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from minillm.kv_cache.sockets import Door
from minillm.serving.replicas.channel import Channel
from minillm.serving.replicas.launchers import Launcher, ReplicaProcess
from minillm.serving.replicas.messages import Answer, Call, Exit, Facts, Hello, Report, Setup

END_SECONDS = 5.0  # for a replica to end when it is told to


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"  # was removed
    FAILED = "failed"  # was given up


class ReplicaLost(RuntimeError):
    """A replica has died before it answered."""


@dataclass(eq=False)
class Member:
    """One replica. It keeps its id when its process is started again."""

    replica_id: str
    role: str  # "both", "prefill" or "decode"
    number: int  # of the replica, for its GPU
    state: State = State.STARTING
    generation: int = 0  # how often its process was started again
    process: ReplicaProcess | None = None
    channel: Channel | None = None
    facts: Facts | None = None
    report: Report | None = None
    error: str | None = None  # why its last start failed
    num_failed_starts: int = 0  # one after the other
    launched: float = 0.0  # seconds of time.monotonic
    heard: float = 0.0
    start_seconds: float | None = None  # from the launch until it was ready, of the last start
    calls: dict[int, Future[Any]] = field(default_factory=dict)

    def call(self, numbers: Iterator[int], method: str, *arguments: Any) -> Future[Any]:
        """Have the replica call one of its methods. The future raises ReplicaLost if it dies first."""
        future: Future[Any] = Future()
        if self.channel is None:
            future.set_exception(ReplicaLost(f"replica {self.replica_id} has no process"))
            return future
        number = next(numbers)
        self.calls[number] = future
        self.channel.send(Call(number, method, arguments))
        return future


class Members:
    """Starts and ends the processes of replicas, and tells `on_change` of each new state and `on_messages` of what a
    ready replica says. `post` has a function called in the engine thread."""

    def __init__(
        self,
        launcher: Launcher,
        setup: Callable[[Member], Setup],
        secret: bytes,
        post: Callable[[Callable[[], object]], object],
        on_change: Callable[[Member], object],
        on_messages: Callable[[Member, list[Any]], object],
        max_failed_starts: int,
    ):
        self.launcher, self.setup, self.secret, self.post = launcher, setup, secret, post
        self.on_change, self.on_messages, self.max_failed_starts = on_change, on_messages, max_failed_starts
        self.by_id: dict[str, Member] = {}
        self.num_restarts = 0
        self.is_closing = False
        self.numbers = itertools.count()  # of calls
        self.door = Door(secret, self._greet, launcher.host)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self.by_id.values()))

    def in_state(self, *states: State) -> list[Member]:
        return [member for member in self if member.state in states]

    def why_none(self) -> str:
        """Why no replica serves, in a sentence."""
        errors = {member.replica_id: member.error for member in self if member.error}
        told = "; ".join(f"{name}: {error}" for name, error in errors.items())
        return f"no replica serves: {told or 'all of them were removed'}"

    def add(self, number: int, role: str) -> Member:
        """Start replica `number`."""
        member = Member(f"r{number}", role, number)
        self.by_id[member.replica_id] = member
        self._launch(member)
        return member

    def drain(self, member: Member) -> None:
        """It gets no new requests; `end` it when its flights have ended."""
        if member.state is State.READY:
            self._change(member, State.DRAINING)
        elif member.state is State.STARTING:
            self.end(member)

    def end(self, member: Member) -> None:
        """Its process ends, and is not started again."""
        self._change(member, State.GONE)
        if member.channel is not None:
            member.channel.send(Exit())
        elif member.process is not None:
            member.process.kill()

    def check(self, now: float, start_seconds: float, hang_seconds: float) -> None:
        """Look for processes that died before they could be reached, that take too long to start, or that hang."""
        for member in self.in_state(State.STARTING, State.READY, State.DRAINING):
            if member.process is None:
                continue
            if member.channel is None and not member.process.is_alive():
                self._died(member, member.generation)
            elif member.state is State.STARTING and now - member.launched > start_seconds:
                member.error = f"it was not ready after start_seconds={start_seconds:g}"
                member.process.kill()
            elif member.state is not State.STARTING and now - member.heard > hang_seconds:
                member.process.kill()  # its socket closes, and its flights go on elsewhere

    def close(self) -> None:
        """End every process; those that take too long are killed. In any thread, when the engine thread has ended."""
        self.is_closing = True
        members = [member for member in self if member.process is not None]
        for member in members:
            if member.channel is not None:
                member.channel.send(Exit())
            else:
                member.process.kill()
        deadline = time.monotonic() + END_SECONDS
        for member in members:
            while member.process.is_alive() and time.monotonic() < deadline:
                time.sleep(0.01)
            member.process.kill()
            if member.channel is not None:
                member.channel.close()
        self.door.close()
        self.launcher.close()

    def _launch(self, member: Member) -> None:
        """Start its process, in a thread: that may take seconds."""
        member.launched = member.heard = time.monotonic()
        member.process = member.channel = None
        arguments = (self.door.address, self.secret, member.replica_id, member.generation)

        def start() -> None:
            try:
                process = self.launcher.start(*arguments)
            except Exception as error:
                self.post(partial(self._failed_to_launch, member, arguments[-1], f"{type(error).__name__}: {error}"))
            else:
                self.post(partial(self._launched, member, arguments[-1], process))

        threading.Thread(target=start, name=f"launch {member.replica_id}", daemon=True).start()

    def _launched(self, member: Member, generation: int, process: ReplicaProcess) -> None:
        if self.is_closing or member.state is State.GONE or member.generation != generation:
            process.kill()
        else:
            member.process = process

    def _failed_to_launch(self, member: Member, generation: int, error: str) -> None:
        member.error = error
        self._died(member, generation)

    def _greet(self, connection: Connection) -> None:
        """A process has reached the front. In a thread of its own."""
        channel = Channel(connection, lambda messages: hear(messages), lambda: lost(), "front")
        found: list[tuple[Member, int]] = []

        def hear(messages: list[Any]) -> None:
            if not found:
                hello: Hello = messages.pop(0)
                found.append((self.by_id[hello.replica_id], hello.generation))
                self.post(partial(self._met, *found[0], channel))
            if messages:
                self.post(partial(self._heard, *found[0], messages))

        def lost() -> None:
            if found:
                self.post(partial(self._died, *found[0]))

        channel.start()

    def _met(self, member: Member, generation: int, channel: Channel) -> None:
        if member.generation != generation or member.state is State.GONE or self.is_closing:
            channel.send(Exit())
            channel.close()
            return
        member.channel = channel
        channel.send(self.setup(member))

    def _heard(self, member: Member, generation: int, messages: list[Any]) -> None:
        if member.generation != generation or member.state in (State.GONE, State.FAILED):
            return
        member.heard = time.monotonic()
        others = []
        for message in messages:
            if isinstance(message, Answer):
                self._answered(member, message, others)
            elif isinstance(message, Report):
                member.report = message
            else:
                others.append(message)
        if others:
            self.on_messages(member, others)

    def _answered(self, member: Member, answer: Answer, before: list[Any]) -> None:
        """What the replica said before its answer counts before it: the tokens of a request that has left, say."""
        if before:
            self.on_messages(member, list(before))
            before.clear()
        future = member.calls.pop(answer.number)
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(RuntimeError(f"replica {member.replica_id}: {answer.error}"))

    def ready(self, member: Member, facts: Facts) -> None:
        member.facts, member.error, member.num_failed_starts = facts, None, 0
        member.start_seconds = time.monotonic() - member.launched
        self._change(member, State.READY)

    def _died(self, member: Member, generation: int) -> None:
        """Its process is gone. Unless that was wanted, another one takes its place."""
        if member.generation != generation or member.state is State.FAILED or self.is_closing:
            return
        calls, member.calls = member.calls, {}
        if member.state is not State.GONE:
            if member.process is not None:
                member.process.kill()  # only its socket may be gone
            was_starting = member.state is State.STARTING
            member.num_failed_starts += was_starting
            member.channel = None
            member.generation += 1
            given_up = member.num_failed_starts >= self.max_failed_starts
            was_draining = member.state is State.DRAINING
            self._change(member, State.FAILED if given_up else State.GONE if was_draining else State.STARTING)
            if member.state is State.STARTING:
                self.num_restarts += 1
                self._launch(member)
        for future in calls.values():
            future.set_exception(ReplicaLost(f"replica {member.replica_id} has died"))

    def _change(self, member: Member, state: State) -> None:
        member.state = state
        self.on_change(member)
