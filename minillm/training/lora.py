"""`minillm train --lora`: an adapter that teaches `tinyworld` a voice, written as a PEFT folder. Built in chapter 23.

LoRA (Hu et al., 2021, arXiv:2106.09685) keeps a weight W frozen and learns the product of two thin matrices beside it:

    W x  +  (alpha / rank) B (A x)        A [rank, in] starts random, B [out, rank] starts at zero

so that training begins at the base model and an adapter is a few hundred kilobytes. The loss counts the tokens that are
in the voice, not the prompt before them. `peft` loads the folder, and so does `LLM.generate(lora_request=...)`.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from .. import zoo
from ..device import resolve_device
from ..zoo import corpus, tokenizer as bpe, voices
from . import Progress, bar_of, has_bf16, learning_rate_scale, resume, save_state

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BASE = "tinyworld"


@dataclass(frozen=True)
class LoRAConfig:
    """One run. Batch number `i` and the learning rate at step `i` follow from these numbers alone."""

    voice: str = "pirate"
    rank: int = 8
    alpha: float = 16.0  # the product of A and B is multiplied by alpha / rank
    num_steps: int = 300
    rows_per_batch: int = 16  # documents
    length: int = 320  # tokens of a document, at most
    lr: float = 4e-3
    warmup: float = 0.05
    decay: float = 0.5  # the learning rate falls linearly to zero over this last share
    seed: int = 0


PRESETS = {"pirate": LoRAConfig("pirate", rank=8), "news": LoRAConfig("news", rank=16, alpha=32.0)}


class LoRALinear(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scaling = base, alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, device=base.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scaling


def train(
    config: LoRAConfig,
    out: Path,
    device: torch.device,
    on_step: Callable[[Progress], None] = lambda progress: None,
    base: Path | None = None,
    checkpoint_every: int = 25,
    stop_after: int | None = None,
) -> Path:
    """Train to the end, or on from `out/training.pt` if a run with the same configuration was cut off there.

    `base` is the folder of the model, by default `tinyworld`'s. `on_step` hears of every step; `stop_after` ends this
    call after that many, with its state saved. Writes the PEFT folder `out` at the end. On one machine, with one number
    of threads, a run is a function of its configuration and its base, whether it was cut off or not.

    Raises ValueError if the state found in `out` belongs to another configuration.
    """
    base = base or zoo.bundled()[BASE]
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).to(device).requires_grad_(False)
    adapters = attach(model, config)
    learned = nn.ParameterList(weight for layer in adapters.values() for weight in (layer.lora_a, layer.lora_b))
    optimizer = torch.optim.AdamW(learned, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    step = resume(out, config, learned, [optimizer])
    autocast = torch.autocast(device.type, torch.bfloat16) if has_bf16(device) else nullcontext()
    last = min(config.num_steps, step + stop_after) if stop_after is not None else config.num_steps
    while step < last:
        started = time.perf_counter()
        tokens, weights = (torch.from_numpy(array).to(device) for array in batch(config, step, tokenizer))
        with autocast:
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
        loss = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = config.lr * learning_rate_scale(config, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % checkpoint_every == 0 or step == last:
            save_state(out, config, step, learned, [optimizer])
        on_step(Progress(step, config.num_steps, loss.item(), tokens.numel() / (time.perf_counter() - started)))
    if step == config.num_steps:
        save(adapters, config, out)
        (out / "training.pt").unlink()
    return out


def run_voice(
    voice: str,
    out: Path,
    rank: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    device: str = "auto",
    overwrite: bool = False,
    console=None,
) -> Path:
    """`minillm train --lora VOICE`: train an adapter into `out` under a progress bar.

    Raises ValueError for an unknown voice, and FileExistsError if `out` holds a finished adapter and `overwrite` is
    not set.
    """
    if voice not in PRESETS:
        raise ValueError(f"lora={voice!r} is unknown; choose one of {', '.join(PRESETS)}")
    if (out / "adapter_config.json").exists() and not (out / "training.pt").exists() and not overwrite:
        raise FileExistsError(f"{out} holds a finished adapter; choose another folder, or --overwrite")
    preset = PRESETS[voice]
    rank = rank or preset.rank
    config = replace(preset, rank=rank, alpha=2.0 * rank, num_steps=steps or preset.num_steps, seed=seed)
    with bar_of(voice, console) as on_step:
        return train(config, out, resolve_device(device), on_step)


def attach(model: LlamaForCausalLM, config: LoRAConfig) -> dict[str, LoRALinear]:
    """Give every layer of `TARGETS` an adapter, in place: module name -> its new layer."""
    found = [(name, layer) for name, layer in model.named_modules() if name.rpartition(".")[2] in TARGETS]
    adapters = {}
    for name, layer in found:
        parent, _, child = name.rpartition(".")
        adapters[name] = LoRALinear(layer, config.rank, config.alpha)
        setattr(model.get_submodule(parent), child, adapters[name])
    return adapters


def batch(config: LoRAConfig, step: int, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Batch number `step`: token ids and loss weights, both [rows, longest]. A row is one document, padded at its end.

    The weight is 1 for the tokens in the voice and 0 for prompts and padding.
    """
    start = random.Random(f"lora/{config.voice}/{config.seed}/{step}").randrange(10**12)
    rows = []
    for index in range(start, start + config.rows_per_batch):
        segments = voices.document(config.voice, corpus.TRAIN_SEED, index).segments
        ids, is_answer = [tokenizer.token_to_id(bpe.BEGIN)], [False]
        for text, in_voice in segments:
            piece = tokenizer.encode(text, add_special_tokens=False).ids
            ids += piece
            is_answer += [in_voice] * len(piece)
        rows.append((ids[: config.length], is_answer[: config.length]))
    longest = max(len(ids) for ids, _ in rows)
    tokens = np.full((len(rows), longest), tokenizer.token_to_id(bpe.END), dtype=np.int64)
    weights = np.zeros((len(rows), longest), dtype=np.float32)
    for row, (ids, is_answer) in enumerate(rows):
        tokens[row, : len(ids)], weights[row, : len(ids)] = ids, is_answer
    return tokens, weights


def save(adapters: dict[str, LoRALinear], config: LoRAConfig, out: Path) -> None:
    """Write the PEFT folder: adapter_config.json and adapter_model.safetensors in bf16."""
    tensors = {}
    for name, layer in adapters.items():
        for part, weight in (("lora_A", layer.lora_a), ("lora_B", layer.lora_b)):
            tensors[f"base_model.model.{name}.{part}.weight"] = weight.detach().to("cpu", torch.bfloat16)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": BASE, "inference_mode": True,
        "r": config.rank, "lora_alpha": config.alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": list(TARGETS),
    }  # fmt: skip
    (out / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")
