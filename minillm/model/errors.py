"""CheckpointError: what is wrong with a checkpoint, and where. Built in chapter 02."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What reading a value of another kind than expected ends in; neither a lack of memory nor torch's own errors.
DAMAGE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, OSError, re.error)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names the file or the tensor, and the way out."""


class AdapterError(CheckpointError):
    """An adapter that cannot be read, or does not fit the model."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors say which checkpoint they are about."""
    try:
        yield
    except CheckpointError:
        raise
    except DAMAGE as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} cannot be read: {said}") from error
