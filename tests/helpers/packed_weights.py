"""Quantized checkpoints in the hub's layouts, packed here bit by bit in numpy:
the oracle of `minillm.model.hub_formats`."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Rounded:
    """A weight on an integer grid: w[o, i] = scale[g, o] * (code[o, i] - zero[g, o]), g = groups[i]."""

    codes: np.ndarray  # [out, in]
    zeros: np.ndarray  # [num_groups, out]
    scales: np.ndarray  # float16 [num_groups, out]
    groups: np.ndarray  # [in]

    def dequantize(self) -> torch.Tensor:
        w = np.empty(self.codes.shape, np.float32)
        for o in range(w.shape[0]):
            for i in range(w.shape[1]):
                g = self.groups[i]
                w[o, i] = np.float32(self.scales[g, o]) * np.float32(int(self.codes[o, i]) - int(self.zeros[g, o]))
        return torch.from_numpy(w)


def round_weight(
    weight: torch.Tensor, bits: int, group_size: int = -1, act_order: int | None = None, symmetric: bool = False
) -> Rounded:
    """To the nearest point of each group's own grid; `act_order` is the seed of the order that puts inputs into
    groups."""
    w = weight.float().numpy()
    size = w.shape[1] if group_size == -1 else group_size
    groups = np.arange(w.shape[1]) // size
    if act_order is not None:
        groups = groups[np.random.default_rng(act_order).permutation(w.shape[1])]
    top, zeros, scales = 2**bits - 1, [], []
    for g in range(groups.max() + 1):
        low, high = np.minimum(w[:, groups == g].min(1), 0), np.maximum(w[:, groups == g].max(1), 0)
        if symmetric:
            high = np.maximum(high, -low)
            low = -high
        scale = ((high - low) / top).astype(np.float16)
        scales.append(scale)
        zeros.append(np.full_like(scale, 2 ** (bits - 1)) if symmetric else np.rint(-low / scale.astype(np.float32)))
    scales, zeros = np.stack(scales), np.clip(np.stack(zeros), 0, top).astype(np.int64)
    codes = np.rint(w / scales[groups].T.astype(np.float32)) + zeros[groups].T
    return Rounded(np.clip(codes, 0, top).astype(np.int64), zeros, scales, groups)


def stream(codes: np.ndarray, bits: int) -> torch.Tensor:
    """[n, columns] -> int32 [n * bits / 32, columns], as AutoGPTQ writes them: words of 32 / bits codes; of 3 bits,
    three words take 10 codes, one cut into 2 + 1 bits, 10 codes, one cut into 1 + 2 bits, and 10 codes."""
    words = np.zeros((codes.shape[0] * bits // 32, codes.shape[1]), np.uint32)
    codes = codes.astype(np.uint32)
    if bits != 3:
        for i in range(codes.shape[0]):
            words[i // (32 // bits)] |= codes[i] << np.uint32(bits * (i % (32 // bits)))
        return torch.from_numpy(words.view(np.int32))
    for row in range(0, len(words), 3):
        block = codes[row // 3 * 32 : row // 3 * 32 + 32]
        for j in range(10):
            words[row] |= block[j] << np.uint32(3 * j)
            words[row + 1] |= block[11 + j] << np.uint32(3 * j + 1)
            words[row + 2] |= block[22 + j] << np.uint32(3 * j + 2)
        words[row] |= block[10] << np.uint32(30)
        words[row + 1] |= (block[10] >> np.uint32(2)) | (block[21] << np.uint32(31))
        words[row + 2] |= block[21] >> np.uint32(1)
    return torch.from_numpy(words.view(np.int32))


def gptq(rounded: Rounded, bits: int, version: int = 1, with_groups: bool = True) -> dict[str, torch.Tensor]:
    zeros = (rounded.zeros - (version == 1)) % 2**bits
    pieces = {
        "qweight": stream(rounded.codes.T, bits),
        "qzeros": stream(zeros.T, bits).T.contiguous(),
        "scales": torch.from_numpy(rounded.scales),
    }
    return pieces | ({"g_idx": torch.from_numpy(rounded.groups.astype(np.int32))} if with_groups else {})


def awq(rounded: Rounded) -> dict[str, torch.Tensor]:
    def words(codes: np.ndarray) -> torch.Tensor:  # [rows, out]
        packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
        for word in range(packed.shape[1]):
            for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                packed[:, word] |= codes[:, 8 * word + output].astype(np.uint32) << np.uint32(4 * place)
        return torch.from_numpy(packed.view(np.int32))

    return {
        "qweight": words(rounded.codes.T),
        "qzeros": words(rounded.zeros),
        "scales": torch.from_numpy(rounded.scales),
    }


def compressed(rounded: Rounded, bits: int, with_groups: bool = False) -> dict[str, torch.Tensor]:
    """llm-compressor's "pack-quantized": outputs first, zero points packed along the outputs."""
    pieces = {
        "weight_packed": stream(rounded.codes.T, bits).T.contiguous(),
        "weight_scale": torch.from_numpy(rounded.scales.T.copy()),
        "weight_shape": torch.tensor(rounded.codes.shape),
        "weight_zero_point": stream(rounded.zeros.T, bits),
    }
    return pieces | ({"weight_g_idx": torch.from_numpy(rounded.groups.astype(np.int32))} if with_groups else {})


def save_folders(source: Path, folder: Path, settings: dict, pack) -> tuple[Path, Path]:
    """The checkpoint in `source` twice: quantized, and plain with the weights that the quantized one means.

    pack(name, weight) gives the tensors of one matrix by their last names and its dequantized weight, or None for
    a matrix that stays plain.
    """
    quantized, plain = folder / "quantized", folder / "plain"
    shutil.copytree(source, quantized)
    shutil.copytree(source, plain)
    few, full = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        packed = pack(module, tensor) if module.endswith((*MATRICES, "lm_head")) and tensor.dim() == 2 else None
        pieces, meant = packed or ({"weight" if name.endswith("weight") else "bias": tensor}, tensor)
        few |= {f"{name.rpartition('.')[0]}.{piece}": value.contiguous() for piece, value in pieces.items()}
        full[name] = meant
    save_file(few, quantized / "model.safetensors")
    save_file(full, plain / "model.safetensors")
    set_config(quantized, quantization_config=settings)
    return quantized, plain


def set_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
