"""`minillm train --drafter`: a draft head for `tinyworld`, from nothing. Built in chapter 18.

The target reads the corpus once and its weights stay as they are; the head learns to predict the distribution that the
target has behind each token. It learns in the situation in which it will draft (training-time test, EAGLE-3,
https://arxiv.org/abs/2503.01840): in unrolled step 0 every token comes with the target's feature of the token before
it, in step s with the one that the head itself made in step s - 1. A query of step s at position p sees

    keys of step 0 at positions 0 ... p-s,   of step 1 at p-s+1,   of step 2 at p-s+2,   ...   of step s at p

which are the keys that it would find in its cache after drafting s tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from .. import zoo
from ..device import resolve_device
from ..model.attention import NoCacheAttention
from ..model.batch import ForwardBatch
from ..model.checkpoint import load_model
from ..model.decoder import Decoder
from ..model.features import FeatureTap
from ..model.layers import rope_frequencies
from ..speculative.eagle_config import HeadConfig
from . import Progress, TrainingConfig, bar_of, batch, has_bf16, learning_rate_scale, resume, save_state

TARGET = "tinyworld"


@dataclass(frozen=True)
class DrafterConfig(TrainingConfig):
    """One run. The sizes are those of the head's layer; `unroll` counts the steps of the training-time test."""

    num_layers: int = 1
    intermediate_size: int = 512
    tokens: int = 1_500_000
    tokens_per_batch: int = 2_048
    stages: tuple[tuple[float, int], ...] = ((1.0, 256),)
    muon_lr: float = 0.03
    adamw_lr: float = 2e-3
    decay: float = 0.6
    answer_weight: float = 2.0
    repeats: float = 0.15
    unroll: int = 3
    step_weight: float = 0.8  # of the loss of an unrolled step, over that of the step before
    feature_layers: tuple[int, ...] = (1, 2, 4)
    lost_features: float = 0.1  # share of rows that begin without the target's features, as behind a prefix hit


def second_part(first: DrafterConfig, tokens: int | None = None) -> DrafterConfig:
    """The part of a run that goes on with what the first has learned: longer drafts, smaller batches, other text."""
    return replace(
        first, tokens=tokens or 700_000, tokens_per_batch=1_024, muon_lr=0.02, adamw_lr=1e-3, warmup=0.01, decay=1.0,
        repeats=0.0, unroll=5, seed=first.seed + 1_000,
    )  # fmt: skip


