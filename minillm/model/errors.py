"""CheckpointError: what is wrong with a checkpoint, and where. Built in chapter 02."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names the file or the tensor, and the way out."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors say which checkpoint they are about."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
