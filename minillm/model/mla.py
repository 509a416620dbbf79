"""Multi-head latent attention (MLA) in its absorbed form: many heads read one latent. Built in chapter 02.

A token leaves one vector in the cache, whatever the number of heads: a latent c and a rotary key. Keys and values of a
head are K c and V c, with matrices K and V from kv_b_proj. They are never computed, since the two matrices can be
moved to where there is one vector per head and not one per head and position (DeepSeek-V2, arXiv:2405.04434, 2.1.2):

    score   q . (K c)          = (Kᵀ q) . c              K moves to the query
    output  sum of p (V c)     = V (sum of p c)          V moves behind the sum

    x -> q_proj (or q_a_proj, norm, q_b_proj) -> [plain | rotary] --Kᵀ, rotation--> q' [heads, rank + rope]
    x -> kv_a_proj_with_mqa -> [norm | rotation] -> latent [rank + rope], stored
    attention of q' over latents, whose first `rank` columns are the values too -> V -> o_proj

To a backend this is multi-query attention: one KV head, `head_dim` = rank + rope, and values inside the keys.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from minillm.model.attention import AttentionBackend
from minillm.model.batch import ForwardBatch, adapted
from minillm.model.config import ModelConfig
from minillm.model.layers import CosSin, Linear, RMSNorm, apply_rotary, empty_parameter

LATENT_NORM_EPS = 1e-6  # of the two norms on latents, whatever rms_norm_eps is


class LatentSelfAttention(nn.Module):
    """The attention of one layer; `Linear`s have the names of a DeepSeek checkpoint.

    kv_b_proj is no `Linear`: both of its halves are multiplied head by head, and never in low-bit form.
    """

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, matrices: torch.device
    ):
        super().__init__()
        self.mla, self.index, self.num_heads = config.mla, index, config.num_heads
        self.sinks = None  # learned sink logits, which no model of this family has: chapter 17
        mla, hidden, q_size = config.mla, config.hidden_size, config.num_heads * config.mla.qk_head_dim
        linear = partial(Linear, dtype=dtype, device=device, weight_device=matrices)
        norm = partial(RMSNorm, eps=LATENT_NORM_EPS, dtype=dtype, device=device)
        if mla.q_lora_rank is None:
            self.q_proj = linear(hidden, q_size, bias=False)
        else:
            self.q_a_proj = linear(hidden, mla.q_lora_rank, bias=config.qkv_bias)
            self.q_a_layernorm = norm(mla.q_lora_rank)
            self.q_b_proj = linear(mla.q_lora_rank, q_size, bias=False)
        self.kv_a_proj_with_mqa = linear(hidden, mla.latent_dim, bias=config.qkv_bias)
        self.kv_a_layernorm = norm(mla.kv_lora_rank)
        up_rows = config.num_heads * mla.up_head_dim
        self.kv_b_proj = empty_parameter(up_rows, mla.kv_lora_rank, dtype=dtype, device=device)
        self.o_proj = linear(config.num_heads * mla.v_head_dim, hidden, bias=config.o_bias)
        # Backends divide scores by sqrt(latent_dim); MLA divides by the square root of a head's own dimensions.
        self.query_scale = (mla.latent_dim / mla.qk_head_dim) ** 0.5 * config.rope.score_factor

    def forward(self, x: Tensor, rotary: CosSin, attention: AttentionBackend, batch: ForwardBatch) -> Tensor:
        latents = self.latents(x, rotary, batch)
        values = latents[..., : self.mla.kv_lora_rank]
        out = attention.attend(self.queries(x, rotary, batch), latents, values, self.index, batch)
        _, v_up = self.up_projections()
        heads = torch.bmm(out.transpose(0, 1), v_up.transpose(1, 2))  # [num_heads, num_tokens, v_head_dim]
        return adapted(self.o_proj, heads.transpose(0, 1).flatten(1), batch.token_slots)

    def queries(self, x: Tensor, rotary: CosSin, batch: ForwardBatch) -> Tensor:
        """The absorbed queries [num_tokens, num_heads, latent_dim]: what is not rotated has gone through Kᵀ."""
        if self.mla.q_lora_rank is None:
            q = adapted(self.q_proj, x, batch.token_slots)
        else:
            narrow = self.q_a_layernorm(adapted(self.q_a_proj, x, batch.token_slots))
            q = adapted(self.q_b_proj, narrow, batch.token_slots)
        q = q.view(len(x), self.num_heads, -1) * self.query_scale
        plain, turning = q.split_with_sizes([self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim], dim=-1)
        k_up, _ = self.up_projections()
        absorbed = torch.bmm(plain.transpose(0, 1), k_up).transpose(0, 1)  # [num_tokens, num_heads, kv_lora_rank]
        return torch.cat([absorbed, apply_rotary(turning, *rotary)], dim=-1)

    def latents(self, x: Tensor, rotary: CosSin, batch: ForwardBatch) -> Tensor:
        """What the cache keeps of each token: [num_tokens, 1, latent_dim]."""
        latent = adapted(self.kv_a_proj_with_mqa, x, batch.token_slots)[:, None]
        plain, turning = latent.split_with_sizes([self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], dim=-1)
        return torch.cat([self.kv_a_layernorm(plain), apply_rotary(turning, *rotary)], dim=-1)

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """K [num_heads, qk_nope_head_dim, kv_lora_rank] and V [num_heads, v_head_dim, kv_lora_rank], views."""
        heads = self.kv_b_proj.view(self.num_heads, self.mla.up_head_dim, -1)
        return heads.split_with_sizes([self.mla.qk_nope_head_dim, self.mla.v_head_dim], dim=1)

    def linears(self) -> dict[str, Linear]:
        """See `DecoderLayer.linears`."""
        return {name: module for name, module in self.named_children() if isinstance(module, Linear)}
