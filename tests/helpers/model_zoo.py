"""Random tiny checkpoints of every family with odd settings, written by transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

BASE = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,  # wide, so that logits are far from flat and a wrong mask shows
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

# Every switch of ModelConfig is on in some checkpoint and off in another.
CHECKPOINTS: dict[str, dict] = {
    "llama-mha": dict(model_type="llama", num_key_value_heads=4),
    "llama-mqa-biases-tied": dict(
        model_type="llama", num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama-rope-llama3": dict(model_type="llama", head_dim=20, rope_parameters=LLAMA3),
    "llama-rope-linear": dict(model_type="llama", rope_parameters=LINEAR),
    "mistral-full": dict(model_type="mistral", head_dim=24, sliding_window=None),
    "mistral-window": dict(model_type="mistral", head_dim=16, sliding_window=7),
    "qwen2-full": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen2-max-window-layers": dict(model_type="qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen2-layer-types": dict(
        model_type="qwen2",
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2-rope-yarn": dict(model_type="qwen2", rope_parameters=YARN),
    "qwen3-wide-heads": dict(model_type="qwen3", head_dim=40, num_attention_heads=6, tie_word_embeddings=True),
    "qwen3-biases-window": dict(
        model_type="qwen3",
        head_dim=18,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=0,
        rope_parameters=YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "truncate": False},
    ),
}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 3.5],
    "original_max_position_embeddings": 32,
}
# Families that came later, with what is their own; the fused kernels compute the layers of those in PLAIN.
FURTHER: dict[str, dict] = {
    "phi3-window": dict(model_type="phi3", num_key_value_heads=4, sliding_window=7),
    "phi3-partial": dict(
        model_type="phi3",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    ),
    "phi3-longrope": dict(model_type="phi3", original_max_position_embeddings=32, rope_parameters=LONGROPE),
    "smollm3-no-rope": dict(model_type="smollm3", no_rope_layers=[1, 0, 1]),
    "smollm3-biases-window-tied": dict(
        model_type="smollm3",
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=5,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "llama-rope-dynamic": dict(
        model_type="llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama-swish-wide-window": dict(
        model_type="llama", hidden_act="swish", sliding_window=128, layer_types=["sliding_attention"] * 3
    ),
    "mistral-sliding-layer-types": dict(model_type="mistral", sliding_window=6, layer_types=["sliding_attention"] * 3),
    "llama-gelu": dict(model_type="llama", hidden_act="gelu"),
    "llama-gelu-tanh": dict(model_type="llama", hidden_act="gelu_pytorch_tanh"),
    "olmo2": dict(model_type="olmo2"),
    "olmo2-biases": dict(model_type="olmo2", num_key_value_heads=4, attention_bias=True),
    "granite": dict(
        model_type="granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
        logits_scaling=0.5,
        tie_word_embeddings=True,
    ),
    "granite-biases": dict(model_type="granite", attention_multiplier=0.2, attention_bias=True, mlp_bias=True),
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
FURTHER |= {
    "gemma": dict(model_type="gemma", head_dim=20),
    "gemma2-uncapped": dict(
        model_type="gemma2",
        head_dim=16,
        query_pre_attn_scalar=9,
        sliding_window=6,
        attn_logit_softcapping=None,
        final_logit_softcapping=2.0,
    ),
    "gemma3": dict(
        model_type="gemma3_text",
        head_dim=16,
        query_pre_attn_scalar=40,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=GEMMA3_ROPES,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
}
# Scores are capped: TorchAttention alone serves it.
CAPPED = dict(
    model_type="gemma2",
    head_dim=16,
    query_pre_attn_scalar=4,
    sliding_window=6,
    attn_logit_softcapping=1.5,
    final_logit_softcapping=3.0,
    tie_word_embeddings=True,
)
# Mixtures of experts; some layers of some have one MLP.
EXPERTS: dict[str, dict] = {
    "mixtral": dict(model_type="mixtral", num_local_experts=5, num_experts_per_tok=2),
    "mixtral-window-tied": dict(
        model_type="mixtral",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=1,
        sliding_window=7,
        tie_word_embeddings=True,
    ),
    "qwen3-moe": dict(
        model_type="qwen3_moe",
        head_dim=16,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "qwen3-moe-sparse-step": dict(
        model_type="qwen3_moe",
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=9,
    ),
    "qwen2-moe": dict(
        model_type="qwen2_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        norm_topk_prob=False,
    ),
    "olmoe": dict(model_type="olmoe", num_experts=6, num_experts_per_tok=2, num_key_value_heads=2),
    "dots1": dict(
        model_type="dots1",
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
        sliding_window=None,
    ),
}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 8.0}
MLA = dict(
    num_key_value_heads=4,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
)
# Latents in place of keys and values.
LATENT: dict[str, dict] = {
    "deepseek-v2": MLA | dict(model_type="deepseek_v2", q_lora_rank=None, n_shared_experts=2),
    "deepseek-v2-groups": MLA
    | dict(
        model_type="deepseek_v2",
        q_lora_rank=20,
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        attention_bias=True,
        rope_parameters=MSCALE,
    ),
    "deepseek-v3": MLA
    | dict(model_type="deepseek_v3", q_lora_rank=20, n_group=4, topk_group=2, rope_parameters=MSCALE),
    "deepseek-v3-dense-halves": MLA
    | dict(
        model_type="deepseek_v3",
        q_lora_rank=None,
        first_k_dense_replace=3,
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
}
PLAIN = [name for name in FURTHER if name.startswith(("phi3", "smollm3", "granite-biases", "llama-rope"))]
ALL = CHECKPOINTS | FURTHER


def make_model(seed: int = 0, **settings) -> PreTrainedModel:
    """A random float32 transformers model of `settings` over BASE, biases and norms random too."""
    settings = BASE | settings
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(std=0.3)
    return model


def save_checkpoint(folder: Path, name: str, seed: int = 0, **options) -> PreTrainedModel:
    """Write the named checkpoint into `folder` (options as of `save_pretrained`) and return its model."""
    model = make_model(seed, **(ALL | EXPERTS | LATENT)[name])
    model.save_pretrained(folder, **options)
    return model
