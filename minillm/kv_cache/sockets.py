"""Sockets between the processes of a fleet: each side proves that it knows the fleet's secret. Built in chapter 22."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge


class Door:
    """Listens on a free port of `host`, and hands each connection that knows `secret` to `on_connection`, in a thread
    of its own. What comes over such a connection may be unpickled."""

    def __init__(self, secret: bytes, on_connection: Callable[[Connection], object], host: str = "127.0.0.1"):
        self.secret, self.on_connection = secret, on_connection
        self._listener = Listener((host, 0), backlog=64)
        self.address: tuple[str, int] = (host, self._listener.address[1])
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no longer; connections that were made stay open. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        with suppress(OSError):  # wakes the thread that accepts
            socket.create_connection(self.address, timeout=1).close()
        self._thread.join(5)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            with suppress(OSError):
                connection = self._listener.accept()
                threading.Thread(target=self._greet, args=(connection,), name="greet", daemon=True).start()

    def _greet(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self.secret)
            answer_challenge(connection, self.secret)
        except Exception:  # an unknown process, or one that was killed meanwhile
            connection.close()
            return
        self.on_connection(without_delay(connection))


def connect(address: tuple[str, int], secret: bytes) -> Connection:
    """Reach a `Door`. Raises OSError if it is closed, AuthenticationError if it has another secret."""
    return without_delay(Client(address, authkey=secret))


def without_delay(connection: Connection) -> Connection:
    """A small message would wait up to 40 ms for the acknowledgement of the one before (Nagle's algorithm)."""
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy:
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def own_address(connection: Connection) -> str:
    """This machine's address, on the network that the connection goes over."""
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy:
        return copy.getsockname()[0]
