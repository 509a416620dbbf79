"""`minillm train --drafter`: a draft head for `tinyworld`, from nothing. Built in chapter 18.

The target reads a text once and its weights stay as they are; the head learns to predict the distribution that the
target has behind each token. Half of the rows are the corpus, half are what the target itself generates greedily
(`minillm.training.own_text`). The head learns in the situation in which it will draft (training-time test, EAGLE-3,
https://arxiv.org/abs/2503.01840): for several steps on its own features, see `minillm.training.eagle_model`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from .. import zoo
from ..device import resolve_device
from ..model.checkpoint import load_model
from ..model.decoder import Decoder
from ..model.features import FeatureTap
from ..speculative.eagle_config import HeadConfig
from . import Progress, TrainingConfig, bar_of, batch, has_bf16, learning_rate_scale, resume, save_state
from .eagle_model import HeadModel, read_target
from .own_text import OwnText

TARGET = "tinyworld"


@dataclass(frozen=True)
class DrafterConfig(TrainingConfig):
    """One run. The sizes are those of the head's layer; `unroll` counts the steps of the training-time test, fewer at
    first."""

    hidden_size: int = 128
    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int = 4
    intermediate_size: int = 512
    tokens: int = 3_000_000
    tokens_per_batch: int = 1_024
    stages: tuple[tuple[float, int], ...] = ((0.6, 128), (1.0, 256))
    muon_lr: float = 0.02
    adamw_lr: float = 2e-3
    decay: float = 0.6
    answer_weight: float = 2.0
    repeats: float = 0.1
    unroll: tuple[tuple[float, int], ...] = ((0.5, 3), (1.0, 5))  # steps, as the stages
    step_weight: float = 0.8  # of the loss of an unrolled step, over that of the step before
    feature_layers: tuple[int, ...] = (1, 2, 4)
    lost_features: float = 0.1  # share of rows that begin without the target's features, as behind a prefix hit
    own_text: float = 0.5  # share of rows that the target generated
    own_token: float = 0.5  # share, in the loss of those, of the target's token beside its distribution


def train(
    config: DrafterConfig,
    out: Path,
    device: torch.device,
    on_step: Callable[[Progress], None] = lambda progress: None,
    base: Path | None = None,
    checkpoint_every: int = 50,
    stop_after: int | None = None,
) -> Path:
    """Train to the end, or on from `out/training.pt`, as `minillm.training.train` does; writes the head's folder `out`.

    `base` is the target's folder, by default `tinyworld`'s.
    Raises ValueError if the state found in `out` belongs to another configuration.
    """
    base = base or zoo.bundled()[TARGET]
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    target = load_model(base, torch.bfloat16 if has_bf16(device) else torch.float32, device)
    head = head_config(config, target)
    most = max(length for _, length in config.stages)
    tap = FeatureTap(target, head.feature_layers, max(config.tokens_per_batch, most) + most)
    model = HeadModel(head, target).to(device)
    optimizers = _optimizers(model, config)
    step = resume(out, config, model, optimizers)
    own = OwnText(base, target.dtype, device) if config.own_text else None
    autocast = torch.autocast(device.type, torch.bfloat16) if has_bf16(device) else nullcontext()
    last = min(config.num_steps, step + stop_after) if stop_after is not None else config.num_steps
    while step < last:
        started, at = time.perf_counter(), step / config.num_steps
        tokens, weights, is_own = (array.to(device) for array in rows_of(config, step, tokenizer, own))
        states, wanted = read_target(target, tap, tokens)
        _lose(states, config, step)
        wanted = wanted_of(wanted, is_own, config.own_token)
        with autocast:
            found = model(states, tokens, next(steps for until, steps in config.unroll if at < until or until == 1.0))
        loss, total = torch.zeros((), device=device), 0.0
        for number, logits in enumerate(found):
            weight = config.step_weight**number
            losses = -(wanted * logits.float().log_softmax(-1)).sum(-1)  # [rows, length]
            counted = weights * (torch.arange(losses.shape[1], device=device) >= number)
            loss, total = loss + weight * (losses * counted).sum() / counted.sum(), total + weight
        (loss / total).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * learning_rate_scale(config, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % checkpoint_every == 0 or step == last:
            save_state(out, config, step, model, optimizers)
        seconds = time.perf_counter() - started
        on_step(Progress(step, config.num_steps, loss.item() / total, tokens.numel() / seconds))
    tap.remove()
    if step == config.num_steps:
        head.write(out)
        tensors = {name: weight.to("cpu", torch.bfloat16) for name, weight in model.tensors().items()}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        (out / "training.pt").unlink()
    return out


def rows_of(
    config: DrafterConfig, step: int, tokenizer: Tokenizer, own: OwnText | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch number `step`: token ids [rows, length], weights of the losses behind them, and which rows [rows] the
    target has generated."""
    tokens, weights = batch(config, step, tokenizer)
    tokens, weights = tokens[:, :-1], weights[:, 1:]  # the loss behind a token weighs what the next token does
    is_own = np.arange(len(tokens)) < round(len(tokens) * config.own_text)
    if own is not None and is_own.any():
        ids, worth = own.rows(config, step, tokenizer, int(is_own.sum()), tokens.shape[1] + 1)
        tokens[is_own], weights[is_own] = ids[:, :-1], worth[:, 1:]
    return torch.from_numpy(tokens.copy()), torch.from_numpy(weights.copy()), torch.from_numpy(is_own)


