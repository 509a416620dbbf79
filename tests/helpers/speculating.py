"""Models to speculate with, and engines over them."""

from __future__ import annotations

from pathlib import Path

import torch

from minillm import LLM
from tests.helpers.tiny import VOCAB_SIZE, save_tiny_llama

PROMPTS = [[5, 6, 7, 8, 5, 6], [20, 21, 22], [9] * 12, [40, 41, 42, 43, 40, 41, 42]]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}


def write_models(path: Path) -> Path:
    """A target, the same with noise on its weights, and one of another vocabulary."""
    target = save_tiny_llama(path / "target")
    with torch.no_grad():
        for parameter in target.parameters():
            parameter += (
                0.1 * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    save_tiny_llama(path / "noisy")
    target.save_pretrained(path / "noisy")
    save_tiny_llama(path / "other", vocab_size=VOCAB_SIZE + 1)
    return path


def make(folder, speculation: str | None, **settings) -> LLM:
    methods = {
        None: None,
        "ngram": NGRAM,
        "noisy": {"method": "draft_model", "model": folder / "noisy", "num_speculative_tokens": 3},
        "perfect": {"method": "draft_model", "model": folder / "target"},
        "adaptive": {"method": "draft_model", "model": folder / "noisy", "adaptive": True},
        "adaptive ngram": NGRAM | {"adaptive": True},
    }
    return LLM(folder / "target", device="cpu", dtype="float32", speculative_config=methods[speculation], **settings)


def say(llm: LLM, params, prompts=PROMPTS) -> list:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    return outputs


def tokens(outputs) -> list:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]
