"""Adapters with random weights, large enough to change most tokens, and what PEFT says with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model_folder: Path,
    folder: Path,
    seed: int,
    r: int = 4,
    targets: Sequence[str] | str = ALL,
    size: float = 1.0,
    **more,
) -> Path:
    """An adapter of the model in `model_folder`, written by PEFT itself. Its products are about `size` times as large
    as those of the base weights' scale of 0.2."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    targets = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(
        r=r, lora_alpha=more.pop("lora_alpha", 2 * r), target_modules=targets, task_type="CAUSAL_LM", **more
    )
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.normal_(0, 0.2 * size / math.sqrt(len(parameter)))
            elif "lora_B" in name:
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    return folder


def peft_tokens(
    model_folder: Path, adapter: Path | None, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Greedy tokens of every prompt, alone, by PEFT (or by transformers, without an adapter)."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    said = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            input_ids=ids, do_sample=False, min_new_tokens=max_tokens, max_new_tokens=max_tokens, pad_token_id=0
        )
        said.append(out[0, len(prompt) :].tolist())
    return said