@torch.no_grad()
def wanted_of(logits: Tensor, is_own: Tensor, own_token: float) -> Tensor:
    """What the head is to predict, [rows, length, vocab_size]: the target's distribution, in rows of its own mixed with
    the token that it takes. Where several tokens are about as probable, the distribution alone would not say which."""
    wanted = logits.softmax(-1)
    best = torch.zeros_like(wanted[is_own]).scatter_(-1, logits[is_own].argmax(-1, keepdim=True), 1.0)
    wanted[is_own] = torch.lerp(wanted[is_own], best, own_token)
    return wanted


def head_config(config: DrafterConfig, target: Decoder) -> HeadConfig:
    """The head that is trained for `target`: its layer as `config` says, the rest is the target's."""
    of = target.config
    layers = tuple(min(one, of.num_layers) for one in config.feature_layers)
    return HeadConfig(
        config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads,
        config.hidden_size // config.num_heads, of.vocab_size, of.max_position_embeddings, layers, of.rope.theta,
        of.rms_norm_eps, of.hidden_size,
    )  # fmt: skip


def run_drafter(
    out: Path,
    tokens: int | None = None,
    seed: int = 0,
    device: str = "auto",
    overwrite: bool = False,
    console=None,
) -> Path:
    """`minillm train --drafter`: train a head for `tinyworld` into `out` under a progress bar.

    Raises FileExistsError if `out` holds a finished head and `overwrite` is not set.
    """
    if (out / "drafter_config.json").exists() and not (out / "training.pt").exists() and not overwrite:
        raise FileExistsError(f"{out} holds a finished draft head; choose another folder, or --overwrite")
    config = DrafterConfig(seed=seed)
    config = replace(config, tokens=tokens or config.tokens)
    with bar_of("draft head", console) as on_step:
        return train(config, out, resolve_device(device), on_step)


def _lose(states: Tensor, config: DrafterConfig, step: int) -> None:
    """Take the target's features from the beginnings of some rows: the head learns to go on without them."""
    rng = np.random.default_rng([config.seed, step])
    for row in states:
        if rng.random() < config.lost_features:
            row[: int(rng.integers(1, len(row)))] = 0


def _optimizers(model: HeadModel, config: DrafterConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms, as the target was trained."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(
            f"training needs torch.optim.Muon, which torch {torch.__version__} does not have: "
            "install torch >= 2.9 (everything else in minillm runs on 2.8)"
        )
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.01)
    adamw = torch.optim.AdamW(norms, lr=config.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [muon, adamw]
