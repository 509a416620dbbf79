"""Compiling native.c on the machine that runs it, and keeping what came of it. Built in chapter 14."""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path


def compile_shared(compiler: str, flags: tuple[str, ...], source: Path, path: Path) -> None:
    """Compile `source` into a shared library at `path`, all or nothing."""
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        subprocess.run([compiler, *flags, str(source), "-o", unfinished, "-lm"], check=True, capture_output=True)
        os.replace(unfinished, path)  # at once, so that a process beside this one never loads half a file
    except BaseException:
        os.unlink(unfinished)
        raise


def first_error(refused: subprocess.CalledProcessError) -> str:
    """What a compiler said first of the errors it found."""
    lines = (refused.stderr or b"").decode(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else str(refused))


def cache_folder() -> Path:
    """Where what was compiled is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "minillm"


def is_ours(folder: Path) -> bool:
    """Make `folder` if need be; whether only this user can write into it. What lies there is loaded and run, and any
    user can create a name under /tmp first."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    named, reached = folder.lstat(), folder.stat()  # perhaps a link, and where it leads
    return named.st_uid == reached.st_uid == os.getuid() and not reached.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def cpu_name() -> str:
    """What -march=native looks at: a cache shared between machines must not mix them up."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return platform.machine() + "".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    )


NO_UNIT = ("-DNO_MATRIX_UNIT",)


@cache
def has_unit() -> bool:
    """Whether this process may use the CPU's matrix unit (Intel's AMX). Its registers are large, so Linux wants to be
    asked first (`arch_prctl`, since 5.16), once for all threads; a program that this one starts asks again."""
    if platform.machine() != "x86_64" or " amx_bf16" not in cpu_name():
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def unit_flags() -> tuple[str, ...]:
    """What the compiler is told where that permission is missing."""
    return () if has_unit() else NO_UNIT
