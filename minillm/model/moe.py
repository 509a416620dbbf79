"""A mixture of experts in place of an MLP: each token goes through the few that a router chooses. Built in chapter 21.

    x -> gate -> route -> experts and weights of each token
         sort the tokens by expert, one product for all rows of each expert, back into the tokens' order, weighted sum
         + the shared expert, where there is one

The experts are computed in one call where kernels serve: ours in C on a CPU, plain or low-bit; ours in Triton on a
GPU, where the weights of a layer lie side by side. Elsewhere (low-bit on a GPU, no compiler) expert after expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minillm.kernels import grouped_matmul, language, native, native_experts, native_structs
from minillm.model.batch import adapted
from minillm.model.gpt_oss import CLAMPED, ClampedSwiGLU
from minillm.model.layers import ACTIVATIONS, Linear, SwiGLU, empty_parameter
from minillm.model.packed import native_matrix
from minillm.model.routing import RoutingRecorder, route, sigmoid
from minillm.trace import Trace

if TYPE_CHECKING:
    from minillm.kernels.lora import TokenSlots
    from minillm.model.config import ModelConfig


class MixtureOfExperts(nn.Module):
    """The MLP of one layer: `experts`, the router `gate`, and a shared expert that every token goes through."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device, matrices: torch.device
    ):
        super().__init__()
        self.moe, self.layer, self.activation = config.moe, layer, config.activation
        moe, hidden = config.moe, config.hidden_size
        made = (moe.biases, dtype, device, matrices, config.activation)
        kind = ClampedSwiGLU if config.activation == CLAMPED else SwiGLU
        self.gate = Linear(hidden, moe.num_experts, moe.biases, dtype, device)  # small, and never in low-bit form
        self.correction_bias = None
        if moe.correction_bias:
            self.correction_bias = empty_parameter(moe.num_experts, dtype=torch.float32, device=device)
        self.experts = nn.ModuleList(kind(hidden, moe.intermediate_size, *made) for _ in range(moe.num_held))
        self.shared_expert = self.shared_expert_gate = None
        if moe.shared_intermediate_size:
            self.shared_expert = SwiGLU(hidden, moe.shared_intermediate_size, *made)
            if moe.shared_expert_gate:
                self.shared_expert_gate = Linear(hidden, 1, False, dtype, device)
        self.products = ExpertProducts(self.experts)
        self.recorder: RoutingRecorder | None = None
        self.trace: Trace | None = None

    def forward(self, x: Tensor, token_slots: TokenSlots | None = None) -> Tensor:
        """[num_tokens, hidden_size] in and out."""
        weights, experts = self.choose(x)
        out = self.products(x, weights, experts)
        return out if self.shared_expert is None else out + self.shared(x, token_slots)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each token, see `route`."""
        weights, experts = route(self.gate(x), self.moe, self.correction_bias)
        self.record(experts)
        return weights, experts

    def experts_told(self, mixture: native_structs.Mixture, num_tokens: int) -> Tensor | None:
        """Where the next call of a whole layer writes the chosen experts, for `record`; None while there is no
        recorder."""
        is_recorded = self.recorder is not None or (self.trace is not None and self.trace.enabled)
        told = torch.empty(num_tokens, mixture.each, dtype=torch.int64) if is_recorded else None
        mixture.told = None if told is None else told.data_ptr()
        return told

    def record(self, experts: Tensor) -> None:
        """Tell the recorder and the trace which experts a step's tokens chose, [num_tokens, num_experts_per_tok]."""
        if self.recorder is not None:
            self.recorder.add(self.layer, experts)
        if self.trace is not None and self.trace.enabled:
            self.trace.count("experts touched", len(experts.unique()), layer=self.layer, tokens=len(experts))

    def shared(self, x: Tensor, token_slots: TokenSlots | None = None) -> Tensor:
        made = adapted(self.shared_expert, x, token_slots)
        return made if self.shared_expert_gate is None else made * sigmoid(self.shared_expert_gate(x))

    def prepare(self) -> None:
        """After the matrices of `linears` are prepared: choose how the experts are computed, once."""
        for linear in (self.gate, self.shared_expert_gate):
            if linear is not None:
                linear.prepare()
        self.products.prepare()

    def native_mixture(self) -> native_structs.Mixture | None:
        """After `prepare`: the router and the experts as part of a whole layer in C. None where the experts take
        another path, and where more belongs to the layer: groups of experts, a shared one."""
        moe, router = self.moe, native_matrix(self.gate)
        fits = router is not None and router.in_features == self.gate.in_features
        if self.products.path != "native" or not fits or moe.n_group > 1 or self.shared_expert is not None:
            return None
        how = moe.num_experts_per_tok, moe.scoring_func, moe.norm_topk_prob, moe.routed_scaling_factor
        return native_experts.mixture(self.products.packed, router, self.correction_bias, *how)

    def linears(self) -> dict[str, Linear]:
        """The matrices of all experts by their places, those of the shared one last."""
        experts = {f"experts.{index}": expert for index, expert in enumerate(self.experts)}
        if self.shared_expert is not None:
            experts["shared_expert"] = self.shared_expert
        return {
            f"{place}.{name}": getattr(expert, name)
            for place, expert in experts.items()
            for name in ("gate_up_proj", "down_proj")
        }

    def router_views(self) -> dict[str, Tensor]:
        """Where the tensors of a checkpoint go that are not in `linears`."""
        views = self.gate.checkpoint_views("gate")
        if self.correction_bias is not None:
            views["gate.e_score_correction_bias"] = self.correction_bias
        if self.shared_expert_gate is not None:
            views |= self.shared_expert_gate.checkpoint_views("shared_expert_gate")
        return views


