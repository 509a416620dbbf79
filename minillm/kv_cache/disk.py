"""The lowest tier: blocks of keys and values in files, which the next process takes up. Built in chapter 17.

    FOLDER/<hash>.kv    magic 8 bytes | layout 32 | hash 32 | CRC-32 of the bytes 4 | the block's bytes

One file a block, named by the block's hash. The hash says which model and which tokens, the layout says how the bytes
lie. A file that is of another model, cut off or changed is named in a warning and left alone: a miss, never a wrong
hit. Two threads read and write, so that no step waits for a write, and none for a read it did not ask for.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
import warnings
import zlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

MAGIC = b"minikv 1"
HEADER = struct.Struct("<8s32s32sI")
ABANDONED = 3600  # seconds after which a half written file is that of a process that was killed
MOST_WAITING = 64  # blocks in memory that wait to be written; what comes on top is not kept


class DiskStore:
    """Blocks of `block_bytes` each in `folder`, `num_bytes` at most with their headers, the least recently used go first.

    `layout` is all that says how a block's bytes lie and what they depend on beside the tokens. Files of another layout
    are left alone and not counted: whoever changes the model cleans the folder, or names another. Raises ValueError when
    the folder cannot be used, or when not even one block fits.
    """

    def __init__(self, folder: str | Path, num_bytes: int, block_bytes: int, layout: str):
        self.folder, self.block_bytes = Path(folder).expanduser(), block_bytes
        self.layout = hashlib.sha256(layout.encode()).digest()
        self.capacity = num_bytes // (HEADER.size + block_bytes)
        if self.capacity < 1:
            raise ValueError(f"disk_kv_bytes={num_bytes} holds no block; a block takes {HEADER.size + block_bytes} bytes on disk")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            usable = os.access(self.folder, os.R_OK | os.W_OK | os.X_OK)
        except OSError as error:
            raise ValueError(f"disk_kv_path={str(folder)!r} cannot be used: {error}; give a folder that can be written") from error
        if not usable:
            raise ValueError(f"disk_kv_path={str(folder)!r} cannot be written; give another folder")
        self.lock = threading.Lock()
        self.files: OrderedDict[bytes, None] = OrderedDict()  # the least recently used in front
        self.waiting: dict[bytes, Tensor] = {}  # not written yet
        self.skipped: dict[Path, str] = {}  # files that are not ours to use, and why
        self.num_dropped = 0  # blocks that came while too many were waiting
        self.seconds_reading = self.seconds_writing = 0.0
        self.reader = ThreadPoolExecutor(1, "kv-disk-read")
        self.writer = ThreadPoolExecutor(1, "kv-disk-write")
        self._take_up()

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, block_hash: bytes) -> bool:
        with self.lock:
            return block_hash in self.files

    def fetch(self, block_hash: bytes) -> Future[Tensor | None]:
        """The block's bytes, uint8 [block_bytes], read beside the caller; None where they cannot be read."""
        return self.reader.submit(self._read, block_hash)

    def write(self, block_hash: bytes, data: Tensor) -> None:
        """Keep uint8 [block_bytes] in host memory, which the caller does not change any more."""
        with self.lock:
            if len(self.waiting) >= MOST_WAITING:
                self.num_dropped += 1
                return
            self.files[block_hash] = None
            self.files.move_to_end(block_hash)
            self.waiting[block_hash] = data
            evicted = [self.files.popitem(last=False)[0] for _ in range(len(self.files) - self.capacity)]
        for one in evicted:  # in the thread that writes, so that a file is not removed before it is there
            self.writer.submit(self._remove, one)
        self.writer.submit(self._write, block_hash)

    def touch(self, block_hash: bytes) -> None:
        """It was of use just now; so says the file too, to the next process."""
        with self.lock:
            if block_hash not in self.files:
                return
            self.files.move_to_end(block_hash)
        self.writer.submit(self._mark_used, block_hash)

    def flush(self) -> None:
        """Wait until all is written."""
        self.writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what is waiting and end the threads; at the end of a process this happens by itself."""
        self.reader.shutdown()
        self.writer.shutdown()

    def path(self, block_hash: bytes) -> Path:
        return self.folder / f"{block_hash.hex()}.kv"

    def _take_up(self) -> None:
        """Find what earlier processes left."""
        found: list[tuple[int, bytes]] = []
        for path in self.folder.glob("writing-*.tmp"):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.kv"):
            try:
                with path.open("rb") as file:
                    block_hash = self._check_header(path, file.read(HEADER.size), path.stat().st_size)[0]
                found.append((path.stat().st_mtime_ns, block_hash))
            except (OSError, ValueError) as error:
                self.skipped[path] = str(error)
        if self.skipped:
            some = "; ".join(f"{path.name}: {why}" for path, why in list(self.skipped.items())[:3])
            more = f" and {len(self.skipped) - 3} more" if len(self.skipped) > 3 else ""
            warnings.warn(f"disk_kv_path={str(self.folder)!r} holds files that are skipped: {some}{more}", stacklevel=2)
        self.files = OrderedDict.fromkeys(block_hash for _, block_hash in sorted(found))
        for _ in range(len(self.files) - self.capacity):
            self._remove(self.files.popitem(last=False)[0])

    def _check_header(self, path: Path, header: bytes, size: int) -> tuple[bytes, int]:
        """The hash and the checksum it states. Raises ValueError saying what is wrong."""
        if len(header) < HEADER.size:
            raise ValueError(f"cut off after {size} bytes")
        magic, layout, block_hash, checksum = HEADER.unpack(header)
        if magic != MAGIC:
            raise ValueError("no block of keys and values")
        if layout != self.layout:
            raise ValueError("of another model or layout")
        if path.stem != block_hash.hex():
            raise ValueError(f"holds block {block_hash.hex()[:12]}…, which is not its name")
        if size != HEADER.size + self.block_bytes:
            raise ValueError(f"{size} bytes, a block takes {HEADER.size + self.block_bytes}")
        return block_hash, checksum

    def _read(self, block_hash: bytes) -> Tensor | None:
        with self.lock:
            if (data := self.waiting.get(block_hash)) is not None:
                return data
            if block_hash not in self.files:
                return None  # evicted since it was asked for
        path, started = self.path(block_hash), time.perf_counter()
        try:
            data = torch.empty(self.block_bytes, dtype=torch.uint8)
            with path.open("rb") as file:
                _, checksum = self._check_header(path, file.read(HEADER.size), path.stat().st_size)
                file.readinto(memoryview(data.numpy()))
            if zlib.crc32(data.numpy()) != checksum:
                raise ValueError("its bytes are not those that were written")
        except (OSError, ValueError) as error:
            self._give_up(block_hash, f"{path} cannot be used, its tokens are computed again: {error}")
            return None
        self.seconds_reading += time.perf_counter() - started
        self.touch(block_hash)
        return data

    def _write(self, block_hash: bytes) -> None:
        with self.lock:
            data = self.waiting.get(block_hash)
        if data is None:
            return  # evicted while it waited
        unfinished, started = self.folder / f"writing-{os.getpid()}-{id(self)}.tmp", time.perf_counter()
        try:
            with unfinished.open("wb") as file:
                file.write(HEADER.pack(MAGIC, self.layout, block_hash, zlib.crc32(data.numpy())))
                file.write(memoryview(data.numpy()))
            os.replace(unfinished, self.path(block_hash))  # at once: a process beside this one never reads half a file
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            self._give_up(block_hash, f"a block could not be written to {self.folder}, it is not kept: {error}")
        self.seconds_writing += time.perf_counter() - started
        with self.lock:
            self.waiting.pop(block_hash, None)

    def _remove(self, block_hash: bytes) -> None:
        with self.lock:
            if block_hash in self.files:
                return  # written anew in the meantime
            self.waiting.pop(block_hash, None)
        self.path(block_hash).unlink(missing_ok=True)

    def _mark_used(self, block_hash: bytes) -> None:
        with self.lock:
            if block_hash not in self.files:
                return
        try:
            os.utime(self.path(block_hash))
        except FileNotFoundError:  # another process that shares the folder threw it out; the next read will say so
            return

    def _give_up(self, block_hash: bytes, why: str) -> None:
        with self.lock:
            self.files.pop(block_hash, None)
        warnings.warn(why, stacklevel=3)
