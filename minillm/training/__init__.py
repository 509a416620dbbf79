"""The bundled models from nothing: tokenizer, corpus, training, checkpoint. Built in chapter 00.

`minillm train` runs `train(PRESETS["tinyworld"], tokenizer, out, device)`. The model is `transformers`' own Llama,
so that what is learned here is by construction what `transformers` loads; the engine's decoder never sees a gradient.

Four things make a small model learn these tasks within hours on two CPU cores:

* Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) for the matrices, AdamW for the rest;
* the tokens of an answer weigh `answer_weight` times as much as the text around it;
* during the first quarter of training half of the documents are random token sequences, repeated: predicting
  them needs copying, and the heads that learn it there do the recall and JSON tasks afterwards (induction
  heads, Olsson et al., 2022, arXiv:2209.11895);
* short sequences first, the full context for the last part.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from .. import zoo
from ..device import resolve_device
from ..zoo import corpus, tokenizer as bpe
from .config import PRESETS, TrainingConfig, llama_config  # noqa: F401  (part of what this module offers)
from .moe import balance_loss, build_model, save_mixtral


@dataclass(frozen=True)
class Progress:
    """What `train` reports after a step."""

    step: int
    num_steps: int
    loss: float  # weighted mean cross-entropy of the batch, nats a token
    tokens_per_second: float


def train(
    config: TrainingConfig,
    tokenizer: Tokenizer,
    out: Path,
    device: torch.device,
    on_step: Callable[[Progress], None] = lambda progress: None,
    checkpoint_every: int = 50,
    stop_after: int | None = None,
    compile: bool = False,
) -> Path:
    """Train to the end, or on from `out/training.pt` if a run with the same configuration was cut off there.

    Writes `out/training.pt` every `checkpoint_every` steps and, at the end, the Hugging Face folder `out` in bf16
    (the training state is removed then). `on_step` hears of every step; `stop_after` ends this call after that
    many, state saved; `compile` runs the model through `torch.compile`. On one machine, with one number of threads,
    a run is a function of its configuration and tokenizer, whether it was cut off or not.

    Raises ValueError if the state found in `out` belongs to another configuration or tokenizer, RuntimeError if
    this torch has no Muon (before 2.9).
    """
    out.mkdir(parents=True, exist_ok=True)
    _pin_tokenizer(out, tokenizer)
    torch.manual_seed(config.seed)
    model = build_model(config, tokenizer, lambda: torch.from_numpy(batch(config, 0, tokenizer)[0])).to(device)
    optimizers = build_optimizers(model, config)
    step = resume(out, config, model, optimizers)
    forward = torch.compile(model, dynamic=False) if compile else model
    autocast = torch.autocast(device.type, torch.bfloat16) if has_bf16(device) else nullcontext()
    last = min(config.num_steps, step + stop_after) if stop_after is not None else config.num_steps
    while step < last:
        started = time.perf_counter()
        tokens, weights = (torch.from_numpy(array).to(device) for array in batch(config, step, tokenizer))
        with autocast:
            logits = forward(input_ids=tokens[:, :-1]).logits
            losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
        loss = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        (loss + balance_loss(model, config)).backward()
        scale = learning_rate_scale(config, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % checkpoint_every == 0 or step == last:
            save_state(out, config, step, model, optimizers)
        on_step(Progress(step, config.num_steps, loss.item(), tokens.numel() / (time.perf_counter() - started)))
    if step == config.num_steps:
        save(model, tokenizer, out, config)
        (out / "training.pt").unlink()
    return out


def run_preset(
    preset: str,
    out: Path,
    tokens: int | None = None,
    seed: int = 0,
    device: str = "auto",
    compile: bool | None = None,
    learn_tokenizer: bool = False,
    overwrite: bool = False,
    console=None,
) -> Path:
    """`minillm train`: choose a tokenizer, then train `preset` into `out` under a progress bar.

    The tokenizer is that of the run being resumed, else the bundled one, else (or with `learn_tokenizer`) a new one.
    `compile=None` compiles on a GPU. Raises ValueError for an unknown preset, and FileExistsError if `out` holds a
    finished model and `overwrite` is not set.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} is unknown; choose one of {', '.join(PRESETS)}")
    if (out / "config.json").exists() and not (out / "training.pt").exists() and not overwrite:
        raise FileExistsError(f"{out} holds a finished model; choose another folder, or --overwrite")
    config = replace(PRESETS[preset], seed=seed, tokens=tokens or PRESETS[preset].tokens)
    where = resolve_device(device)
    with bar_of(preset, console) as on_step:
        tokenizer = _choose_tokenizer(out, learn_tokenizer)
        compiles = where.type == "cuda" and not config.num_experts if compile is None else compile
        return train(config, tokenizer, out, where, on_step, compile=compiles)


