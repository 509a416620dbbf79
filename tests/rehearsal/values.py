"""What the host reads from the pretended GPU: what it wrote, where no operation has touched it since;
else it is made up."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_TOKEN = 5  # that is made up


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def touch(tensor: Tensor) -> None:
    """Something was written there: what was remembered of this storage is past."""
    storage = tensor.untyped_storage()
    storage.written = getattr(storage, "written", 0) + 1


def remember(tensor: Tensor, value: Tensor) -> None:
    tensor.value = value, getattr(tensor.untyped_storage(), "written", 0)


def recall(tensor: Tensor) -> Tensor | None:
    value, written = getattr(tensor, "value", (None, 0))
    return value if written == getattr(tensor.untyped_storage(), "written", 0) else None


def remember_view(view: Tensor, base: Tensor, value: Tensor) -> None:
    """`view` is part of `base`, whose elements lie side by side as those of `value` do."""
    if view.meta.untyped_storage()._cdata != base.meta.untyped_storage()._cdata or not (
        value.is_contiguous() and base.is_contiguous()
    ):
        return
    if view.dtype is not base.dtype:
        if view.is_contiguous() and view.dim() == base.dim() and nbytes(view) == nbytes(base):
            remember(view, value.view(view.dtype))
    elif view.storage_offset() >= base.storage_offset():
        remember(view, value.as_strided(view.shape, view.stride(), view.storage_offset() - base.storage_offset()))


def value_of(tensor: Tensor) -> Tensor:
    """What the host reads of it. The best tokens of a row are all different."""
    if (value := recall(tensor)) is not None:
        return value
    if tensor.is_floating_point():
        return torch.full(tensor.shape, -1.0).to(tensor.dtype)
    if tensor.dtype is torch.bool:
        return torch.zeros(tensor.shape, dtype=torch.bool)
    value = torch.full(tensor.shape, FIRST_TOKEN, dtype=tensor.dtype)
    return value + torch.arange(tensor.shape[1]).to(tensor.dtype) if tensor.dim() == 2 else value
