"""ParallelDecoder: the part of a decoder that one rank holds, and computes with the others. Built in chapter 20.

    stage 0    embed -> its layers -> hidden states ──send──┐
    stage 1              ┌──receive── its layers -> norm -> logits of this rank's part of the vocabulary

It is a `Decoder` of a smaller shape, so caches, attention backends and kernels serve it as they are. Layers are called
one by one: a whole layer in one call of C (chapter 14) has no place for the sum in its middle, so it is for ranks that
hold whole layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels.norm import rms_norm
from minillm.model.attention import AttentionBackend, can
from minillm.model.batch import ForwardBatch
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.decoder_layer import DecoderLayer
from minillm.model.fused import after_attention, before_attention, last_norm
from minillm.model.layers import CosSin, Linear, WholeNorm, empty_parameter
from minillm.model.moe import MixtureOfExperts
from minillm.parallel.communicator import Communicator
from minillm.parallel.expert import ParallelExperts
from minillm.parallel.layers import ParallelWholeNorm, RowParallelLinear, parallel_embedding
from minillm.parallel.layout import local_config


class ParallelDecoder(Decoder):
    """This rank's part of a decoder of the shape `whole`; `config` is the shape of the part.

    New, its weights are unset, as a `Decoder`'s are: `minillm.parallel.loading` fills them. `forward` gives the logits
    of this rank's part of the vocabulary, [num_logits, config.vocab_size]; in a stage that is not the last one there
    are none, [num_logits, 0].
    """

    def __init__(
        self,
        whole: ModelConfig,
        communicator: Communicator,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        linear_device: torch.device | str | None = None,
    ):
        layout = communicator.layout
        super().__init__(local_config(whole, layout), dtype, device, linear_device)
        self.whole, self.communicator, self.layout = whole, communicator, layout
        self.vocabulary = layout.vocabulary(whole.vocab_size)
        if layout.tensor_parallel_size > 1:
            for layer in self.layers:
                self._join(layer)
        if not layout.is_first and not (layout.is_last and whole.tie_word_embeddings):
            self.embed_tokens = None
        if not layout.is_last:
            self.lm_head.plain = empty_parameter(0, whole.hidden_size, dtype=dtype, device=self.device)

    def _join(self, layer: DecoderLayer) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        attn.o_proj = RowParallelLinear.of(attn.o_proj, self.communicator)
        if isinstance(mlp, MixtureOfExperts):
            layer.mlp = ParallelExperts.of(mlp, self.communicator)
        else:
            mlp.down_proj = RowParallelLinear.of(mlp.down_proj, self.communicator)
        if isinstance(getattr(attn, "q_norm", None), WholeNorm):  # latent attention has none
            attn.q_norm = ParallelWholeNorm(attn.q_norm, self.communicator)
            attn.k_norm = ParallelWholeNorm(attn.k_norm, self.communicator)

    def linears(self) -> dict[str, Linear]:
        """As `Decoder.linears`, by the places on this rank; lm_head in the last stage alone."""
        linears = super().linears()
        if not self.layout.is_last:
            del linears["lm_head"]
        return linears

    def checkpoint_views(self) -> dict[str, Tensor]:
        """As `Decoder.checkpoint_views`, by the names on this rank, where layers are counted from 0."""
        views = super().checkpoint_views()
        if not self.layout.is_last:
            for name in ("model.norm.weight", "lm_head.weight"):
                views.pop(name, None)
        return views

    def prepare(self, cpu_offload_bytes: int = 0) -> ParallelDecoder:
        """As `Decoder.prepare`."""
        if self.layout.tensor_rank:  # a bias belongs to a sum, which the ranks add up: the first one has it
            for layer in self.layers:
                if isinstance(layer.mlp, ParallelExperts):
                    layer.mlp.drop_biases()
        super().prepare(cpu_offload_bytes)
        if self.layout.tensor_parallel_size > 1:
            for layer in self.layers:
                layer.whole = None
        if self.layout.tensor_rank:  # a streamed matrix is not prepared, and has the bias that is the first rank's
            for layer in self.layers:
                layer.self_attn.o_proj.bias = None
                if not isinstance(layer.mlp, ParallelExperts):  # which are never streamed
                    layer.mlp.down_proj.bias = None
        return self

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attention: AttentionBackend, out: Tensor | None = None) -> Tensor:
        """As `Decoder.forward`, for this rank's layers and its part of the vocabulary."""
        if self.layout.world_size == 1:
            return super().forward(batch, attention, out)
        hidden, change = self._layers(self._enter(batch), self.rotary(batch.positions), attention, batch)
        if not self.layout.is_last:
            self.communicator.send(hidden if change is None else hidden + change)
            return torch.empty(len(batch.logits_indices), 0, device=self.device)
        if change is not None:
            return self.logits(last_norm(self, change, hidden, batch.logits_indices), out)
        return self.logits(self.norm(hidden.index_select(0, batch.logits_indices)), out)

    @torch.inference_mode()
    def states(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Hidden states of every token behind the last norm, [num_tokens, hidden_size] float32; of no meaning in a
        stage that is not the last one. `attention` has no fused kernels."""
        hidden, _ = self._layers(self._enter(batch), self.rotary(batch.positions), attention, batch)
        if self.layout.is_last:
            return self.norm(hidden).float()
        self.communicator.send(hidden)
        return hidden.float()

    def _enter(self, batch: ForwardBatch) -> Tensor:
        """What this rank's layers begin with, [num_tokens, hidden_size]."""
        if self.layout.is_first:
            return self.embed(batch.token_ids)
        shape = (batch.num_tokens, self.config.hidden_size)
        return self.communicator.receive(torch.empty(shape, dtype=self.dtype, device=self.device))

    def _layers(
        self, hidden: Tensor, rotary: CosSin, attention: AttentionBackend, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream behind this rank's layers, and with fused kernels what is still to be added to it."""
        if not can(attention, "fused_store"):
            for layer in self.in_order():
                hidden = layer(hidden, rotary, attention, batch)
            return hidden, None
        layers = list(self.layers)
        normed = rms_norm(hidden, layers[0].input_layernorm.weight, self.config.rms_norm_eps)
        for layer, following in zip(self.in_order(), [*layers[1:], None]):
            q = before_attention(self, layer, normed, rotary, attention, batch.slot_mapping, batch.token_slots)
            attended = attention.attend_stored(q, layer.self_attn.index, batch)
            normed = after_attention(self, layer, following, attended, hidden, batch.token_slots)
        return hidden, normed

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size]: rows of the table, of which each rank has some."""
        if self.layout.tensor_parallel_size == 1:
            return super().embed(token_ids)
        if self.embed_tokens is None:  # one with the output matrix, and quantized
            rows = range(self.lm_head.out_features)
            local = token_ids - self.vocabulary.start
            outside = (local < 0) | (local >= len(rows))
            found = self.lm_head.quantized.rows(local.masked_fill(outside, 0), self.dtype)
            found = self.communicator.all_reduce(found.masked_fill(outside[:, None], 0))
        else:
            found = parallel_embedding(self.vocabulary, token_ids, self.embed_tokens, self.communicator)
        return found if self.embedding_scale == 1.0 else found * self.embedding_scale
