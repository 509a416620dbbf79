"""Broadcast: one process writes messages into shared memory, several read them. Built in chapter 20.

    memory   | written | read by 0 | read by 1 | ...  | bytes of the messages, written over again from the start |
                 100        100         64                      readers 0 is idle, reader 1 is 36 bytes behind

A message is pickled and written once, whatever the number of readers. The counters only grow; the writer waits for the
slowest reader where there is no room. So that no process spins, the writer rings a bell of each reader, a socket, and a
reader without a message waits for it. The memory is a file without a name: it is gone with the last process that has
it.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

CAPACITY = 2**20  # bytes of messages under way; a step is some kilobytes, and a longer message goes in pieces
WORD = 8
DRAIN_EVERY = 64  # messages: bells that a busy reader has not waited for


def shared_memory(num_bytes: int) -> int:
    """A file descriptor of that much memory, which has no name in any folder."""
    if sys.platform == "linux":
        fd = os.memfd_create("minillm", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, num_bytes)
    return fd


class Ring:
    """The memory of a broadcast, as writer and readers have it. `fd` stays the caller's."""

    def __init__(self, fd: int, num_readers: int, capacity: int = CAPACITY):
        self.capacity, start = capacity, WORD * (1 + num_readers)
        self.memory = mmap.mmap(fd, self.num_bytes(num_readers, capacity))
        self.counters = memoryview(self.memory)[:start].cast("Q")  # written, then what each reader has read
        self.data = memoryview(self.memory)[start:]

    @staticmethod
    def num_bytes(num_readers: int, capacity: int = CAPACITY) -> int:
        return WORD * (1 + num_readers) + capacity

    def put(self, at: int, piece: memoryview) -> None:
        """Copy a piece to where byte `at` of all that was ever written stands."""
        place = at % self.capacity
        first = min(len(piece), self.capacity - place)
        self.data[place : place + first] = piece[:first]
        self.data[: len(piece) - first] = piece[first:]

    def get(self, at: int, count: int) -> bytes:
        place = at % self.capacity
        first = min(count, self.capacity - place)
        return bytes(self.data[place : place + first]) + bytes(self.data[: count - first])

    def close(self) -> None:
        self.counters.release()
        self.data.release()
        self.memory.close()


class Writer:
    """Writes messages for all readers. `bells`: a connection to each.

    A write that an interrupt ends has written the message or not, unless the message was longer than the memory: then
    `is_torn`, and no reader can go on.
    """

    def __init__(self, ring: Ring, bells: Sequence[Connection]):
        self.ring, self.bells, self.is_torn = ring, bells, False

    def write(self, message: bytes, check: Callable[[], object] = lambda: None) -> None:
        """`check` is called while there is no room, and raises where a reader will never make any."""
        whole = memoryview(len(message).to_bytes(WORD, "little") + message)
        self.is_torn = len(whole) > self.ring.capacity
        position = 0
        while position < len(whole):
            piece = whole[position : position + self.ring.capacity]
            self._wait_for_room(len(piece), check)
            written = self.ring.counters[0]
            self.ring.put(written, piece)
            self.ring.counters[0] = written + len(piece)
            position += len(piece)
            self._ring_bells()
        self.is_torn = False

    def _wait_for_room(self, count: int, check: Callable[[], object]) -> None:
        counters, pause = self.ring.counters, 20e-6
        while counters[0] - min(counters[1:]) + count > self.ring.capacity:
            check()
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _ring_bells(self) -> None:
        for bell in self.bells:
            try:
                bell.send_bytes(b"")
            except OSError:  # it is gone; the wait for its answer finds that out
                continue


class Reader:
    """Reads every message, in order. Raises EOFError where the writer is gone."""

    def __init__(self, ring: Ring, index: int, bell: Connection):
        self.ring, self.index, self.bell, self.num_read = ring, 1 + index, bell, 0

    def has_message(self) -> bool:
        return self.ring.counters[0] != self.ring.counters[self.index]

    def read(self) -> bytes:
        """The next message; waits for it."""
        self.num_read += 1
        if self.num_read % DRAIN_EVERY == 0:
            while self.bell.poll():
                self.bell.recv_bytes()
        return self._take(int.from_bytes(self._take(WORD), "little"))

    def _take(self, count: int) -> bytes:
        counters, index, parts = self.ring.counters, self.index, []
        while count:
            read = counters[index]
            if not (there := min(count, counters[0] - read)):
                self.bell.recv_bytes()
                continue
            parts.append(self.ring.get(read, there))
            counters[index] = read + there
            count -= there
        return parts[0] if len(parts) == 1 else b"".join(parts)
