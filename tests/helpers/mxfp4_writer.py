"""gpt-oss folders in the hub's layout: experts as blocks and scales, encoded here value by value."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# As openai/gpt-oss-20b has it, in small sizes.
CONFIG = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
    "experts_per_token": 2, "num_experts_per_tok": 2, "num_local_experts": 5, "head_dim": 16, "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 96, "initial_context_length": 64, "initializer_range": 0.2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 256,
    "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 6,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 64,
                     "rope_type": "yarn", "truncate": False},
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "pad_token_id": 0,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"],
        "quant_method": "mxfp4",
    },
}  # fmt: skip


def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [experts, outputs, inputs]: blocks uint8 [.., inputs / 32, 16], scales uint8 [.., inputs / 32]. Of a
    block the largest magnitude lies between 4 and 8 times its scale."""
    w = weight.float().contiguous().numpy()
    w = w.reshape(*w.shape[:2], -1, 32)
    largest = np.maximum(np.abs(w).max(-1), 2.0**-60)
    exponents = np.floor(np.log2(largest)).astype(np.int64) - 2
    values = w / np.exp2(exponents.astype(np.float32))[..., None]
    codes = np.abs(values[..., None] - VALUES).argmin(-1)
    codes[(codes == 0) & np.signbit(values)] = 8  # a negative zero, which files have too
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    scales = (exponents + 127).astype(np.uint8)
    return {"blocks": torch.from_numpy(blocks), "scales": torch.from_numpy(scales)}


def write(folder: Path, model: torch.nn.Module, plain_layers: tuple[int, ...] = (), **changed) -> Path:
    """`model`, a GptOssForCausalLM, with `changed` fields in its config.json; the experts of `plain_layers` stay
    plain."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in model.state_dict().items():
        is_plain = any(f".layers.{layer}." in name for layer in plain_layers)
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and not is_plain:
            tensors |= {f"{name}_{piece}": found for piece, found in encode(tensor.transpose(1, 2)).items()}
        else:
            tensors[name] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    return folder
