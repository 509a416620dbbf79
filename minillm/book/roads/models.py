"""The models of the random roads: two or three random layers, written once into a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from minillm.model.checkpoint import load_config
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.lora_adapter import shapes_of
from minillm.speculative.eagle_config import HeadConfig
from minillm.speculative.eagle_head import EagleHead
from minillm.zoo import tokenizer

VOCAB_SIZE = 300
WINDOW = 9
SHAPE = dict(vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=10000.0,
             hidden_act="silu", tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
             torch_dtype="float32")  # fmt: skip
LATENT = "deepseek"  # whose cache keeps latents: what the engine refuses with it is not drawn
MODELS = {
    "llama": dict(model_type="llama"),
    "mistral": dict(model_type="mistral", sliding_window=WINDOW),
    # A window in the upper layers only: every block is kept, and the layers look at different parts of them.
    "qwen3": dict(
        model_type="qwen3", num_hidden_layers=3, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    LATENT: dict(
        model_type="deepseek_v2", q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=12, first_k_dense_replace=2,
    ),
}  # fmt: skip
# Name -> rank and targets; each of MODELS has all of them in "adapters".
ADAPTERS = {"whole": (4, ("q", "k", "v", "o", "gate", "up", "down")), "small": (2, ("q", "v")), "low": (3, ("o", "up"))}
NOISE = 0.1  # of a draft model's weights, in standard deviations: it agrees with its target now and then


def write_models(folder: Path) -> None:
    """Each of MODELS, and beside it "NAME-noisy", the same weights with noise, and "NAME-eagle", a head to draft with.
    All have one tokenizer."""
    wrapped = tokenizer.wrap(tokenizer.learn(VOCAB_SIZE, num_documents=100), SHAPE["max_position_embeddings"])
    for seed, name in enumerate(MODELS):
        for noise, path in ((0.0, folder / name), (NOISE, folder / f"{name}-noisy")):
            path.mkdir(parents=True)
            wrapped.save_pretrained(path)
            (path / "config.json").write_text(json.dumps(SHAPE | MODELS[name]), encoding="utf-8")
            _write_weights(path, seed, noise)
        write_head(folder / f"{name}-eagle", config_of(name), seed)
        for number, adapter in enumerate(ADAPTERS):
            _write_adapter(folder / name, adapter, 10 * seed + number)


def write_head(path: Path, target: ModelConfig, seed: int) -> Path:
    """A draft head with random weights for a model of the shape `target`."""
    from safetensors.torch import save_file

    sizes = dict(vocab_size=target.vocab_size, max_position_embeddings=target.max_position_embeddings)
    layers = (1, target.num_layers)
    head = HeadConfig(32, 32, 4, 2, 16, feature_layers=layers, target_hidden_size=target.hidden_size, **sizes)
    path.mkdir(parents=True)
    head.write(path)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    views = EagleHead(head, Decoder(target, torch.float32, "meta"), 1).checkpoint_views()
    for name, view in sorted(views.items()):
        drawn = torch.randn(view.shape, generator=generator)
        tensors[name] = 1 + 0.3 * drawn if view.dim() == 1 else 0.2 * drawn
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def adapter_folder(models: Path, name: str, adapter: str) -> Path:
    return models / name / "adapters" / adapter


def config_of(name: str) -> ModelConfig:
    """The shape of one of MODELS, of which no file need be there."""
    return ModelConfig.from_hf(SHAPE | MODELS[name])


@torch.no_grad()
def _write_weights(path: Path, seed: int, noise: float) -> None:
    """Wide weights: the layers decide which token comes next, and a wrong key or mask changes it."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, view in sorted(Decoder(load_config(path), torch.float32).checkpoint_views().items()):
        drawn = torch.randn(view.shape, generator=generator)
        tensors[name] = 1 + 0.3 * drawn if name.endswith("norm.weight") else 0.2 * drawn
    for tensor in tensors.values():
        tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _write_adapter(path: Path, adapter: str, seed: int) -> None:
    """Products about as large as those of the weights."""
    from safetensors.torch import save_file

    rank, targets = ADAPTERS[adapter]
    folder, generator, tensors = (
        adapter_folder(path.parent, path.name, adapter),
        torch.Generator().manual_seed(seed),
        {},
    )
    names = [f"{target}_proj" for target in targets]
    for place, (out_features, in_features) in shapes_of(Decoder(load_config(path), torch.float32, "meta")).items():
        if place.endswith(tuple(names)):
            for letter, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                name = f"base_model.model.model.{place}.lora_{letter}.weight"
                tensors[name] = 0.25 * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
