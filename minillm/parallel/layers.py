"""Layers that are cut between ranks, and the sums that make them one again. Built in chapter 20.

    x [tokens, hidden]  the same on each rank
        gate_up_proj    column parallel: a rank has some of the outputs, and needs no message
        silu * up       on those alone
        down_proj       row parallel: a rank has the inputs that it made, and a part of each sum
    all-reduce          the sum over the ranks: [tokens, hidden], the same on each again

Attention is cut likewise: q, k and v by heads, o_proj by the same heads. So a layer has two all-reduces, and no other
message (Shoeybi et al. 2019, Megatron-LM, https://arxiv.org/abs/1909.08053). A column-parallel layer is an ordinary
`Linear` of fewer outputs; what differs stands here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model.layers import Linear, WholeNorm
from minillm.parallel.communicator import Communicator

if TYPE_CHECKING:
    from minillm.kernels.lora import TokenSlots


class RowParallelLinear(Linear):
    """y = the sum over the ranks of x_r W_rᵀ, + b. A rank has the columns of W whose inputs it made.

    The bias belongs to the sum, not to its parts: the first rank alone adds it. An adapter's product is a part like the
    base product, so one all-reduce sums both.
    """

    communicator: Communicator

    @classmethod
    def of(cls, linear: Linear, communicator: Communicator) -> Self:
        """The same weights, which it takes over from `linear`."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.__dict__.update(linear.__dict__)
        made.communicator = communicator
        return made

    def prepare(self, in_cache: bool = False) -> None:
        if self.communicator.layout.tensor_rank:
            self.bias = None
        super().prepare(in_cache)

    def forward(self, x: Tensor, token_slots: TokenSlots | None = None) -> Tensor:
        """[num_tokens, in_features of this rank] -> [num_tokens, out_features], the same on each rank."""
        return self.communicator.all_reduce(super().forward(x, token_slots))


class ParallelWholeNorm(WholeNorm):
    """RMSNorm over all heads of a token (OLMo 2), some of which each rank has: the sums of squares are added up.

    A KV head that several ranks have counts as often in the sum as in the number of features.
    """

    def __init__(self, norm: WholeNorm, communicator: Communicator):
        nn.Module.__init__(self)
        self.__dict__.update(norm.__dict__)
        self.communicator = communicator
        self.scale = 1 / (norm.size * communicator.layout.tensor_parallel_size)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, heads of this rank, head_dim]"""
        flat = x.flatten(1).float()
        squares = self.communicator.all_reduce(flat.square().sum(dim=-1, keepdim=True))  # [num_tokens, 1]
        normed = flat * torch.rsqrt(squares * self.scale + self.eps)
        return (normed.to(x.dtype) * self.weight).view(x.shape)


def parallel_embedding(rows: range, token_ids: Tensor, table: Tensor, communicator: Communicator) -> Tensor:
    """[num_tokens, hidden_size] from a table whose `rows` this rank has: others are zeros here, and come with the
    sum."""
    local = token_ids - rows.start
    outside = (local < 0) | (local >= len(rows))
    found = F.embedding(local.masked_fill(outside, 0), table)
    return communicator.all_reduce(found.masked_fill_(outside[:, None], 0))
