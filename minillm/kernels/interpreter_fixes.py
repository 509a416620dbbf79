"""Repairs to Triton's interpreter where an installed version needs them. Built in chapter 10.

Triton up to 3.6 converts the bound of a loop by `int(array)`, and a scalar in its interpreter is an array of shape
(1,). NumPy 2.4 refuses that conversion (TypeError: only 0-dimensional arrays can be converted to Python scalars),
so every kernel that loops up to a run-time bound fails. Triton 3.7 has the fix:
https://github.com/triton-lang/triton/pull/9172.
"""

from __future__ import annotations

LAST_TO_REPAIR = (3, 6)


def repair_interpreter() -> bool:
    """Let interpreted kernels loop up to a run-time bound; returns whether this version of Triton needs the repair.

    Each import of `triton` needs a call of its own; a second call changes nothing. Triton 3.7 and newer stay as they
    are.
    """
    import triton
    from triton.runtime import interpreter

    major, minor = triton.__version__.split(".")[:2]
    if (int(major), int(minor)) > LAST_TO_REPAIR:
        return False
    upstream = interpreter._patch_lang_tensor
    if not hasattr(upstream, "repaired"):
        # Up to 3.5 it takes the class; 3.6 also what restores it afterwards.
        def patch_lang_tensor(tensor, *scope) -> None:
            upstream(tensor, *scope)
            tensor.__index__ = lambda self: self.handle.data.item()

        patch_lang_tensor.repaired = True
        interpreter._patch_lang_tensor = patch_lang_tensor  # looked up there each time a kernel is launched
    return True
