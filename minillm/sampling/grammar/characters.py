"""Sets of characters, and the bytes of UTF-8 that write them. Built in chapter 19.

A set is a tuple of ranges of code points, both ends inside, sorted, none touching the next: [a-cx] is
((97, 99), (120, 120)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Ranges = tuple[tuple[int, int], ...]
ByteRanges = tuple[tuple[int, int], ...]  # one range for each byte of a character

LAST = 0x10FFFF  # the last code point of Unicode
SURROGATES = (0xD800, 0xDFFF)  # halves of UTF-16 pairs, which UTF-8 cannot write
BLOCKS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, LAST))  # of one to four bytes
FIRST_TAIL, LAST_TAIL = 0x80, 0xBF  # every byte of a character but its first lies between these


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[list[int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return tuple((low, high) for low, high in merged)


def complement(ranges: Ranges) -> Ranges:
    """Every other character. Surrogates are none, so they are in no complement."""
    gaps, start = [], 0
    for low, high in union(ranges, [SURROGATES]):
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    return (*gaps, (start, LAST)) if start <= LAST else tuple(gaps)


def intersection(first: Ranges, second: Ranges) -> Ranges:
    return complement(union(complement(first), complement(second)))


def written_with(present: np.ndarray) -> np.ndarray:
    """Which characters are made of no other bytes than those present, bool [LAST + 1]. `present` is bool [256]."""
    code = np.arange(LAST + 1)
    tail, second, third = (present[FIRST_TAIL + (code >> shift & 63)] for shift in (0, 6, 12))
    of_two, of_three = present[0xC0 + (code >> 6 & 31)] & tail, present[0xE0 + (code >> 12 & 15)] & second & tail
    of_four = present[0xF0 + (code >> 18)] & third & second & tail
    return np.select([code < 0x80, code < 0x800, code < 0x10000], [present[code & 127], of_two, of_three], of_four)


@dataclass(frozen=True)
class CharacterClass:
    r"""What a class of a regular expression holds, where Python has two answers.

    "٣" is a digit to `\d`, but not under `re.ASCII`. A text has to be valid by both, so `sure` holds what both put
    into the class and `maybe` what either does: a negation leaves out all that may be inside.
    """

    sure: Ranges
    maybe: Ranges

    @classmethod
    def of(cls, *pairs: tuple[int, int]) -> CharacterClass:
        return cls(union(pairs), union(pairs))

    def __or__(self, other: CharacterClass) -> CharacterClass:
        return CharacterClass(union(self.sure, other.sure), union(self.maybe, other.maybe))

    def __invert__(self) -> CharacterClass:
        return CharacterClass(complement(self.maybe), complement(self.sure))


@lru_cache
def shorthand(letter: str) -> CharacterClass:
    r"""\d, \w or \s; in capitals the opposite."""
    if letter.isupper():
        return ~shorthand(letter.lower())
    if letter == "d":
        return CharacterClass(((48, 57),), _all_that(str.isdecimal))
    if letter == "w":
        ascii_word = union([(48, 57), (65, 90), (95, 95), (97, 122)])
        return CharacterClass(ascii_word, union(_all_that(str.isalnum), [(95, 95)]))
    return CharacterClass(((9, 13), (32, 32)), _all_that(str.isspace))


def _all_that(holds: Callable[[str], bool]) -> Ranges:
    return union((code, code) for code in range(LAST + 1) if holds(chr(code)))


@lru_cache
def utf8_sequences(ranges: Ranges) -> tuple[ByteRanges, ...]:
    """The set as sequences of byte ranges: a character is in it if and only if its bytes fit one sequence.

    [a-ÿ] is ((0x61, 0x7F),) and ((0xC2, 0xC3), (0x80, 0xBF)). After Thompson's and Cox's automata over UTF-8.
    """
    found: list[ByteRanges] = []
    for low, high in ranges:
        for block_low, block_high in BLOCKS:
            first, last = max(low, block_low), min(high, block_high)
            if first <= last:
                found += _same_length(chr(first).encode(), chr(last).encode())
    return tuple(found)


def _same_length(low: bytes, high: bytes) -> Iterator[ByteRanges]:
    """All byte strings from `low` to `high`, which are of one length and both in UTF-8."""
    if len(low) == 1:
        yield ((low[0], high[0]),)
        return
    lowest, highest = bytes([FIRST_TAIL]) * (len(low) - 1), bytes([LAST_TAIL]) * (len(low) - 1)
    if low[0] == high[0]:
        yield from (((low[0], low[0]), *rest) for rest in _same_length(low[1:], high[1:]))
        return
    # Between a ragged first and a ragged last byte lies a block in which every tail is allowed.
    first, last = low[0], high[0]
    if low[1:] != lowest:
        yield from (((first, first), *rest) for rest in _same_length(low[1:], highest))
        first += 1
    if high[1:] != highest:
        last -= 1
    if first <= last:
        yield ((first, last), *[(FIRST_TAIL, LAST_TAIL)] * (len(low) - 1))
    if high[1:] != highest:
        yield from (((high[0], high[0]), *rest) for rest in _same_length(lowest, high[1:]))
