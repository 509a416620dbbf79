"""Whole numbers rounded up: how many blocks hold so many tokens. Built in chapter 06."""

from __future__ import annotations


def ceil_div(n: int, size: int) -> int:
    """How many pieces of `size` hold n: n / size, rounded up. Arrays are divided element by element."""
    return -(-n // size)  # // rounds down, so the negative of a negative rounds up


def round_up(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least n."""
    return ceil_div(n, unit) * unit
