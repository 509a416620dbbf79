"""Attention sinks in the kernels over pages: learned logits, and first tokens that are kept. Built in chapter 17.

learned logits   one score without a value in the softmax of each head: what the online softmax begins with
kept tokens      the first positions, seen by all queries beside the window, by queries turned for them
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.language import tl, triton
from minillm.kernels.softcap import sink_softmax


@triton.jit
def begin_softmax(sink_logits, heads, real, first, ROWS: tl.constexpr):
    """What the online softmax of each row begins with: the largest score so far, and the sum of exponentials below it.
    With sink_logits it is one score without a value, the learned one of the row's head (chapter 17); only where the
    program reads the `first` part of the keys, since it counts once."""
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    if sink_logits is not None:
        learned = tl.load(sink_logits + heads, real, float("-inf")) * 1.4426950408889634  # log2(e): powers of two
        best = tl.where(first, learned, best)
    return best, tl.where(best == float("-inf"), 0.0, 1.0)


def check_sinks(
    q: Tensor, q_sink: Tensor | None, sinks: int, window: int | None, sink_logits: Tensor | None = None
) -> None:
    """Raise ValueError unless sinks come with a window and with queries of their own that lie as q does, and learned
    logits are one for each head."""
    if sink_logits is not None:
        shape, kind = tuple(sink_logits.shape), sink_logits.dtype
        if shape != (q.shape[1],) or kind is not torch.float32 or not sink_logits.is_contiguous():
            raise ValueError(f"sink_logits must be float32 [{q.shape[1]}] in one piece; they are {kind} {list(shape)}")
    if sinks == 0 and q_sink is None:
        return
    if sinks < 1 or window is None:
        raise ValueError(
            f"sinks={sinks} and window={window}: sinks are 1 position or more kept beside a window; give both"
        )
    if q_sink is None or q_sink.shape[1:] != q.shape[1:] or len(q_sink) < len(q) or q_sink.dtype is not q.dtype:
        raise ValueError(f"sinks={sinks} needs q_sink, the queries turned for them, with the shape and dtype of q")
    if not q_sink.is_contiguous():
        raise ValueError("q_sink must lie in one piece; call .contiguous()")


def torch_attend_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float | None,
    sinks: int,
    q_sink: Tensor,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """`torch_attend` where the first `sinks` keys are seen by all queries, as q_sink."""
    num_queries, num_keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    position = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
    key = torch.arange(num_keys, device=q.device)
    seen = (key <= position) & ((key < sinks) | (key > position - window))
    accurate = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.to(accurate).repeat_interleave(group, dim=1) for x in (k, v))
    far, near = (torch.einsum("qhd,khd->hqk", x.to(accurate), keys) for x in (q_sink, q))
    scores = torch.where(key < sinks, far, near) * (q.shape[2] ** -0.5 if scale is None else scale)
    weights = sink_softmax(scores.masked_fill(~seen, float("-inf")), sink_logits)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
