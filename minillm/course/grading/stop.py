"""What the alarm calls. A signal's handler can be looked up by anyone, so this module holds nothing else."""

from __future__ import annotations

from types import FrameType


class TimeIsUp(BaseException):
    """Raised by the alarm. Not an Exception: an answer's `except Exception` must not swallow it."""


def stop(number: int, frame: FrameType | None) -> None:
    """Not while a limit of the checks is set or taken back: half of that would stay. The alarm comes again."""
    is_first = True
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("patience.py") and (
            code.co_qualname in ("Limit.__enter__", "Limit.__exit__") or (is_first and code.co_name == "__exit__")
        ):
            return
        frame, is_first = frame.f_back, False
    raise TimeIsUp
