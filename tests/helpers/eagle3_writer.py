"""Draft heads in the hub's EAGLE-3 layout: folders, and what such a head computes, written out here plainly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

# As the heads of EAGLE's authors and of SpecForge have it, in small sizes.
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 40, "initializer_range": 0.02,
    "max_position_embeddings": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "use_cache": True,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 32},
    "rope_theta": 500000.0, "vocab_size": 300, "draft_vocab_size": 70, "target_hidden_size": 48,
}  # fmt: skip


def random_tensors(config: dict, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a head of these sizes, drawn wide."""
    generator = torch.Generator().manual_seed(seed)
    size, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    wide, small = config.get("target_hidden_size") or size, config.get("draft_vocab_size") or vocab
    dim = config.get("head_dim") or size // config["num_attention_heads"]
    count = config.get("num_aux_hidden_states", 3)
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "fc": (size, count * wide), "midlayer.self_attn.q_proj": (q, 2 * size),
        "midlayer.self_attn.k_proj": (kv, 2 * size),
        "midlayer.self_attn.v_proj": (kv, 2 * size), "midlayer.self_attn.o_proj": (size, q),
        "midlayer.mlp.gate_proj": (inner, size), "midlayer.mlp.up_proj": (inner, size),
        "midlayer.mlp.down_proj": (size, inner), "lm_head": (small, size),
    }  # fmt: skip
    if wide != size:
        shapes["embed_tokens"] = (vocab, size)
    norms = ("norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors |= {name: 1 + 0.3 * torch.randn(size, generator=generator) for name in norms}
    tensors = {f"{name}.weight": tensor for name, tensor in tensors.items()}
    if small < vocab:
        ids = torch.randperm(vocab, generator=generator)[:small].sort().values
        tensors["d2t"] = ids - torch.arange(small)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write(folder: Path, tensors: dict[str, Tensor] | None = None, seed: int = 0, **changed) -> Path:
    """A folder with a head of CONFIG, `changed`; a field that is None is left out."""
    config = {name: value for name, value in (CONFIG | changed).items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, seed) if tensors is None else tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@dataclass
class PlainHead:
    """What EAGLE's authors compute, one text at a time and without a cache."""

    config: dict
    tensors: dict[str, Tensor]
    embedding: Tensor  # the head's, or the target's
    frequencies: Tensor  # of its rotation, [head_dim / 2]

    def __call__(self, token_ids: list[int], states: Tensor, num_steps: int) -> tuple[list[int], list[Tensor]]:
        """Draft `num_steps` tokens greedily behind `token_ids`. states [len(token_ids) - 1, 3 * target_hidden_size] are
        the target's, of all tokens but the last. Returns the tokens and the logits [draft_vocab_size] of each."""
        text, features = token_ids[1:], F.linear(states, self.tensors["fc.weight"])
        drafted, logits = [], []
        for _ in range(num_steps):
            hidden = self.layer(torch.tensor(text), features)
            logits.append(F.linear(self.norm(hidden[-1], "norm"), self.tensors["lm_head.weight"]))
            best = int(logits[-1].argmax())
            drafted.append(best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best)
            text, features = [*text, drafted[-1]], torch.cat([features, hidden[-1:]])
        return drafted, logits

    def layer(self, token_ids: Tensor, features: Tensor) -> Tensor:
        normed = self.norm(features, "midlayer.hidden_norm")
        both = torch.cat([self.norm(self.embedding[token_ids], "midlayer.input_layernorm"), normed], dim=-1)
        residual = normed if self.config.get("norm_before_residual") else features
        hidden = residual + self.attend(both)
        inner = self.norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (self.matrix(f"mlp.{name}_proj", inner) for name in ("gate", "up"))
        return hidden + self.matrix("mlp.down_proj", F.silu(gate) * up)

    def attend(self, both: Tensor) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (self.matrix(f"self_attn.{name}_proj", both).unflatten(1, (-1, 2 * len(self.frequencies)))
                   for name in "qkv")  # fmt: skip
        q, k = (self.rotate(x).transpose(0, 1) for x in (q, k))  # [heads, num_tokens, head_dim]
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v.transpose(0, 1)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.matrix("self_attn.o_proj", out.transpose(0, 1).flatten(1))

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(len(x))[:, None, None] * torch.cat([self.frequencies, self.frequencies])
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    def matrix(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"midlayer.{name}.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.tensors[f"{name}.weight"]
