"""The decoder: tokens in, logits out, one class for every family. Built in chapter 02."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.kernels import native
from minillm.kernels.softcap import soft_cap
from minillm.model.attention import AttentionBackend, can
from minillm.model.batch import ForwardBatch
from minillm.model.config import ModelConfig
from minillm.model.fused import run_layers
from minillm.model.layers import (
    CosSin,
    LayerRotaries,
    Linear,
    RMSNorm,
    Rotary,
    SwiGLU,
    WholeNorm,
    apply_rotary,
    empty_parameter,
)
from minillm.model.offload import LayerStream, offload
from minillm.model.rope import RopeConfig
from minillm.quantization.linear import QuantizedLinear

WHOLE_UP_TO = 256  # tokens; with more the calls cost nothing beside the work, and the memory between them would grow
SAMPLED, LARGE_PRIME = 1024, 2654435761  # of every tensor, for the fingerprint
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
CACHE_BYTES = 16 * 2**20  # weights that a usual last-level cache holds from one step to the next


class Decoder(nn.Module):
    """A decoder-only transformer. New, its weights are unset: fill `checkpoint_views`, then call `prepare`.

    `linear_device` is where the matrices wait until they are quantized (chapter 15): "cpu", so that they never stand
    on the device in full, or "meta", if they come quantized.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        linear_device: torch.device | str | None = None,
    ):
        super().__init__()
        device = torch.device(device)
        matrices = torch.device(linear_device or device)
        self.config, self.dtype, self.device = config, dtype, device
        self.embed_tokens = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary = _rotary(config, dtype, device)
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, dtype, device, matrices) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, dtype, device, matrices)
        if config.tie_word_embeddings:
            self.lm_head.plain = self.embed_tokens
        self.stream: LayerStream | None = None  # of layers that lie in host memory

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attention: AttentionBackend, out: Tensor | None = None) -> Tensor:
        """Logits of the tokens in `batch.logits_indices`: [num_logits, vocab_size] float32,
        in `out` where it is given."""
        rotary = self.rotary(batch.positions)
        hidden = self.embed(batch.token_ids)
        if can(attention, "fused_store"):  # on a GPU: the same in fewer launches, chapter 14
            return self.logits(run_layers(self, hidden, rotary, attention, batch), out)
        for layer in self.in_order():
            hidden = layer(hidden, rotary, attention, batch)
        wanted = hidden.index_select(0, batch.logits_indices)  # [num_logits, hidden_size]
        return self.logits(self.norm(wanted), out)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_logits, vocab_size] float32 of hidden states behind the last norm."""
        logits = self.lm_head(hidden)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        logits = soft_cap(logits, self.config.logit_softcap)
        return logits.float() if out is None else out.copy_(logits)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size]: rows of the table, or of the output matrix that is one with it and quantized."""
        if self.embed_tokens is None:
            rows = self.lm_head.quantized.rows(token_ids, self.dtype)
        else:
            rows = F.embedding(token_ids, self.embed_tokens)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def in_order(self) -> Iterable[DecoderLayer]:
        """The layers, each when it can compute."""
        return self.layers if self.stream is None else self.stream.through(self.layers)

    def prepare(self, cpu_offload_bytes: int = 0) -> Decoder:
        """Let every Linear choose its road for this machine; after the weights are filled. Returns self.

        `cpu_offload_bytes` of the last layers stay in host memory and are streamed, see `minillm.model.offload`.
        """
        self.fingerprint = self._fingerprint()
        if cpu_offload_bytes:
            self.stream = offload(self.layers, cpu_offload_bytes, self.device)
            self.lm_head.move_to(self.device)
        in_cache = self.config.num_parameters() * self.dtype.itemsize <= CACHE_BYTES
        for linear in self.linears().values():
            if self.stream is None or linear not in self.stream.linears:
                linear.prepare(in_cache)
        for layer in self.layers:
            layer.prepare(self.config)
        return self

    def _fingerprint(self) -> str:
        """Names this model by its configuration, dtype and a sample of every weight. Keys and values that another
        model computed, or this one before it was trained further, must never be taken for its own."""
        digest = hashlib.sha256(f"{self.config}{self.dtype}".encode())
        tensors = self.checkpoint_views()
        for name, module in self.named_modules():
            if isinstance(module, QuantizedLinear):
                digest.update(f"{name} {module.weight.format} {module.activations}".encode())
                tensors |= {f"{name}.{part}": tensor for part, tensor in module.tensors().items()}
        for name, tensor in tensors.items():
            # From all over the tensor: an even stride would meet the same few columns in every row.
            places = torch.arange(SAMPLED, device=tensor.device) * LARGE_PRIME % max(1, tensor.numel())
            sample = tensor.flatten()[places if tensor.numel() else []].float().cpu()
            digest.update(name.encode() + sample.numpy().tobytes())
        return digest.hexdigest()

    def linears(self) -> dict[str, Linear]:
        """Every matrix but the embedding, by its place, such as layers.0.mlp.down_proj; and lm_head."""
        linears = {}
        for index, layer in enumerate(self.layers):
            linears |= {f"layers.{index}.{place}": linear for place, linear in layer.linears().items()}
        return linears | {"lm_head": self.lm_head}

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Where each tensor of a Hugging Face checkpoint goes: its name to a view of our (fused) weight."""
        views = {"model.norm.weight": self.norm.weight}
        if self.embed_tokens is not None:
            views["model.embed_tokens.weight"] = self.embed_tokens
        if not self.config.tie_word_embeddings and self.lm_head.plain is not None:
            views["lm_head.weight"] = self.lm_head.plain
        for index, layer in enumerate(self.layers):
            views |= {f"model.layers.{index}.{name}": view for name, view in layer.checkpoint_views().items()}
        return views


def _rotary(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Rotary | LayerRotaries:
    """One for all layers, or several kinds. Scores divided by another number than sqrt(head_dim) are those of queries
    and keys that are both multiplied, which their angles do."""
    wanted = config.attention_scale
    scale = 1.0 if wanted is None else (wanted * config.head_dim**0.5) ** 0.5
    kinds = [Rotary(rope, config.head_dim, dtype, device, scale) for rope in _kinds(config)]
    return kinds[0] if len(kinds) == 1 else LayerRotaries(kinds)


def _kinds(config: ModelConfig) -> list[RopeConfig | None]:
    """The different rotations of the layers, mostly one."""
    return list(dict.fromkeys(config.layer_ropes)) or [config.rope]


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
        self.self_attn = SelfAttention(config, index, dtype, device, matrices)
        self.attention_out_norm = norm() if after else nn.Identity()
        self.post_attention_layernorm = norm() if before else nn.Identity()
        sizes = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.mlp = SwiGLU(*sizes, dtype, device, matrices, config.activation)
        self.mlp_out_norm = norm() if after else nn.Identity()
        self.residual_scale, self.norm_names = config.residual_scale, NORM_NAMES[config.norms]
        kinds = _kinds(config)
        self.kind = kinds.index(config.layer_ropes[index]) if len(kinds) > 1 else None  # of its rotation
        self.softcap = config.attention_softcap
        self.whole: native.Layer | None = None

    def prepare(self, config: ModelConfig) -> None:
        """After the weights are packed: where the CPU's kernels have them all, the layer can run as a whole."""
        if not config.is_plain:
            return
        attn, linears = self.self_attn, dict(zip(native.Layer.MATRICES, self.linears().values()))
        matrices = {name: _matrix(linear) for name, linear in linears.items()}
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
            intermediate=config.intermediate_size,
        )
        self.whole = native.Layer.of(matrices, weights, sizes, config.rms_norm_eps)

    def forward(self, hidden: Tensor, rotary: CosSin, attention: AttentionBackend, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] in and out; the input may be overwritten."""
        rotary = self.angles(rotary)
        if (softcap := can(attention, "softcap")) != self.softcap:
            raise ValueError(
                f"{type(attention).__name__} caps scores at {softcap}, this model at {self.softcap}; TorchAttention can"
            )
        if self.whole is not None and hidden.shape[0] <= WHOLE_UP_TO and can(attention, "fused_layer"):
            attention.run_layer(
                self.whole, hidden, rotary, self.self_attn.index, batch
            )  # the same, in one call: chapter 14
            return hidden
        attended = self.self_attn(self.input_layernorm(hidden), rotary, attention, batch)
        hidden = self._add(hidden, self.attention_out_norm(attended))
        return self._add(hidden, self.mlp_out_norm(self.mlp(self.post_attention_layernorm(hidden))))

    def angles(self, rotary: CosSin) -> CosSin:
        """Its own among those of all kinds of layers."""
        return rotary if self.kind is None else (rotary[0][self.kind], rotary[1][self.kind])

    def _add(self, hidden: Tensor, change: Tensor) -> Tensor:
        return hidden + (change if self.residual_scale == 1.0 else change * self.residual_scale)

    def linears(self) -> dict[str, Linear]:
        """The four matrices by their places, in the order in which they compute. Whatever goes through a layer's
        weights (loading, quantizing, streaming, packing) goes through these;
        `Linear.checkpoint_rows` names what a checkpoint has."""
        attn, mlp = self.self_attn, self.mlp
        return {
            "self_attn.qkv_proj": attn.qkv_proj,
            "self_attn.o_proj": attn.o_proj,
            "mlp.gate_up_proj": mlp.gate_up_proj,
            "mlp.down_proj": mlp.down_proj,
        }

    def checkpoint_views(self) -> dict[str, Tensor]:
        norms = {name: norm for name, norm in self.named_modules() if isinstance(norm, RMSNorm)}
        views = {f"{self.norm_names.get(name, name)}.weight": norm.weight for name, norm in norms.items()}
        for place, linear in self.linears().items():
            views |= linear.checkpoint_views(place)
        return views


def _matrix(linear: Linear) -> native.Matrix | None:
    """A linear layer as the CPU's kernels take it; None where it takes another road,
    or has more to it than a product."""
    quantized = linear.quantized
    if quantized is None:
        return None if linear.panels is None else native.Matrix.of(linear.panels, linear.out_features)
    if quantized.road != "native" or quantized.outliers is not None or quantized.order is not None:
        return None
    return quantized.matrix.struct


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
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            norm, whole = (WholeNorm, True) if config.qk_norm_whole else (RMSNorm, False)
            sizes = [self.head_dim * (heads if whole else 1) for heads in self.heads[:2]]
            self.q_norm, self.k_norm = (norm(size, config.rms_norm_eps, dtype, device) for size in sizes)

    def forward(self, x: Tensor, rotary: CosSin, attention: AttentionBackend, batch: ForwardBatch) -> Tensor:
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [num_tokens, heads of q, k and v, head_dim]
        q, k, v = qkv.split_with_sizes(self.heads, dim=1)
        if self.q_norm is not None:
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        else:
            qk = qkv[:, : -self.heads[2]]
        q, k = apply_rotary(qk, *rotary).split_with_sizes(self.heads[:2], dim=1)  # both at once: half the kernels
        out = attention.attend(q, k, v, self.index, batch)  # [num_tokens, num_heads, head_dim]
        return self.o_proj(out.flatten(1))
