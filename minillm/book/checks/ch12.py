"""Checks of chapter 12: states merged, tiles planned, a repaired kernel, a sink and a window, soft-capping,
rescaling only when it must be. Built in chapter 12."""

from __future__ import annotations

from minillm.book.checks.ch12_capped import check_capped
from minillm.book.checks.ch12_kernels import check_document_kernel, check_sink_window
from minillm.book.checks.ch12_lazy import check_attend_lazily
from minillm.book.checks.ch12_merges import check_merge_states
from minillm.book.checks.ch12_oracle import documents_attended as reference, documents_of, levelled
from minillm.book.checks.ch12_plans import check_plan_tiles

__all__ = [
    "check_attend_lazily",
    "check_capped",
    "check_document_kernel",
    "check_merge_states",
    "check_plan_tiles",
    "check_sink_window",
    "documents_of",
    "levelled",
    "reference",
]
