"""Triton's interpreter without work that it repeats: a test of the engine launches thousands of interpreted programs.

What a kernel computes stays the same. The interpreter is relieved of two things:

    a call of a helper     prepares `triton.language` for the interpreter again, a millisecond; once a launch is enough
    an integer operation   is computed in 64 bits and compared with its limits, for an assertion (off without `debug`)
"""

from __future__ import annotations

from functools import cache
from types import ModuleType


def quicken(interpreter: ModuleType) -> None:
    """Relieve `triton.runtime.interpreter`. Where a version of Triton has other internals, it stays as it is."""
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        prepare_once(interpreter)
    semantic = getattr(interpreter, "interpreter_semantic", None)
    if hasattr(semantic, "binary_op_sanitize_overflow_impl") and not semantic.builder.options.debug:
        semantic.binary_op_sanitize_overflow_impl = lambda *operands: None


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
        try:
            return launch(self, *args, **kwargs)
        finally:  # it has restored the language: a call without a launch prepares it anew
            prepared.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = prepare_what_is_not, launch_afresh
