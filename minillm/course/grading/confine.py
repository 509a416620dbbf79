"""Confines the process that runs a submission: namespaces, limits, one private folder that it may write into.

Where the kernel allows it (Linux, user namespaces), the process has a network of its own with nothing but a loopback,
processes of its own, and a file system that is read-only and in which the course is hidden. Elsewhere `landlock` hides
the course and protects other processes, where the kernel has it, and `rules` refuses the rest in Python; what holds is
said in the report.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE, _READ_ONLY = 0x1000, 0x4000, 0x40000, 0x1
_NO_SETUID, _NO_DEVICES = 0x2, 0x4
_DIE_WITH_PARENT, _DROP_BOUND, _ADOPT_ORPHANS, _NO_NEW_PRIVILEGES = 1, 24, 36, 38
_SYS_MOUNT_SETATTR, _HERE = 442, -100
_OUTPUT = 256 * 2**20  # bytes of the largest file that may be written
_PROCESSES = 512  # with their threads


@dataclass(frozen=True)
class Limits:
    """What a submission may use. memory: GiB beside what the libraries take. seconds: of one cell, of one graded line.

    namespaces: False leaves out what needs the kernel's help, as on a machine without it.
    """

    memory: float = 4.0
    cell_seconds: float = 60.0
    line_seconds: float = 60.0
    namespaces: bool = True

    def __post_init__(self) -> None:
        for name in ("memory", "cell_seconds", "line_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be more than 0")


def enter_namespaces() -> bool:
    """Leave the machine's network, processes and mounts; True where the kernel lets us. Before any thread starts.

    New processes of this one are in the new process namespace; this one stays outside of it.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    rooms = _NEW_NETWORK | _NEW_PROCESSES | _NEW_MOUNTS | _NEW_IPC
    if libc.unshare(_NEW_USER | rooms):
        return user == 0 and libc.unshare(rooms) == 0  # root in a container without user namespaces
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def shut_in(folder: str, hidden: Sequence[str]) -> list[str]:
    """The file system read-only but for `folder`, which becomes empty; `hidden` files and folders are empty too.

    Then all privileges of the namespace are given up. Returns what could not be done, one sentence each.
    """
    libc, wrong = ctypes.CDLL(None, use_errno=True), []

    def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> bool:
        return libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()) == 0

    mount("none", "/", "", _PRIVATE | _RECURSIVE)
    mount("proc", "/proc", "proc", _NO_SETUID | _NO_DEVICES)
    for path in hidden:
        is_hidden = (
            mount("tmpfs", path, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=4k,mode=755")
            if os.path.isdir(path)
            else mount("/dev/null", path, "", _BIND)
        )
        if not is_hidden:
            wrong.append(f"{path} could not be hidden")
    read_only = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    if libc.syscall(_SYS_MOUNT_SETATTR, _HERE, b"/", 0x8000, read_only, len(read_only)):
        wrong.append("the file system could not be made read-only")
    if not mount("tmpfs", folder, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=512m,mode=700"):
        wrong.append(f"no private file system for {folder}")
    mount("tmpfs", "/dev/shm", "tmpfs", _NO_SETUID | _NO_DEVICES, "size=512m,mode=1777")
    _raise_loopback()
    _give_up_privileges(libc)
    return wrong


def _raise_loopback() -> None:
    """The loopback device of the new network, which is down at first: exercises may serve on 127.0.0.1."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        set_flags, up = 0x8914, 0x1 | 0x40
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh22x", b"lo", up))


def _give_up_privileges(libc: ctypes.CDLL) -> None:
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for capability in range(64):
        libc.prctl(_DROP_BOUND, capability, 0, 0, 0)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    libc.capset(header, none)


def die_with_parent() -> None:
    """The kernel kills this process when its parent ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """A process whose parent has ended becomes a child of this one, which can then end it."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)


def set_limits(limits: Limits, cpu_seconds: float, apart: bool) -> None:
    """Memory beside what is mapped already, processor time, and the size of a file, for this process and its own.

    apart: it has a user namespace of its own, in which the number of its processes is limited too.
    """
    wanted = {
        resource.RLIMIT_CPU: int(cpu_seconds) + 1,
        resource.RLIMIT_FSIZE: _OUTPUT,
        resource.RLIMIT_CORE: 0,
    }
    if apart:
        wanted[resource.RLIMIT_NPROC] = _PROCESSES
    if sys.platform.startswith("linux"):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        wanted[resource.RLIMIT_AS] = pages * resource.getpagesize() + int(limits.memory * 2**30)
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
