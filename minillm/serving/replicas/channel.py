"""Channel: messages over one connection, in order, without waiting. Built in chapter 22.

    any thread   send      appends to a queue
    sender       one write for all that is queued: a step's tokens of all requests are one packet
    reader       on_messages(list), then on_close() when the other side is gone, however it went

A process that is killed closes its sockets, so its death is known at once and not after a time-out.
"""

from __future__ import annotations

import pickle
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


class Channel:
    """Both ends are the same. `connection` comes from a `Door` or from `connect`: the other side knows the
    secret, so what it sends may be unpickled."""

    def __init__(
        self,
        connection: Connection,
        on_messages: Callable[[list[Any]], object],
        on_close: Callable[[], object],
        name: str,
    ):
        self.connection, self.on_messages, self.on_close = connection, on_messages, on_close
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"{name} {what}", daemon=True)
            for run, what in ((self._read, "reader"), (self._write, "sender"))
        ]

    def start(self) -> Channel:
        for thread in self._threads:
            thread.start()
        return self

    def send(self, message: Any) -> None:
        """Never waits. What is sent to a side that is gone is lost: `on_close` says so. Raises what pickle raises."""
        self._queue.put(pickle.dumps(message, protocol=5))  # as it is now: its owner may go on to change it

    def close(self) -> None:
        """Send what is queued, then close."""
        self._queue.put(None)

    def join(self, timeout: float) -> None:
        """Wait until all that was sent before `close` is written."""
        self._threads[1].join(timeout)

    def _write(self) -> None:
        open_ = True
        while open_:
            messages = [self._queue.get()]
            with suppress(queue.Empty):
                while True:
                    messages.append(self._queue.get_nowait())
            if None in messages:
                messages, open_ = messages[: messages.index(None)], False
            try:
                if messages:
                    self.connection.send_bytes(pickle.dumps(messages, protocol=5))
            except OSError:
                return  # the reader sees the end too
        with suppress(OSError), socket.fromfd(self.connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy:
            copy.shutdown(socket.SHUT_RDWR)  # wakes the reader, of this side and of the other

    def _read(self) -> None:
        try:
            while True:
                self.on_messages([pickle.loads(one) for one in pickle.loads(self.connection.recv_bytes())])
        except (OSError, EOFError):
            pass
        finally:
            self._queue.put(None)
            self._threads[1].join(1)
            self.connection.close()
            self.on_close()
