"""A layer of the decoder: attention, then MLP. Built in chapter 02."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from minillm.kernels import native, native_structs
from minillm.model.attention import AttentionBackend, can
from minillm.model.batch import ForwardBatch, adapted
from minillm.model.config import ModelConfig
from minillm.model.layers import (
    CosSin,
    Linear,
    RMSNorm,
    SwiGLU,
    WholeNorm,
    apply_rotary,
    empty_parameter,
)
from minillm.model.mla import LatentSelfAttention
from minillm.model.moe import MixtureOfExperts
from minillm.model.packed import native_matrix
from minillm.model.rope import RopeConfig

WHOLE_LAYERS = True  # whether layers run as a whole where they can: chapter 14 compares
# What a checkpoint calls the norms of a layer, where it is not what we do.
NORM_NAMES = {
    "before": {},
    "after": {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_out_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}


class DecoderLayer(nn.Module):
    """Attention, then MLP, each on a normed copy and added back to the residual stream.

    Some families norm what each of the two gives instead, or both; some multiply it.
    """

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, matrices: torch.device
    ):
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, dtype, device)
        before, after = config.norms in ("before", "both"), config.norms in ("after", "both")
        self.input_layernorm = norm() if before else nn.Identity()
        attention = SelfAttention if config.mla is None else LatentSelfAttention
        self.self_attn, self.index = attention(config, index, dtype, device, matrices), index
        self.attention_out_norm = norm() if after else nn.Identity()
        self.post_attention_layernorm = norm() if before else nn.Identity()
        sizes = config.hidden_size, config.intermediate_size, config.mlp_bias
        if config.moe is not None and index in config.moe.layers:
            self.mlp = MixtureOfExperts(config, index, dtype, device, matrices)
        else:
            self.mlp = SwiGLU(*sizes, dtype, device, matrices, config.activation)
        self.mlp_out_norm = norm() if after else nn.Identity()
        self.residual_scale, self.norm_names = config.residual_scale, NORM_NAMES[config.norms]
        kinds = kinds_of(config)
        self.kind = kinds.index(config.layer_ropes[index]) if len(kinds) > 1 else None  # of its rotation
        self.softcap = config.attention_softcap
        self.tap: Callable[[Tensor], object] | None = None  # `minillm.model.features`: what fused steps tell
        self.whole: native.Layer | None = None
        self.mixture: native_structs.Mixture | None = None  # what `whole` has in place of an MLP

    def prepare(self, config: ModelConfig) -> None:
        """After the weights are packed: where the CPU's kernels have them all, the layer can run as a whole."""
        has_experts = isinstance(self.mlp, MixtureOfExperts)
        if has_experts:
            self.mlp.prepare()
            self.mixture = self.mlp.native_mixture()
        if not config.has_plain_halves or (has_experts and self.mixture is None):
            return
        attn, linears = self.self_attn, dict(zip(native.Layer.MATRICES, self.linears().values()))
        if has_experts:
            linears = {name: linears[name] for name in ("qkv", "o")}
        matrices = {name: native_matrix(linear) for name, linear in linears.items()}
        if any(matrix is None or matrix.in_features != linears[name].in_features for name, matrix in matrices.items()):
            return
        weights = {f"{name}_bias": linear.bias for name, linear in linears.items()}
        weights |= {"input_norm": self.input_layernorm.weight, "post_norm": self.post_attention_layernorm.weight}
        weights |= {name: norm and norm.weight for name, norm in (("q_norm", attn.q_norm), ("k_norm", attn.k_norm))}
        sizes = dict(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            intermediate=0 if has_experts else config.intermediate_size,
        )
        self.whole = native.Layer.of(matrices, weights, sizes, config.rms_norm_eps, self.mixture)

    def forward(self, hidden: Tensor, rotary: CosSin, attention: AttentionBackend, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] in and out; the input may be overwritten."""
        rotary = self.angles(rotary)
        if self.runs_whole(batch) and can(attention, "fused_layer"):
            # The same, in one call: chapter 14.
            experts = None if self.mixture is None else self.mlp.experts_told(self.mixture, len(hidden))
            attention.run_layer(self.whole, hidden, rotary, self.index, batch)
            if experts is not None:
                self.mlp.record(experts)
            return hidden
        if (can(attention, "sink_logits") is None) != (self.self_attn.sinks is None):
            raise ValueError(
                f"{type(attention).__name__} and this model differ: one of them has learned sink logits, the other has "
                "none; build_attention gives a backend those of its model"
            )
        if (softcap := can(attention, "softcap")) != self.softcap:
            raise ValueError(
                f"{type(attention).__name__} caps scores at {softcap}, this model at {self.softcap}; TorchAttention can"
            )
        attended = self.self_attn(self.input_layernorm(hidden), rotary, attention, batch)
        hidden = self._add(hidden, self.attention_out_norm(attended))
        out = adapted(self.mlp, self.post_attention_layernorm(hidden), batch.token_slots)
        return self._add(hidden, self.mlp_out_norm(out))

    def runs_whole(self, batch: ForwardBatch) -> bool:
        """Whether one call can compute what this batch needs, its adapters included."""
        return self.whole is not None and WHOLE_LAYERS and (batch.token_slots is None or bool(self.whole.adapters))

    def angles(self, rotary: CosSin) -> CosSin:
        """Its own among those of all kinds of layers."""
        return rotary if self.kind is None else (rotary[0][self.kind], rotary[1][self.kind])

    def _add(self, hidden: Tensor, change: Tensor) -> Tensor:
        return hidden + (change if self.residual_scale == 1.0 else change * self.residual_scale)

    def linears(self) -> dict[str, Linear]:
        """The matrices by their places, in the order in which they compute; of experts, those of all.
        Whatever goes through a layer's weights (loading, quantizing, streaming, packing) goes through these;
        `Linear.checkpoint_rows` names what a checkpoint has."""
        mlp = self.mlp
        linears = {f"self_attn.{name}": linear for name, linear in self.self_attn.linears().items()}
        if isinstance(mlp, MixtureOfExperts):
            return linears | {f"mlp.{place}": linear for place, linear in mlp.linears().items()}
        return linears | {"mlp.gate_up_proj": mlp.gate_up_proj, "mlp.down_proj": mlp.down_proj}

    def checkpoint_views(self) -> dict[str, Tensor]:
        norms = {name: norm for name, norm in self.named_modules() if isinstance(norm, RMSNorm)}
        views = {f"{self.norm_names.get(name, name)}.weight": norm.weight for name, norm in norms.items()}
        if self.self_attn.sinks is not None:
            views["self_attn.sinks"] = self.self_attn.sinks
        for place, linear in self.linears().items():
            views |= linear.checkpoint_views(place)
        if isinstance(self.mlp, MixtureOfExperts):
            views |= {f"mlp.{name}": view for name, view in self.mlp.router_views().items()}
        if isinstance(self.self_attn, LatentSelfAttention):
            views["self_attn.kv_b_proj.weight"] = self.self_attn.kv_b_proj
        return views


class SelfAttention(nn.Module):
    """Project to queries, keys and values, rotate, let the backend attend, project back."""

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, matrices: torch.device
    ):
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]  # of q, k and v
        parts = {name: heads * self.head_dim for name, heads in zip(("q_proj", "k_proj", "v_proj"), self.heads)}
        self.qkv_proj = Linear(config.hidden_size, sum(parts.values()), config.qkv_bias, dtype, device, matrices, parts)
        self.o_proj = Linear(
            config.num_heads * self.head_dim, config.hidden_size, config.o_bias, dtype, device, matrices
        )
        self.sinks = empty_parameter(config.num_heads, dtype=dtype, device=device) if config.sink_logits else None
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            norm, whole = (WholeNorm, True) if config.qk_norm_whole else (RMSNorm, False)
            sizes = [self.head_dim * (heads if whole else 1) for heads in self.heads[:2]]
            self.q_norm, self.k_norm = (norm(size, config.rms_norm_eps, dtype, device) for size in sizes)

    def forward(self, x: Tensor, rotary: CosSin, attention: AttentionBackend, batch: ForwardBatch) -> Tensor:
        # [num_tokens, heads of q, k and v, head_dim]
        qkv = adapted(self.qkv_proj, x, batch.token_slots).view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split_with_sizes(self.heads, dim=1)
        if self.q_norm is not None:
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        else:
            qk = qkv[:, : -self.heads[2]]
        q, k = apply_rotary(qk, *rotary).split_with_sizes(self.heads[:2], dim=1)  # both at once: half the kernels
        out = attention.attend(q, k, v, self.index, batch)  # [num_tokens, num_heads, head_dim]
        return adapted(self.o_proj, out.flatten(1), batch.token_slots)

    def linears(self) -> dict[str, Linear]:
        """See `DecoderLayer.linears`."""
        return {"qkv_proj": self.qkv_proj, "o_proj": self.o_proj}


def kinds_of(config: ModelConfig) -> list[RopeConfig | None]:
    """The different rotations of the layers, mostly one."""
    return list(dict.fromkeys(config.layer_ropes)) or [config.rope]
