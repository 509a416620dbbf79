"""Multi-head latent attention (MLA), as a config.json of DeepSeek-V2 or V3 describes it. Built in chapter 02.

x -> kv_a_proj_with_mqa -> latent [kv_lora_rank] and rotary key [qk_rope_head_dim]     all that a cache keeps
latent -> kv_b_proj     -> of every head: key [qk_nope_head_dim] and value [v_head_dim]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minillm.model.rope import LATENT, required


@dataclass(frozen=True)
class MLAConfig:
    """The sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Sizes count dimensions.

    A query of a head has `qk_nope_head_dim` dimensions that are not rotated and `qk_rope_head_dim` that are. Queries go
    through a bottleneck of `q_lora_rank` too, or through one matrix where that is None. `interleaved` says that a
    checkpoint rotates dimension 2i with 2i + 1. Raises ValueError for an odd `qk_rope_head_dim`.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    interleaved: bool = True

    def __post_init__(self):
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim={self.qk_rope_head_dim} is odd; rotary embeddings turn pairs, so it must be even"
            )

    @property
    def latent_dim(self) -> int:
        """Numbers that a token leaves in the cache of each layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Dimensions of a query and of a key, which a score sums over."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def up_head_dim(self) -> int:
        """What kv_b_proj makes for each head: a key without its rotary part, and a value."""
        return self.qk_nope_head_dim + self.v_head_dim

    def parameters(self, hidden_size: int, num_heads: int, qkv_bias: bool, o_bias: bool) -> int:
        """Weights of one layer's attention."""
        rank, q_size = self.q_lora_rank, num_heads * self.qk_head_dim
        queries = hidden_size * q_size if rank is None else rank * (hidden_size + 1 + q_size + qkv_bias)
        latents = self.latent_dim * (hidden_size + qkv_bias) + self.kv_lora_rank
        heads = num_heads * (self.kv_lora_rank * self.up_head_dim + self.v_head_dim * hidden_size)
        return queries + latents + heads + o_bias * hidden_size


def read_mla(raw: dict[str, Any]) -> MLAConfig | None:
    """The latent attention of a config.json in which its family's defaults stand; None for a family without it."""
    if raw["model_type"] not in LATENT:
        return None
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    interleaved = raw["model_type"] == "deepseek_v2" or raw["rope_interleave"]
    return MLAConfig(*(required(raw, name) for name in names), raw.get("q_lora_rank"), interleaved)