class HeadModel(nn.Module):
    """The head as it learns: `minillm.speculative.eagle_head.EagleHead` over whole rows, with gradients."""

    def __init__(self, head: HeadConfig):
        super().__init__()
        size, dim = head.hidden_size, head.head_dim
        self.head = head
        matrices = {
            "fuse": (size, len(head.feature_layers) * size),
            "mix": (size, 2 * size),
            "layers.0.self_attn.q_proj": (head.num_attention_heads * dim, size),
            "layers.0.self_attn.k_proj": (head.num_key_value_heads * dim, size),
            "layers.0.self_attn.v_proj": (head.num_key_value_heads * dim, size),
            "layers.0.self_attn.o_proj": (size, head.num_attention_heads * dim),
            "layers.0.mlp.gate_proj": (head.intermediate_size, size),
            "layers.0.mlp.up_proj": (head.intermediate_size, size),
            "layers.0.mlp.down_proj": (size, head.intermediate_size),
        }
        norms = ("embed_norm", "feature_norm", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
        self.weights = nn.ParameterDict()
        for name, shape in matrices.items():
            self.weights[name.replace(".", "/")] = nn.Parameter(torch.randn(shape) * shape[1] ** -0.5)
        for name in ("layers.0.self_attn.o_proj", "layers.0.mlp.down_proj"):
            nn.init.zeros_(self.weights[name.replace(".", "/")])  # at first the layer adds nothing
        for name in norms:
            self.weights[name.replace(".", "/")] = nn.Parameter(torch.ones(size))
        self.register_buffer("frequencies", rope_frequencies(head.layer.rope, dim), persistent=False)

    def forward(self, states: Tensor, embedded: Tensor, read_out: Callable[[Tensor], Tensor], unroll: int) -> list:
        """Logits of each unrolled step, [rows, length, vocab_size] each. states [rows, length, layers * size] are the
        target's behind each token, embedded [rows, length, size] its embeddings; `read_out` is its output matrix."""
        fused = self._linear("fuse", states)
        feature, keys, logits = _shift(fused), [], []
        for step in range(unroll):
            hidden = self._step(feature, embedded, keys, step)
            logits.append(read_out(self._norm("norm", hidden)))
            feature = _shift(hidden)
        return logits

    def _step(self, feature: Tensor, embedded: Tensor, keys: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        both = torch.cat([self._norm("embed_norm", embedded), self._norm("feature_norm", feature)], dim=-1)
        hidden = feature + self._linear("mix", both)
        normed, at = self._norm("layers.0.input_layernorm", hidden), "layers.0.self_attn."
        q, k, v = (self._heads(self._linear(f"{at}{name}_proj", normed), name != "v") for name in "qkv")
        keys.append((k, v))
        hidden = hidden + self._linear(f"{at}o_proj", attend(q, keys).transpose(1, 2).flatten(2))
        normed, at = self._norm("layers.0.post_attention_layernorm", hidden), "layers.0.mlp."
        gated = F.silu(self._linear(f"{at}gate_proj", normed)) * self._linear(f"{at}up_proj", normed)
        return hidden + self._linear(f"{at}down_proj", gated)

    def _heads(self, x: Tensor, rotated: bool) -> Tensor:
        """[rows, heads, length, head_dim], of all query heads; rotated by position."""
        x = x.unflatten(-1, (-1, self.head.head_dim)).transpose(1, 2)
        if x.shape[1] < self.head.num_attention_heads:
            x = x.repeat_interleave(self.head.num_attention_heads // x.shape[1], dim=1)
        if not rotated:
            return x
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * self.frequencies  # [length, head_dim / 2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name.replace(".", "/")])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[name.replace(".", "/")]
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.head.rms_norm_eps)

    def tensors(self) -> dict[str, Tensor]:
        """By their names in the head's folder."""
        return {f"{name.replace('/', '.')}.weight": weight.detach() for name, weight in self.weights.items()}


def attend(q: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of the last unrolled step, [rows, heads, length, head_dim]; `keys` has keys and values of every step so
    far. What a row's first tokens would see before its beginning is masked."""
    step, length, scale = len(keys) - 1, q.shape[2], q.shape[3] ** -0.5
    at = torch.arange(length, device=q.device)
    first, values = keys[0]
    past = at[None, :] <= at[:, None] - step if step else at[None, :] <= at[:, None]
    scores = [((q @ first.transpose(2, 3)) * scale).masked_fill(~past, -1e9)]
    moved = []
    for number, (k, v) in enumerate(keys[1:], 1):
        back = step - number
        k, v = (F.pad(x, (0, 0, back, 0))[:, :, :length] for x in (k, v))  # row p has what stands at p - back
        score = ((q * k).sum(-1, keepdim=True) * scale).masked_fill((at < back)[:, None], -1e9)
        scores.append(score)
        moved.append(v)
    weights = torch.cat(scores, dim=-1).float().softmax(-1).to(q.dtype)
    out = weights[..., :length] @ values
    for place, v in enumerate(moved):
        out = out + weights[..., length + place, None] * v
    return out


def _shift(x: Tensor) -> Tensor:
    """Each position gets what stands at the one before it; the first a zero."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def read_target(target: Decoder, tap: FeatureTap, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states [rows, length, layers * size] and logits [rows, length, vocab_size] of the target."""
    rows, length = tokens.shape
    at = torch.arange(rows + 1, device=tokens.device) * length
    lengths = torch.full((rows,), length, device=tokens.device)
    flat = torch.arange(rows * length, device=tokens.device)
    batch = ForwardBatch(tokens.flatten(), flat % length, at, lengths, None, None, length, flat, length)
    logits = target(batch, NoCacheAttention(target.config.layer_windows))
    return tap.states[: rows * length].view(rows, length, -1).clone(), logits.view(rows, length, -1).clone()


def train(
    config: DrafterConfig,
    out: Path,
    device: torch.device,
    on_step: Callable[[Progress], None] = lambda progress: None,
    base: Path | None = None,
    checkpoint_every: int = 50,
    stop_after: int | None = None,
    begin_with: Path | None = None,
) -> Path:
    """Train to the end, or on from `out/training.pt`, as `minillm.training.train` does; writes the head's folder `out`.

    `base` is the target's folder, by default `tinyworld`'s; `begin_with` that of a head to go on with.
    Raises ValueError if the state found in `out` belongs to another configuration.
    """
    base = base or zoo.bundled()[TARGET]
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    target = load_model(base, torch.float32, device)
    head = head_config(config, target)
    most = max(length for _, length in config.stages)
    tap = FeatureTap(target, head.feature_layers, max(config.tokens_per_batch, most) + most)
    model = HeadModel(head).to(device)
    with torch.no_grad():  # the head begins in the space of the target's last hidden states
        model.weights["norm"].copy_(target.norm.weight)
        known = {} if begin_with is None else load_file(begin_with / "model.safetensors")
        for name, weight in known.items():
            model.weights[name.removesuffix(".weight").replace(".", "/")].copy_(weight)
    optimizers = _optimizers(model, config)
    step = resume(out, config, model, optimizers)
    table = target.lm_head.weight.clone()
    autocast = torch.autocast(device.type, torch.bfloat16) if has_bf16(device) else nullcontext()
    last = min(config.num_steps, step + stop_after) if stop_after is not None else config.num_steps
    while step < last:
        started = time.perf_counter()
        tokens, weights = (torch.from_numpy(array).to(device) for array in batch(config, step, tokenizer))
        tokens, weights = tokens[:, :-1], weights[:, 1:]
        states, wanted = read_target(target, tap, tokens)
        _lose(states, config, step)
        with torch.no_grad():
            embedded, wanted = target.embed(tokens), wanted.softmax(-1)
        with autocast:
            found = model(states, embedded, lambda hidden: F.linear(hidden, table), config.unroll)
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


def head_config(config: DrafterConfig, target: Decoder) -> HeadConfig:
    """The head that is trained for `target`: the target's sizes, but for the MLP's."""
    of = target.config
    layers = tuple(min(one, of.num_layers) for one in config.feature_layers)
    return HeadConfig(
        of.hidden_size, config.intermediate_size, of.num_heads, of.num_kv_heads, of.head_dim, of.vocab_size,
        of.max_position_embeddings, layers, of.rope.theta, of.rms_norm_eps,
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
    config, where, first = DrafterConfig(seed=seed), resolve_device(device), out / "first"
    second = second_part(config, tokens and max(1, tokens // 3))
    if tokens is not None:
        config = replace(config, tokens=max(1, tokens - tokens // 3))
    with bar_of("draft head", console) as on_step:
        if not (first / "model.safetensors").exists():
            train(config, first, where, on_step)
        return train(second, out, where, on_step, begin_with=first)


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
