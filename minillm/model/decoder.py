"""The decoder: tokens in, logits out, one class for every family. Built in chapter 02."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.kernels.softcap import soft_cap
from minillm.model.attention import AttentionBackend, can
from minillm.model.batch import ForwardBatch
from minillm.model.config import ModelConfig
from minillm.model.decoder_layer import DecoderLayer, kinds_of
from minillm.model.fingerprint import fingerprint
from minillm.model.fused import run_layers
from minillm.model.joined import JoinedDecoder
from minillm.model.layers import LayerRotaries, Linear, RMSNorm, Rotary, empty_parameter
from minillm.model.offload import LayerStream, offload

if TYPE_CHECKING:
    from minillm.model.lora_slots import LoraSlots

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
        device, matrices = torch.device(device), torch.device(linear_device or device)
        self.config, self.dtype, self.device = config, dtype, device
        self.embed_tokens = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary = _rotary(config, dtype, device)
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, dtype, device, matrices) for index in range(config.num_layers)
        )
        self.joined = JoinedDecoder()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, dtype, device, matrices)
        if config.tie_word_embeddings:
            self.lm_head.plain = self.embed_tokens
        self.stream: LayerStream | None = None  # of layers that lie in host memory
        self.lora: LoraSlots | None = None  # batch slots for adapters: chapter 23
        self.rotated = False  # whether its hidden states are those of the checkpoint, rotated: chapter 16

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attention: AttentionBackend, out: Tensor | None = None) -> Tensor:
        """Logits of the tokens in `batch.logits_indices`, [num_logits, vocab_size] float32; in `out`, if given."""
        if (logits := self.joined.logits(self, batch, attention, out)) is not None:
            return logits  # on a CPU: the same in one call, chapter 14
        rotary, hidden = self.rotary(batch.positions), self.embed(batch.token_ids)
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
        """Let every Linear choose its path for this machine; after the weights are filled. Returns self.

        `cpu_offload_bytes` of the last layers stay in host memory and are streamed, see `minillm.model.offload`.
        """
        self.fingerprint = fingerprint(self)
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
    kinds = [Rotary(rope, config.rotary_dim, dtype, device, scale) for rope in kinds_of(config)]
    return kinds[0] if len(kinds) == 1 else LayerRotaries(kinds)