@contextmanager
def bar_of(name: str, console=None) -> Iterator[Callable[[Progress], None]]:
    """A progress bar for a training run; gives the function that hears of every step."""
    from rich.progress import BarColumn, Progress as Bar, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"))
    with Bar(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("preparing", total=None, speed="")
        mean: float | None = None  # of the loss, over the last twenty steps or so

        def on_step(progress: Progress) -> None:
            nonlocal mean
            mean = progress.loss if mean is None else 0.95 * mean + 0.05 * progress.loss
            told = {"description": f"{name}: loss {mean:.3f}", "speed": f"{progress.tokens_per_second:,.0f} tokens/s"}
            bar.update(task, total=progress.num_steps, completed=progress.step, **told)

        yield on_step


def _choose_tokenizer(out: Path, learn_tokenizer: bool) -> Tokenizer:
    begun_with, bundled = out / "tokenizer.json", zoo.bundled().get("tinyworld")
    if (out / "training.pt").exists() and begun_with.exists():
        return Tokenizer.from_file(str(begun_with))
    if bundled and not learn_tokenizer:
        return Tokenizer.from_file(str(bundled / "tokenizer.json"))
    return bpe.learn()


def build_optimizers(model: LlamaForCausalLM, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers; AdamW for embeddings, norms and routers, which have nothing to balance."""
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(
            f"training needs torch.optim.Muon, which torch {torch.__version__} does not have: "
            "install torch >= 2.9 (everything else in minillm runs on 2.8)"
        )
    is_matrix = {
        name: p.ndim == 2 and "layers" in name and ".gate." not in name for name, p in model.named_parameters()
    }
    matrices = [p for name, p in model.named_parameters() if is_matrix[name]]
    others = [p for name, p in model.named_parameters() if not is_matrix[name]]
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.01)
    adamw = torch.optim.AdamW(others, lr=config.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [muon, adamw]


def learning_rate_scale(config: TrainingConfig, step: int) -> float:
    """Warm up linearly, hold, then decay linearly to zero at the end; between 0 and 1."""
    at = (step + 1) / config.num_steps
    return min(1.0, at / config.warmup if config.warmup else 1.0, (1 - at) / config.decay + 1 / config.num_steps)


def batch(config: TrainingConfig, step: int, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Batch number `step`: token ids and loss weights, both [rows, length + 1]. Every row begins with a document.

    A function of the configuration and the number alone, so that a resumed run reads what it would have read.
    """
    at = step / config.num_steps
    length = next(length for until, length in config.stages if at < until or until == 1.0)
    rows = max(1, config.tokens_per_batch // length)
    rng = random.Random(f"batch/{config.seed}/{step}")
    docs = _token_stream(tokenizer, rng, repeats=at < config.repeats)
    tokens = np.zeros((rows, length + 1), dtype=np.int64)
    weights = np.zeros((rows, length + 1), dtype=np.float32)
    for row in range(rows):
        filled = 0
        while filled < length + 1:
            ids, is_answer = next(docs)
            n = min(len(ids), length + 1 - filled)
            tokens[row, filled : filled + n] = ids[:n]
            weights[row, filled : filled + n] = np.where(is_answer[:n], config.answer_weight, 1.0)
            filled += n
    return tokens, weights


def _token_stream(tokenizer: Tokenizer, rng: random.Random, repeats: bool) -> Iterator[tuple[list[int], list[bool]]]:
    texts = corpus.documents(corpus.TRAIN_SEED, start=rng.randrange(10**12))
    while True:
        documents = [next(texts) for _ in range(64)]
        segments = [segment for document in documents for segment in document.segments]
        encoded = iter(tokenizer.encode_batch_fast([text for text, _ in segments], add_special_tokens=False))
        for document in documents:
            ids, answer = [tokenizer.token_to_id(bpe.BEGIN)], [False]
            for _, is_answer in document.segments:
                piece = next(encoded).ids
                ids += piece
                answer += [is_answer] * len(piece)
            if ids[-1] != tokenizer.token_to_id(bpe.END):
                ids.append(tokenizer.token_to_id(bpe.END))
                answer.append(answer[-1])
            yield ids, answer
            if repeats:
                period = [rng.randrange(4, tokenizer.get_vocab_size()) for _ in range(rng.randint(8, 64))]
                yield period * 3, [False] * len(period) + [True] * 2 * len(period)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path, config: TrainingConfig) -> None:
    """Write the Hugging Face folder: config, bf16 safetensors, generation config, tokenizer with chat template."""
    if config.num_experts:
        save_mixtral(model, config, out)
    else:
        state = LlamaForCausalLM(model.config).to(torch.bfloat16)
        state.load_state_dict(model.state_dict())
        state.config.use_cache = state.generation_config.use_cache = True
        state.save_pretrained(out)
    bpe.wrap(tokenizer, model.config.max_position_embeddings).save_pretrained(out)


def has_bf16(device: torch.device) -> bool:
    on_gpu = device.type == "cuda"
    return torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else device.type == "cpu"


def save_state(out: Path, config: TrainingConfig, step: int, model, optimizers) -> None:
    kept = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    state = {"config": json.dumps(asdict(config)), "step": step, **kept}
    torch.save(state, out / "training.pt.partial")
    os.replace(out / "training.pt.partial", out / "training.pt")


def _pin_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    """A run keeps the tokenizer it began with, in `out/tokenizer.json`, for a later run that resumes it."""
    file = out / "tokenizer.json"
    resumes = (out / "training.pt").exists() and file.exists()
    if resumes and Tokenizer.from_file(str(file)).to_str() != tokenizer.to_str():
        raise ValueError(
            f"{out}/training.pt was written with another tokenizer, the one in {file}; "
            "finish that run with it, or choose another folder"
        )
    tokenizer.save(str(file))


def resume(out: Path, config: TrainingConfig, model, optimizers) -> int:
    if not (out / "training.pt").exists():
        return 0
    state = torch.load(out / "training.pt", map_location="cpu", weights_only=True)
    if state["config"] != json.dumps(asdict(config)):
        written = f"{out}/training.pt was written with another configuration: {state['config']}"
        raise ValueError(f"{written}; finish that run with its own settings, or choose another folder")
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(saved)
    return state["step"]
