"""Checks of chapter 03: cache bytes, a doubling cache, a ring, a repaired generator, a ring that rewinds.
Built in chapter 03.

The bytes are in `ch03_bytes`, the caches in `ch03_doubling` and `ch03_rings`, the generator in `ch03_positions`.
"""

from __future__ import annotations

from minillm.book.checks.ch03_bytes import check_cache_bytes
from minillm.book.checks.ch03_doubling import check_doubling_cache
from minillm.book.checks.ch03_positions import check_repair_positions, trace_of
from minillm.book.checks.ch03_rings import check_rewindable_ring, check_ring_cache

__all__ = [
    "check_cache_bytes",
    "check_doubling_cache",
    "check_repair_positions",
    "check_rewindable_ring",
    "check_ring_cache",
    "trace_of",
]
