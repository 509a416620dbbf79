"""KVConnector: keys and values on their way from one process to another. Built in chapter 22.

    source        put(bytes) -> KVHandle                        the bytes wait where the handle says
                      | the handle travels with a message
    destination                 get(KVHandle) -> bytes          and the place is free again

    source        send(connection, bytes)                       piece after piece, while a prefill makes them
    destination                 receive(connection) -> bytes

    SharedMemoryConnector   a file in /dev/shm: one copy in, mapped by the reader; both are on one machine
    TCPConnector            a socket of the source, read over the network

A handle is plain data. Blocks are packed part by part as `PagedKVCache.read_blocks` gives them, so two engines may
exchange them if they have the same model, dtype and block size (`layout_of`).
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minillm.kv_cache.paged import PagedKVCache, as_bytes
from minillm.kv_cache.sockets import Door, connect

HERE, GONE = b"here", b"gone"


class KVHandle(NamedTuple):
    """Where some bytes wait to be fetched."""

    kind: str  # "shm" or "tcp"
    place: str  # a file, or HOST:PORT
    key: str
    num_bytes: int


class KVConnector(Protocol):
    """Hands bytes to another process. Safe to use from several threads."""

    def put(self, data: Tensor) -> KVHandle:
        """Offer bytes, uint8 [num_bytes] in host memory, to one reader. Raises OSError where there is no room."""

    def get(self, handle: KVHandle) -> Tensor:
        """The bytes, uint8 [num_bytes]; they are gone at the source then. Raises ConnectionError if they are gone
        already, or the source is."""

    def drop(self, handle: KVHandle) -> None:
        """No process is going to read what this one has put; nothing happens if one has, or if another has put it."""

    def send(self, connection: Connection, data: Tensor) -> KVHandle | None:
        """As `put`, to the reader at the other end of a connection; a handle to `drop` if that end is gone."""

    def receive(self, connection: Connection) -> Tensor:
        """What the other end sends, uint8 [num_bytes]. Raises EOFError, or another OSError, if it is gone."""

    def close(self) -> None:
        """Drop all that was put and not read."""


class SharedMemoryConnector:
    """Through files in memory, whose names begin with `prefix`."""

    def __init__(self, prefix: str, folder: str | Path | None = None):
        shared = Path("/dev/shm")
        self.folder = Path(folder or (shared if shared.is_dir() else tempfile.gettempdir()))
        self.prefix, self._numbers = prefix, itertools.count()

    def put(self, data: Tensor) -> KVHandle:
        path = self.folder / f"{self.prefix}-{next(self._numbers)}"
        try:
            data.contiguous().numpy().tofile(path)
        except OSError:  # no room: half of it may be there
            path.unlink(missing_ok=True)
            raise
        return KVHandle("shm", str(path), path.name, data.numel())

    def get(self, handle: KVHandle) -> Tensor:
        try:
            with open(handle.place, "rb") as file:
                mapped = mmap.mmap(file.fileno(), handle.num_bytes, access=mmap.ACCESS_COPY)
            os.unlink(handle.place)  # the mapping stays, and its memory is freed with it
        except (OSError, ValueError) as error:
            raise ConnectionError(f"the KV blocks in {handle.place} are gone: {error}") from error
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def drop(self, handle: KVHandle) -> None:
        with suppress(FileNotFoundError):
            os.unlink(handle.place)

    def send(self, connection: Connection, data: Tensor) -> KVHandle | None:
        handle = self.put(data)
        try:
            connection.send(handle)
        except OSError:
            self.drop(handle)
            raise
        return handle

    def receive(self, connection: Connection) -> Tensor:
        return self.get(connection.recv())

    def close(self) -> None:
        remove_leftovers(self.prefix, self.folder)


def remove_leftovers(prefix: str, folder: str | Path = "/dev/shm") -> int:
    """Remove what connectors of this prefix left behind when their process was killed; returns how many files."""
    left = list(Path(folder).glob(f"{prefix}-*")) if Path(folder).is_dir() else []
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


class TCPConnector:
    """Through sockets. `host` is this machine's address as the others see it; `secret` is known to all of the fleet."""

    def __init__(self, secret: bytes, host: str = "127.0.0.1"):
        self.secret = secret
        self._waiting: dict[str, Tensor] = {}
        self._numbers = itertools.count()
        self._door = Door(secret, self._serve, host)
        self.place = "{}:{}".format(*self._door.address)

    def put(self, data: Tensor) -> KVHandle:
        key = str(next(self._numbers))
        self._waiting[key] = data.contiguous()
        return KVHandle("tcp", self.place, key, data.numel())

    def get(self, handle: KVHandle) -> Tensor:
        host, _, port = handle.place.rpartition(":")
        data = torch.empty(handle.num_bytes, dtype=torch.uint8)
        try:
            with connect((host, int(port)), self.secret) as connection:
                connection.send_bytes(handle.key.encode())
                if connection.recv_bytes() != HERE:
                    raise ConnectionError(f"the KV blocks {handle.key} at {handle.place} are gone")
                if handle.num_bytes:
                    connection.recv_bytes_into(data.numpy())
        except (OSError, EOFError) as error:
            raise ConnectionError(f"the KV blocks at {handle.place} cannot be fetched: {error!r}") from error
        return data

    def drop(self, handle: KVHandle) -> None:
        if handle.place == self.place:
            self._waiting.pop(handle.key, None)

    def send(self, connection: Connection, data: Tensor) -> KVHandle | None:
        connection.send(data.numel())
        connection.send_bytes(data.contiguous().numpy())
        return None

    def receive(self, connection: Connection) -> Tensor:
        data = torch.empty(connection.recv(), dtype=torch.uint8)
        connection.recv_bytes_into(data.numpy())
        return data

    def close(self) -> None:
        self._waiting.clear()
        self._door.close()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(OSError, EOFError):  # a reader that leaves disturbs no other
            data = self._waiting.pop(connection.recv_bytes(1024).decode(), None)
            connection.send_bytes(GONE if data is None else HERE)
            if data is not None and data.numel():
                connection.send_bytes(data.numpy())


def layout_of(cache: PagedKVCache) -> str:
    """Engines with the same layout can read each other's packed blocks."""
    parts = {name: (len(layers), *layers[0].shape[1:]) for name, layers in cache.parts.items()}
    return f"{cache.dtype} {parts}"


def pack_blocks(cache: PagedKVCache, blocks: list[int]) -> Tensor:
    """All layers and parts of some blocks, in host memory: uint8 [len(blocks) * bytes of a block]."""
    parts = cache.read_blocks(blocks).values()
    return torch.cat([rows.contiguous().view(torch.uint8).flatten() for rows in parts])


def unpack_blocks(cache: PagedKVCache, blocks: list[int], data: Tensor, chosen: list[int], count: int) -> None:
    """Write what `pack_blocks` made of `count` blocks into `blocks` of this cache: those that stood at `chosen`."""
    rows, start = {}, 0
    for name, layers in cache.parts.items():
        layer = as_bytes(layers[0])
        shape = (len(layers), count, *layer.shape[1:])
        size = math.prod(shape) * layer.element_size()
        part = data[start : start + size].clone()  # its own memory, so that it is aligned
        rows[name] = part.view(layer.dtype).view(shape)[:, chosen]
        start += size
    if start != data.numel():
        raise ValueError(f"{data.numel()} bytes are not {count} blocks of this cache, which would have {start}")
    cache.write_blocks(blocks, rows)
