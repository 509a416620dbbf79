"""Triton's interpreter without work that it repeats: a test of the engine launches thousands of interpreted programs.

What a kernel computes stays the same, and so does every check of the interpreter's. Of two repetitions it is relieved:

    a call of a helper     prepares `triton.language` for the interpreter again, a millisecond; once a launch is enough
    an integer operation   is checked for overflow by five operations of the interpreter; NumPy does it by one of its own
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np


def quicken(interpreter: ModuleType) -> None:
    """Relieve `triton.runtime.interpreter`. Where a version of Triton has other internals, it stays as it is."""
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        prepare_once(interpreter)
    semantic = getattr(interpreter, "interpreter_semantic", None)
    if hasattr(semantic, "binary_op_sanitize_overflow_impl"):
        semantic.binary_op_sanitize_overflow_impl = check_overflow


def prepare_once(interpreter: ModuleType) -> None:
    prepare, launch, prepared = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    @cache
    def languages(fn) -> frozenset[int]:
        """Which of the two modules that are prepared a function knows: `triton.language` and its core."""
        known = (interpreter.tl, interpreter.tl.core)
        return frozenset(id(value) for value in fn.__globals__.values() if any(value is module for module in known))

    def prepare_what_is_not(fn):
        if not languages(fn) or languages(fn) - prepared:
            prepared.update(languages(fn))
            return prepare(fn)
        return None  # a helper's; only a launch restores what was prepared

    def launch_afresh(self, *args, **kwargs):
        prepared.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = prepare_what_is_not, launch_afresh


def check_overflow(lhs, rhs, operation) -> None:
    """AssertionError where the sum, difference or product of two integers does not fit their type."""
    kind = lhs.type.scalar
    if kind.int_bitwidth < 64:
        compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
        exact = compute(lhs.handle.data, rhs.handle.data, dtype=np.int64, casting="unsafe")
        fits = exact.size == 0 or (kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value())
        assert fits, f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"
