"""Landlock: the kernel's walls for a process without namespaces and without privileges (Linux 5.13, for signals 6.12).

From then on the process, and whatever it starts, may write below its own folder alone, reads nothing of what is hidden,
has no access to the memory of a process outside and, from version 6 of Landlock on, sends it no signal. The network
stays open, and so does what /proc tells of other processes, their environment among it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_NO_NEW_PRIVILEGES = 38
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_READS = _EXECUTE | _READ_FILE | _READ_FOLDER
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_KINDS = {1: 13, 2: 14, 3: 15}  # version -> how many kinds of access to files it knows; 15 from version 3 on
_SIGNALS, _ABSTRACT_SOCKETS = 1 << 1, 1 << 0
_DEVICES = "null zero full random urandom shm pts tty dri kfd".split()


def shut_in(folder: str, hidden: Sequence[str]) -> bool:
    """Whether the kernel hides files and protects other processes from here on, for this process and all of its own."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE, None, 0, 1)
    if version < 1:
        return False
    every = (1 << _KINDS.get(version, 15)) - 1
    scopes = _SIGNALS | _ABSTRACT_SOCKETS if version >= 6 else 0
    attributes = struct.pack("QQQ", every, 0, scopes)[: 24 if version >= 6 else 8]
    ruleset = libc.syscall(_CREATE, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        for path in around([Path(os.path.realpath(path)) for path in hidden]):
            _allow(libc, ruleset, path, _READS & every)
        _allow(libc, ruleset, Path(folder), every)
        for device in (*_DEVICES, *(one.name for one in Path("/dev").glob("nvidia*"))):
            _allow(libc, ruleset, Path("/dev") / device, every)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return libc.syscall(_RESTRICT, ruleset, 0) == 0 and version >= 6
    finally:
        os.close(ruleset)


def around(hidden: Sequence[Path], top: Path = Path("/")) -> Iterator[Path]:
    """Files and folders that together hold everything below `top` but what is hidden."""
    place = top.resolve() if top.is_symlink() else top
    if not any(path.is_relative_to(place) or place.is_relative_to(path) for path in hidden):
        yield top
    elif place is top and top not in hidden and top.is_dir():
        for inner in sorted(top.iterdir()):
            yield from around(hidden, inner)


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, access: int) -> None:
    """Below a folder, or for a file; what is not there, or is a link, needs no rule."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        access &= -1 if path.is_dir() else _ON_FILES
        libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", access, fd), 0)
    finally:
        os.close(fd)
