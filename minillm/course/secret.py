"""The secret of a course, from which the seeds of all hidden trials follow: made once, never part of a release."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

FILE = ".grading-secret"
VARIABLE = "MINILLM_COURSE_SECRET"
_HEX = re.compile(r"[0-9a-f]{32,}")


def make(course: Path) -> Path:
    """Write a new secret for a course that has none, readable by its owner alone; returns its file."""
    path = Path(course) / FILE
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    return path


def read(course: Path) -> str:
    """The secret: the variable MINILLM_COURSE_SECRET where it is set, otherwise the file, which is made if need be.

    Raises ValueError for one that is not at least 32 hexadecimal digits.
    """
    where, text = VARIABLE, os.environ.get(VARIABLE, "")
    if not text:
        where = make(course)
        text = where.read_text(encoding="ascii", errors="replace")
    if not _HEX.fullmatch(text.strip()):
        raise ValueError(
            f"{where}: a course's secret is at least 32 hexadecimal digits, as `python -c 'import secrets; "
            "print(secrets.token_hex(32))'` prints them"
        )
    return text.strip()


def seed_of(secret: str, student: str, notebook: str, exercise: str, part: str) -> int:
    """The seed of one graded line, the same in every run: HMAC-SHA256 of who and what, below 2**31."""
    told = f"{student}\0{notebook}\0{exercise}\0{part}".encode()
    return int.from_bytes(hmac.new(secret.encode(), told, hashlib.sha256).digest()[:4]) >> 1


def numbers_of(seed: int, student: str | None) -> int:
    """What an exam's numbers are drawn from: its seed, or one that follows from it for each student; never 0."""
    told = f"{seed}/{student}".encode()
    return seed if student is None else 1 + int.from_bytes(hashlib.sha256(told).digest()[:7])
