"""Small random checkpoints of every family, written by `transformers` as a reference. Built in chapter 02.

Whether two programs compute the same logits does not depend on training, so random weights test it as well.
"""

from __future__ import annotations

from pathlib import Path

import torch

SMALL = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)


def random_checkpoint(folder: str | Path, family: str, **settings):
    """Write a checkpoint of `family` into `folder` and return the `transformers` model it was saved from.

    family: a `model_type` of `transformers`; settings: what its `config.json` says beside or instead of SMALL.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SMALL | settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # biases and norms too, so that a forgotten one shows
    model.save_pretrained(folder)
    return model
