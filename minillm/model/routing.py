"""The router: which experts each token goes to, and with what weights. Built in chapter 21.

    logits of a token      1.2   0.3   2.0  -0.5            four experts, two for each token
    softmax                0.26  0.11  0.58  0.05           the scores
    the best two           0 and 2
    their weights          0.26  0.58                       or 0.31 and 0.69, renormalised

A row's choice depends on that row alone, whatever rows are beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minillm.kernels import native, native_experts
from minillm.model.moe_config import MoEConfig

if TYPE_CHECKING:
    from minillm.model.decoder import Decoder
    from minillm.trace import Trace


def route(logits: Tensor, moe: MoEConfig, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights, float32, and experts, int64, of each token: both [num_tokens, num_experts_per_tok].

    logits [num_tokens, num_experts] in any float dtype; correction_bias [num_experts] where `moe` has one.
    """
    if native.serves(logits) and moe.n_group == 1:  # one pass, and no small operations
        norm, factor = moe.norm_topk_prob, moe.routed_scaling_factor
        return native_experts.route(logits, correction_bias, moe.num_experts_per_tok, moe.scoring_func, norm, factor)
    logits = logits.float()
    if moe.scoring_func == "softmax_after_topk":
        chosen, experts = logits.topk(moe.num_experts_per_tok, dim=-1)
        return chosen.softmax(-1) * moe.routed_scaling_factor, experts
    scores = sigmoid(logits) if moe.scoring_func == "sigmoid" else logits.softmax(-1)
    choice = scores if correction_bias is None else scores + correction_bias
    if moe.n_group > 1:
        choice = _in_best_groups(choice, moe)
    weights, experts = choice.topk(moe.num_experts_per_tok, dim=-1)
    if choice is not scores:
        weights = scores.gather(1, experts)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)  # sigmoids may all be 0
    return (weights if moe.routed_scaling_factor == 1.0 else weights * moe.routed_scaling_factor), experts


def sigmoid(x: Tensor) -> Tensor:
    """The same number for an input wherever it lies in `x`. torch computes what fills a vector of the CPU by another
    formula than what is left over, so that the last bit of a float32 sigmoid depends on the number of rows; rounded
    from float64 it does not."""
    return x.double().sigmoid().to(x.dtype) if x.is_cpu else x.sigmoid()


def _in_best_groups(choice: Tensor, moe: MoEConfig) -> Tensor:
    """`choice`, minus infinity outside of the best groups. A group is as good as its best expert (softmax, DeepSeek-V2,
    arXiv:2405.04434), or as the sum of its best two (sigmoids, DeepSeek-V3, arXiv:2412.19437)."""
    groups = choice.unflatten(-1, (moe.n_group, -1))  # [num_tokens, n_group, experts of a group]
    counted = 1 if moe.scoring_func == "softmax" else 2
    best = groups.topk(counted, dim=-1).values.sum(-1).topk(moe.topk_group, dim=-1).indices
    allowed = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0)[..., None]
    return torch.where(allowed > 0, groups, -torch.inf).flatten(1)


class RoutingRecorder:
    """The experts that were chosen: by layer, one tensor [num_tokens, num_experts_per_tok] for each forward pass."""

    def __init__(self) -> None:
        self.chosen: dict[int, list[Tensor]] = defaultdict(list)

    def add(self, layer: int, experts: Tensor) -> None:
        self.chosen[layer].append(experts.detach().cpu())

    def touched(self, layer: int) -> list[int]:
        """How many experts each forward pass read in this layer."""
        return [len(experts.unique()) for experts in self.chosen[layer]]

    def counts(self, layer: int, num_experts: int) -> Tensor:
        """How many tokens went to each expert of the layer, in all: int64 [num_experts]."""
        chosen = [experts.flatten() for experts in self.chosen[layer]]
        return torch.cat(chosen).bincount(minlength=num_experts) if chosen else torch.zeros(num_experts).long()


@contextmanager
def record_routing(decoder: Decoder) -> Iterator[RoutingRecorder]:
    """`with record_routing(llm.model) as recorder:` records every forward pass of this process within.

    Raises ValueError for a model without experts.
    """
    if decoder.config.moe is None:
        raise ValueError(f"model_type={decoder.config.model_type!r} has no experts; there is no routing to record")
    recorder, layers = RoutingRecorder(), [decoder.layers[index].mlp for index in decoder.config.moe.layers]
    before = [mlp.recorder for mlp in layers]
    try:
        for mlp in layers:
            mlp.recorder = recorder
        yield recorder
    finally:
        for mlp, earlier in zip(layers, before):
            mlp.recorder = earlier


def trace_routing(decoder: Decoder, trace: Trace) -> None:
    """Let each layer count the experts that a step reads, as "experts touched" in `trace`, while that is enabled."""
    for index in decoder.config.moe.layers if decoder.config.moe else ():
        decoder.layers[index].mlp.trace = trace
