"""The largest tensor that an answer makes: copies are seen, not read out of the source. Built in chapter 02."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that is made with memory of its own (a view has none), and by which operation."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.operation, self.operations = 0, "", set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operations.add(function.name())
        there = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in there:
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                if elements > self.largest:
                    self.largest, self.operation = elements, function.name()
        return out
