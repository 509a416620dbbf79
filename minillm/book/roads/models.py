"""The models of the random roads: two or three random layers, written once into a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from minillm.model.checkpoint import load_config
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.lora_adapter import shapes_of
from minillm.quantization.formats import pack_codes
from minillm.quantization.rtn import round_to_nearest
from minillm.speculative.eagle3_config import LAYER_IDS, Eagle3Config
from minillm.speculative.eagle3_head import Eagle3Head
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
MXFP4 = "gpt-oss"  # experts in blocks and scales, as the hub has them; likewise
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
    MXFP4: dict(
        model_type="gpt_oss", hidden_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=7,
        rope_scaling=None, quantization_config={"quant_method": "mxfp4"},
    ),
}  # fmt: skip
# Name -> rank and targets; each of MODELS has all of them in "adapters".
ADAPTERS = {"whole": (4, ("q", "k", "v", "o", "gate", "up", "down")), "small": (2, ("q", "v")), "low": (3, ("o", "up"))}
NOISE = 0.1  # of a draft model's weights, in standard deviations: it agrees with its target now and then


def write_models(folder: Path) -> None:
    """Each of MODELS, and beside it "NAME-noisy", the same weights with noise, and "NAME-eagle" and
    "NAME-eagle3", heads to draft with. All have one tokenizer."""
    wrapped = tokenizer.wrap(tokenizer.learn(VOCAB_SIZE, num_documents=100), SHAPE["max_position_embeddings"])
    for seed, name in enumerate(MODELS):
        for noise, path in ((0.0, folder / name), (NOISE, folder / f"{name}-noisy")):
            path.mkdir(parents=True)
            wrapped.save_pretrained(path)
            (path / "config.json").write_text(json.dumps(SHAPE | MODELS[name]), encoding="utf-8")
            _write_weights(path, seed, noise)
        write_head(folder / f"{name}-eagle", config_of(name), seed)
        write_eagle3(folder / f"{name}-eagle3", config_of(name), seed)
        for number, adapter in enumerate(ADAPTERS if name != MXFP4 else ()):
            _write_adapter(folder / name, adapter, 10 * seed + number)


def write_head(path: Path, target: ModelConfig, seed: int) -> Path:
    """A draft head with random weights for a model of the shape `target`."""
    sizes = dict(vocab_size=target.vocab_size, max_position_embeddings=target.max_position_embeddings)
    layers = (1, target.num_layers)
    head = HeadConfig(32, 32, 4, 2, 16, feature_layers=layers, target_hidden_size=target.hidden_size, **sizes)
    path.mkdir(parents=True)
    head.write(path)
    _draw_head(path, EagleHead(head, Decoder(target, torch.float32, "meta"), 1), seed)
    return path


def write_eagle3(path: Path, target: ModelConfig, seed: int) -> Path:
    """A head in EAGLE-3's layout with random weights, as narrow and with rows for every second token."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    vocab = dict(vocab_size=target.vocab_size, draft_vocab_size=target.vocab_size // 2)
    raw = {name: SHAPE[name] for name in ("max_position_embeddings", "rms_norm_eps", "rope_theta")} | sizes | vocab
    raw |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", LAYER_IDS: [1, target.num_layers]}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(raw | {"target_hidden_size": target.hidden_size}), encoding="utf-8")
    head = Eagle3Config.of(raw | {"target_hidden_size": target.hidden_size}, target.num_layers, own_embedding=True)
    every_second = torch.arange(target.vocab_size // 2)  # token 2 i is i tokens further
    _draw_head(path, Eagle3Head(head, Decoder(target, torch.float32, "meta"), 1), seed, d2t=every_second)
    return path


def _draw_head(path: Path, head: EagleHead, seed: int, **others: Tensor) -> None:
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), others
    for name, view in sorted(head.checkpoint_views().items()):
        drawn = torch.randn(view.shape, generator=generator)
        tensors[name] = 1 + 0.3 * drawn if view.dim() == 1 else 0.2 * drawn
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def adapter_folder(models: Path, name: str, adapter: str) -> Path:
    return models / name / "adapters" / adapter


def config_of(name: str) -> ModelConfig:
    """The shape of one of MODELS, of which no file need be there."""
    raw = SHAPE | MODELS[name]
    return ModelConfig.from_hf({field: raw[field] for field in raw if field != "quantization_config"})


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
    if MXFP4 in path.name:
        tensors = _in_blocks(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _in_blocks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of gpt-oss in the hub's layout, see `minillm.model.mxfp4`; the numbers of experts in order."""
    found: dict[str, Tensor] = {}
    matrices: dict[tuple[str, str], dict[str, list[Tensor]]] = {}
    for name, tensor in tensors.items():
        if (match := re.fullmatch(r"(.*\.mlp\.experts)\.\d+\.(\w+)_proj\.(weight|bias)", name)) is None:
            found[name.replace(".mlp.gate.", ".mlp.router.")] = tensor
            continue
        module, part, kind = match.groups()
        matrices.setdefault((module, kind), {}).setdefault(part, []).append(tensor)
    for (module, kind), parts in matrices.items():
        gate, up, down = (torch.stack(parts[part]) for part in ("gate", "up", "down"))  # [experts, outputs, ...]
        fused = torch.stack([gate, up], dim=2).flatten(1, 2)  # the rows of both in turn
        for name, whole in ((f"{module}.gate_up_proj", fused), (f"{module}.down_proj", down)):
            if kind == "bias":
                found[f"{name}_bias"] = whole
                continue
            weight = round_to_nearest(whole.flatten(0, 1), "fp4", 32, scale_format="power_of_two")
            blocks, shape = pack_codes(weight.codes, 4), whole.shape[:2]
            found[f"{name}_blocks"] = blocks.view(*shape, -1, 16)
            found[f"{name}_scales"] = (weight.scales.log2() + 127).to(torch.uint8).view(*shape, -1)
    return found


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
