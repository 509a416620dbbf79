"""The lowest tier: blocks of keys and values in files, which the next process takes up. Built in chapter 17.

    FOLDER/<hash>.kv    magic 8 bytes | layout 32 | hash 32 | CRC-32 of the bytes 4 | the block's bytes

One file a block, named by the block's hash. The hash says which model and which tokens, the layout says how the bytes
lie. Blocks of another model or layout may lie beside ours: they are no hits here, but they count, and go first when
room is needed. So the folder stays as small as was asked, whatever it is used with. A block that is cut off or changed
is named in a warning: a miss, never a wrong hit. Two threads read and write, so that no step waits for a write, and
none for a read it did not ask for.
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
    """Blocks of `block_bytes` each in `folder`, which holds at most `num_bytes` of blocks, headers included.

    `layout` is all that says how a block's bytes lie and what they depend on beside the tokens. The bound is that of
    the whole folder: blocks that another layout left make room first, the oldest in front, then one's own,
    the least recently used in front. Not counted are files that hold no block (they are named in a warning and left
    alone), and what another process writes there at the same time, which keeps the same bound by itself.
    Memory: `waiting` holds up to MOST_WAITING blocks. Raises ValueError when the folder cannot be used,
    or when not even one block fits.
    """

    def __init__(self, folder: str | Path, num_bytes: int, block_bytes: int, layout: str):
        self.folder, self.block_bytes = Path(folder).expanduser(), block_bytes
        self.layout = hashlib.sha256(layout.encode()).digest()
        self.num_bytes, self.file_bytes = num_bytes, HEADER.size + block_bytes
        if num_bytes < self.file_bytes:
            raise ValueError(f"disk_kv_bytes={num_bytes} holds no block; a block takes {self.file_bytes} bytes on disk")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            usable = os.access(self.folder, os.R_OK | os.W_OK | os.X_OK)
        except OSError as error:
            raise ValueError(
                f"disk_kv_path={str(folder)!r} cannot be used: {error}; give a folder that can be written"
            ) from error
        if not usable:
            raise ValueError(f"disk_kv_path={str(folder)!r} cannot be written; give another folder")
        self.lock = threading.Lock()
        self.files: OrderedDict[bytes, None] = OrderedDict()  # ours, the least recently used in front
        # Bytes of blocks that are no use to us, the oldest in front.
        self.others: OrderedDict[Path, int] = OrderedDict()
        self.other_bytes = 0  # of all of them
        self.waiting: dict[bytes, Tensor] = {}  # not written yet
        self.kept: dict[bytes, Tensor] = {}  # read, and on the way to host memory
        self.skipped: dict[Path, str] = {}  # files that are not ours to use, and why
        self.num_dropped = 0  # blocks that came while too many were waiting
        self.seconds_reading = self.seconds_writing = 0.0
        self.reader = ThreadPoolExecutor(1, "kv-disk-read")
        self.writer = ThreadPoolExecutor(1, "kv-disk-write")
        self._take_up()

    @property
    def capacity(self) -> int:
        """Blocks that there is room for, when all are ours."""
        return self.num_bytes // self.file_bytes

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, block_hash: bytes) -> bool:
        with self.lock:
            return block_hash in self.files

    def fetch(self, block_hash: bytes) -> Future[Tensor | None]:
        """The block's bytes, uint8 [block_bytes], read beside the caller; None where they cannot be read."""
        return self.reader.submit(self._read, block_hash)

    def keep(self, block_hash: bytes, data: Tensor) -> None:
        """Hold what `fetch` has read until `take` asks for it."""
        self.kept[block_hash] = data

    def take(self, block_hash: bytes) -> Tensor:
        """What `keep` holds of this block, which it then holds no longer."""
        return self.kept.pop(block_hash)

    def write(self, block_hash: bytes, data: Tensor) -> None:
        """Keep uint8 [block_bytes] in host memory, which the caller does not change any more."""
        with self.lock:
            if len(self.waiting) >= MOST_WAITING:
                self.num_dropped += 1
                return
            self.other_bytes -= self.others.pop(self.path(block_hash), 0)  # it was damaged, and is replaced
            self.files[block_hash] = None
            self.files.move_to_end(block_hash)
            self.waiting[block_hash] = data
            evicted = self._make_room()
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
        self.reader.shutdown(cancel_futures=True)
        self.writer.shutdown()

    def path(self, block_hash: bytes) -> Path:
        return self.folder / f"{block_hash.hex()}.kv"

    def _take_up(self) -> None:
        """Find what earlier processes left."""
        found: list[tuple[int, Path, bytes | None, int]] = []  # when it was used, where, the hash if it is ours, bytes
        for path in self.folder.glob("writing-*.tmp"):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.kv"):
            try:
                status = path.stat()
                with path.open("rb") as file:
                    header = file.read(HEADER.size)
                if header.startswith(MAGIC):
                    found.append(
                        (status.st_mtime_ns, path, self._hash_of(path, header, status.st_size), status.st_size)
                    )
                else:
                    self.skipped[path] = "no block of keys and values"
            except OSError as error:
                self.skipped[path] = str(error)
        for _, path, block_hash, size in sorted(found, key=lambda one: one[0]):
            if block_hash is None:
                self.others[path] = size
                self.other_bytes += size
            else:
                self.files[block_hash] = None
        if self.skipped:
            some = "; ".join(f"{path.name}: {why}" for path, why in list(self.skipped.items())[:3])
            more = f" and {len(self.skipped) - 3} more" if len(self.skipped) > 3 else ""
            warnings.warn(f"disk_kv_path={str(self.folder)!r} holds files that are skipped: {some}{more}", stacklevel=2)
        for one in self._make_room():
            self._remove(one)

    def _hash_of(self, path: Path, header: bytes, size: int) -> bytes | None:
        """The hash of a block that can be a hit, else None; damage is noted."""
        if len(header) == HEADER.size and HEADER.unpack(header)[1] != self.layout:
            return None
        try:
            return self._check_header(path, header, size)[0]
        except ValueError as error:
            self.skipped[path] = str(error)
            return None

    def _make_room(self) -> list[bytes | Path]:
        """Forget what exceeds `num_bytes`, and return it: paths of others, hashes of ours."""
        evicted: list[bytes | Path] = []
        while self.other_bytes + len(self.files) * self.file_bytes > self.num_bytes:
            if self.others:
                path, size = self.others.popitem(last=False)
                self.other_bytes -= size
                evicted.append(path)
            else:
                evicted.append(self.files.popitem(last=False)[0])
        return evicted

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
        if size != self.file_bytes:
            raise ValueError(f"{size} bytes, a block takes {self.file_bytes}")
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
        except FileNotFoundError:  # another process that shares the folder needed the room
            with self.lock:
                self.files.pop(block_hash, None)
            return None
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
        finally:  # also where a warning is an error
            self.seconds_writing += time.perf_counter() - started
            with self.lock:
                self.waiting.pop(block_hash, None)

    def _remove(self, evicted: bytes | Path) -> None:
        if isinstance(evicted, Path):
            evicted.unlink(missing_ok=True)
            return
        with self.lock:
            if evicted in self.files:
                return  # written anew in the meantime
            self.waiting.pop(evicted, None)
        self.path(evicted).unlink(missing_ok=True)

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
