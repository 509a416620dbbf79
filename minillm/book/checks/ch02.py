"""Checks of chapter 02: interleaved rotary, GQA without copies, a ragged window mask, a FLOP counter, cache bytes.
Built in chapter 02.

`ch02_attention` has the rotation and the attention; the others have a module each.
"""

from __future__ import annotations

from minillm.book.checks.ch02_attention import check_gqa_attention, check_interleaved_rotary
from minillm.book.checks.ch02_cache import check_cache_bytes
from minillm.book.checks.ch02_flops import check_count_flops
from minillm.book.checks.ch02_windows import check_window_bias

__all__ = [
    "check_cache_bytes",
    "check_count_flops",
    "check_gqa_attention",
    "check_interleaved_rotary",
    "check_window_bias",
]