class ExpertProducts:
    """The products of some experts, numbered from 0. `prepare` chooses the `path`, once, when their matrices are
    prepared: "native" or "triton", in one call for all, or "loop", one expert after the other."""

    def __init__(self, experts: Sequence[SwiGLU]):
        self.experts, self.path, self.packed = experts, "loop", None

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of what the chosen experts make of each token of x [num_tokens, hidden_size].

        weights float32 and chosen int64 [num_tokens, experts_per_token].
        """
        if self.path == "native":
            return native_experts.run_experts(x, weights, chosen, self.packed)
        if self.path == "triton":
            activation = ACTIVATIONS[self.experts[0].activation]
            return grouped_matmul.run_experts(x, weights, chosen, *self.packed, activation)
        rows = grouped_matmul.sort_by_expert(chosen, len(self.experts))
        gathered = x[rows.tokens]
        made = torch.empty_like(gathered)
        for expert, (first, end) in zip(self.experts, pairwise(rows.offsets.tolist())):
            if end > first:
                made[first:end] = expert(gathered[first:end])
        return rows.combine(made, weights)

    def prepare(self) -> None:
        """Raises nothing: where no kernel serves, the path stays "loop"."""
        pairs = [(expert.gate_up_proj, expert.down_proj) for expert in self.experts]
        if not pairs or self.experts[0].activation == CLAMPED:
            return
        dtype, is_silu = pairs[0][0].dtype, self.experts[0].activation == "silu"
        matrices = [tuple(map(native_matrix, pair)) for pair in pairs]
        if is_silu and native.library(dtype) is not None and None not in matrices[0]:
            if (packed := native_experts.join(matrices)) is not None:
                self.packed, self.path = packed, "native"
            return
        plain = pairs[0][0].plain
        on_gpu = plain is not None and plain.is_cuda and language.serves(plain)
        if on_gpu and all(linear.quantized is None for pair in pairs for linear in pair):
            self.packed, self.path = tuple(map(_side_by_side, zip(*pairs))), "triton"


def _side_by_side(linears: tuple[Linear, ...]) -> Tensor:
    """The weights of all experts as one tensor [num_experts, out_features, in_features], of which each keeps a view."""
    whole = torch.stack([linear.plain for linear in linears])
    for linear, part in zip(linears, whole):
        linear.plain = nn.Parameter(part, requires_grad=False)
    return whole
