"""Counting what eager torch operations read and write, one after another. Built in chapter 10."""

from __future__ import annotations

import contextlib
import math
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from minillm.kernels import language


class record_torch_traffic(TorchDispatchMode):
    """Context manager: the bytes that eager torch operations read and write, one after another, each through memory.

    `.ops` is [(name, bytes_read, bytes_written)]. An operation reads its tensor inputs, each once, and writes its
    outputs; a view, or an uninitialised tensor, costs nothing; in place means read and written, unless the old contents
    are only overwritten; rows looked up in a table, or put into one, cost the rows. What Triton's interpreter does to
    run a kernel is not counted: `record_traffic` counts those.
    """

    OVERWRITE = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "random_", "bernoulli_"})
    LOOK_UP = frozenset({"embedding", "index_select", "index", "gather", "take"})
    PUT_INTO = frozenset({"index_put_", "index_copy_", "scatter_"})

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, int, int]] = []
        self._launch = contextlib.nullcontext()

    def __enter__(self):
        if language.MODE == "interpreted":
            from triton.runtime import interpreter

            run = interpreter.GridExecutor.__call__

            def unseen(executor, *args, **kwargs):
                with _disable_current_modes():
                    return run(executor, *args, **kwargs)

            self._launch = mock.patch.object(interpreter.GridExecutor, "__call__", unseen)
        self._launch.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        return self._launch.__exit__(*error)

    @property
    def bytes_read(self) -> int:
        """Bytes read by all operations."""
        return sum(read for _, read, _ in self.ops)

    @property
    def bytes_written(self) -> int:
        """Bytes written by all operations."""
        return sum(written for _, _, written in self.ops)

    @property
    def bytes(self) -> int:
        """Read and written together."""
        return self.bytes_read + self.bytes_written

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with _Again(self):  # under inference_mode a compound operation arrives whole: take it apart
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [(slot, value) for slot, value in zip(func._schema.arguments, args, strict=False)]
        given += [(slot, kwargs[slot.name]) for slot in func._schema.arguments if slot.name in kwargs]
        changed = [value for slot, value in given if slot.alias_info is not None and slot.alias_info.is_write]
        sources = _distinct([value for slot, value in given if not slot.is_out])
        known = {_home(tensor) for tensor in _distinct((args, kwargs))}
        fresh = [tensor for tensor in _distinct(result) if _home(tensor) not in known]
        if not (changed or fresh) or "empty" in name or torch.Tag.inplace_view in func.tags:  # no contents are touched
            return result
        written = sum(map(_size, _distinct(changed) + fresh))
        if name in self.LOOK_UP:
            read = min(_size(sources[0]), written) + sum(map(_size, sources[1:]))
        elif name in self.PUT_INTO:
            read, written = sum(map(_size, sources[1:])), min(written, _size(sources[-1]))
        else:
            read = sum(map(_size, sources[1:] if name in self.OVERWRITE else sources))
        self.ops.append((name, read, written))
        return result


class _Again:
    """The mode itself, entered once more from within; the launches are seen to already."""

    def __init__(self, mode: TorchDispatchMode):
        self.mode = mode

    def __enter__(self):
        TorchDispatchMode.__enter__(self.mode)

    def __exit__(self, *error):
        TorchDispatchMode.__exit__(self.mode, *error)


def _distinct(tree) -> list[torch.Tensor]:
    """The tensors in arguments or results; what stands there twice, as in x * x, comes once."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    keys = [
        id(tensor) if tensor.is_mkldnn else (_home(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        for tensor in tensors
    ]
    return [tensor for i, tensor in enumerate(tensors) if keys[i] not in keys[:i]]


def _home(tensor: torch.Tensor) -> int:
    """Which memory a tensor lies in; weights packed for oneDNN do not say, and are never views."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata


def _size(tensor: torch.Tensor) -> int:
    """Bytes of the elements that are really there: a dimension of stride 0 repeats the same ones."""
    if tensor.is_mkldnn:
        return tensor.numel() * tensor.itemsize
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0]
    return math.prod(sizes) * tensor.itemsize
