"""The files of a checkpoint, held against what they should be before they are read. Built in chapter 02.

Files are fetched from elsewhere, and much goes wrong on the way: a download stops halfway, git leaves the pointer to a
large file in its place, an editor adds a byte-order mark. Each is refused here, with the file's path and the way out.
"""

from __future__ import annotations

import json
from pathlib import Path
from reprlib import repr as shown  # of values of any size and depth
from typing import Any

from minillm.model.errors import CheckpointError

JSON_BYTES = 2**26  # the longest configuration or index that is read; theirs have a few megabytes at most
GIT_LFS = b"version https://git-lfs"


def check_file(file: Path) -> None:
    """Raise CheckpointError unless `file` is one, can be read, and holds more than a pointer of git-lfs."""
    try:
        if not file.exists():
            if file.is_symlink():
                raise CheckpointError(f"{file} is a link to a file that is missing; fetch it again")
            raise CheckpointError(f"{file.parent} has no {file.name}; a model folder is what `save_pretrained` writes")
        if not file.is_file():
            kind = "a folder" if file.is_dir() else "a device or a pipe"
            raise CheckpointError(f"{file} is {kind}, and should be a file; remove it and fetch the file again")
        with open(file, "rb") as opened:
            beginning = opened.read(len(GIT_LFS))
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}); check its owner and permissions, or fetch it again"
        ) from error
    if not beginning:
        raise CheckpointError(f"{file} has 0 bytes, it is empty; fetch it again")
    if beginning == GIT_LFS:
        raise CheckpointError(
            f"{file} is a pointer of git-lfs, not the file itself; run `git lfs pull` in {file.parent}"
        )


def read_text(file: Path) -> str:
    """The text of `file`, which is UTF-8."""
    check_file(file)
    if (size := file.stat().st_size) > JSON_BYTES:
        raise CheckpointError(f"{file} has {size:,} bytes, allowed are {JSON_BYTES:,}; fetch it again")
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8 ({error}); fetch it again") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); fetch it again") from error
    if text.startswith("\ufeff"):
        raise CheckpointError(f"{file} begins with a byte-order mark; save it as UTF-8 without one, or fetch it again")
    return text


def read_json(file: Path) -> dict[str, Any]:
    """The object of names and values that `file` holds."""
    try:
        value = json.loads(read_text(file), object_pairs_hook=_once_each)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds {shown(value)}, not an object of names and values; fetch it again")
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are told apart: with two values for one, readers differ in which they take."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found and found[name] != value:
            raise ValueError(f"{shown(name)} stands in it twice, with two values")
        found[name] = value
    return found
