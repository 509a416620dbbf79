"""GGUF files: llama.cpp's format, one file with configuration, weights and tokenizer. Built in chapter 15.

The container is `minillm.model.gguf_file`. A row of a quantized tensor is blocks of 32 weights, each with its scale in
front:

    Q8_0  [ d: float16 | q0 q1 ... q31: int8 ]                  w = d * q            34 bytes
    Q4_0  [ d: float16 | q16 q0 | q17 q1 | ... | q31 q15 ]      w = d * (q - 8)      18 bytes, q0 in the lower half

Those two are read as they are. Every other type that the `gguf` library knows (Q4_K, Q6_K, Q5_0, ...) is dequantized
to the model's dtype. The file is mapped into memory and read one tensor after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import gguf  # the library: imports are absolute
import numpy as np
import torch
from torch import Tensor

from minillm.model.adapted import adapted
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.fields import HEADS, LAYERS, SIZE, check_fields
from minillm.model.gguf_experts import model_type, of_experts
from minillm.model.gguf_families import ARCHITECTURES, INTERLEAVED, WINDOWED, gemma3_ropes, hf_name, of_family
from minillm.model.gguf_file import Container, StoredTensor
from minillm.model.gguf_tokenizer import end_token_ids, special_id
from minillm.model.parts import QuantizedPart, install
from minillm.quantization.formats import FORMATS, QuantizedWeight

Kind = gguf.GGMLQuantizationType
PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
KEPT = {Kind.Q8_0: 8, Kind.Q4_0: 4}  # types that stay in low-bit form, and how many
BLOCK = 32  # weights that share a scale
ROPE_DIVISORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # divisors of Phi-3, for long texts and short
OF_ROTATION = (ROPE_DIVISORS, LONG, SHORT)
ROPE_TYPES = ("none", "linear", "yarn")  # of a file; what it has of Llama 3's scaling are the divisors
ROPE_KEYS = (
    "dimension_count",
    "freq_base",
    "scale_linear",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.finetuned",
    "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
)


class GGUFFile:
    """A GGUF file of a model of ARCHITECTURES, by the names of a Hugging Face checkpoint.

    Raises ValueError for a file that is something else, cut off, one of several, or of another architecture.
    """

    def __init__(self, path: Path):
        container = Container(path)
        self.metadata, self.stored = container.metadata, container.tensors
        self.architecture = self._required("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"general.architecture={self.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(
                f"split.count={self.metadata.get('split.count')}: it is one of several; "
                "llama-gguf-split --merge joins them"
            )

    @property
    def kept_types(self) -> list[str]:
        """The types in the file that stay in low-bit form; what is dequantized as it is read is not among them."""
        return sorted({tensor.kind.name for tensor in self.stored.values() if tensor.kind in KEPT})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every weight, by its name in a Hugging Face checkpoint."""
        named = {name: stored for name, stored in self.stored.items() if name not in OF_ROTATION}
        return {hf_name(name, self.architecture): stored.shape for name, stored in named.items()}

    @cached_property
    def config(self) -> ModelConfig:
        config = ModelConfig.from_hf(self._raw_config())
        if ROPE_DIVISORS not in self.stored:  # the scaling of Llama 3.1 and later
            return config
        if config.rope.type != "default":
            raise ValueError(
                f"{ROPE_DIVISORS} beside {self.architecture}.rope.scaling.type={config.rope.type!r} is not supported; "
                "supported is one of the two"
            )
        divisors = self._read(self.stored[ROPE_DIVISORS]).flatten().tolist()
        if len(divisors) != config.head_dim // 2:
            raise ValueError(
                f"{ROPE_DIVISORS} has {len(divisors)} divisors; a head of {config.head_dim} dimensions needs "
                f"{config.head_dim // 2}"
            )
        rope = replace(config.rope, type="divided", divisors=tuple(divisors))
        return replace(config, rope=rope, layer_ropes=tuple(one and rope for one in config.layer_ropes))

    def _raw_config(self) -> dict[str, Any]:
        """What a config.json would say."""
        sizes = {"block_count": LAYERS, "attention.head_count": HEADS, "embedding_length": SIZE}
        check_fields({key: self._number(key) for key in sizes}, sizes, f"{self.architecture}.")
        num_heads, head_dim = self._number("attention.head_count"), self._head_dim
        rotated = self._of_model("rope.dimension_count", head_dim)
        if rotated != head_dim and self.architecture != "phi3":
            raise ValueError(
                f"{self.architecture}.rope.dimension_count={rotated} of head size {head_dim} is not supported; "
                "all must be rotated"
            )
        if "token_embd.weight" not in self.stored:
            raise ValueError("it has no tensor token_embd.weight; a vocabulary or an adapter alone is not a model")
        self._refuse_what_we_do_not_compute(head_dim)
        return (
            {
                "model_type": model_type(self.architecture, self._of_model),
                "vocab_size": self.stored["token_embd.weight"].shape[0],
                "hidden_size": self._number("embedding_length"),
                "intermediate_size": self._number("feed_forward_length"),
                "num_hidden_layers": self._number("block_count"),
                "num_attention_heads": num_heads,
                "num_key_value_heads": self._number("attention.head_count_kv", num_heads),
                "head_dim": head_dim,
                "max_position_embeddings": self._number("context_length"),
                "rms_norm_eps": self._required(f"{self.architecture}.attention.layer_norm_rms_epsilon"),
                "tie_word_embeddings": "output.weight" not in self.stored,
                "attention_bias": self.architecture != "qwen2" and "blk.0.attn_q.bias" in self.stored,
                "mlp_bias": "blk.0.ffn_gate.bias" in self.stored,
                "rope_parameters": self._rope_parameters(rotated / head_dim),
                "eos_token_id": end_token_ids(self.metadata),
                "bos_token_id": special_id(self.metadata, "bos"),
            }
            | of_family(self.architecture, self._of_model, head_dim)
            | self._experts()
        )

    def tensors(self) -> Iterator[tuple[str, Tensor | QuantizedPart]]:
        """Every weight, one at a time. A name that is not known keeps its own."""
        apart = self.architecture == "phi3" or self.config.moe is not None
        return adapted(self.config, self._renamed()) if apart else self._renamed()

    def _renamed(self) -> Iterator[tuple[str, Tensor | QuantizedPart]]:
        for name, stored in self.stored.items():
            if name in OF_ROTATION:  # part of the configuration here
                continue
            tensor = self._read(stored)
            if self.architecture in INTERLEAVED and re.search(r"\.attn_[qk]\.", name):
                tensor = tensor[_halves(stored.shape[0], self._head_dim)]
            yield hf_name(name, self.architecture), tensor

    def _read(self, stored: StoredTensor) -> Tensor | QuantizedPart:
        if stored.kind in PLAIN:
            return torch.from_numpy(stored.data).view(PLAIN[stored.kind]).view(stored.shape)
        if stored.kind in KEPT:
            return QuantizedPart(read_blocks(stored.data, KEPT[stored.kind]))
        try:
            return torch.from_numpy(gguf.dequantize(stored.data, stored.kind)).view(stored.shape)
        except NotImplementedError as error:
            raise ValueError(
                f"{stored.name} is of type {stored.kind.name}, which the gguf library cannot dequantize"
            ) from error

    def _experts(self) -> dict[str, Any]:
        """What a config.json would say of the experts; a layer without their tensors has one MLP."""
        shapes = {name: tensor.shape for name, tensor in self.stored.items() if ".ffn_down_exps." in name}
        layers = [
            layer for layer in range(self._number("block_count")) if f"blk.{layer}.ffn_down_exps.weight" in shapes
        ]
        size = next((shape[-1] for shape in shapes.values()), None)
        return of_experts(self.architecture, self._of_model, layers, size)

    def _refuse_what_we_do_not_compute(self, head_dim: int) -> None:
        """What other programs would compute otherwise than we do, or among themselves."""
        if not self._of_model("attention.causal", True):
            raise ValueError(
                f"{self.architecture}.attention.causal=False is not supported: an encoder generates no text"
            )
        scale = self._of_model("attention.scale", 0.0)
        if scale and self.architecture != "granite" and abs(scale * head_dim**0.5 - 1) > 1e-5:
            raise ValueError(
                f"{self.architecture}.attention.scale={scale:g} is not supported; supported: "
                f"{head_dim**-0.5:g}, which is 1 / sqrt of the head size {head_dim}"
            )
        window, context = self._number("attention.sliding_window", 0), self._number("context_length")
        if 0 < window < context and self.architecture not in WINDOWED:
            why = "llama.cpp ignores it, the model was trained with it; use its safetensors folder"
            raise ValueError(
                f"{self.architecture}.attention.sliding_window={window} is not supported where it is less than the "
                f"context of {context}: {'OLMo 3 is not read' if self.architecture == 'olmo2' else why}"
            )

    def _rope_parameters(self, partial: float) -> dict[str, Any]:
        if self.architecture == "gemma3":
            return gemma3_ropes(self._of_model, self._rope())
        if self.architecture != "phi3":
            return self._rope()
        if LONG not in self.stored or SHORT not in self.stored:
            return self._rope() | {"partial_rotary_factor": partial}
        return {
            "rope_type": "longrope",
            "rope_theta": self._of_model("rope.freq_base", 10000.0),
            "long_factor": self._read(self.stored[LONG]).flatten().tolist(),
            "short_factor": self._read(self.stored[SHORT]).flatten().tolist(),
            "attention_factor": self._of_model("rope.scaling.attn_factor", 1.0),
            "partial_rotary_factor": partial,
        }

    def _rope(self) -> dict[str, Any]:
        """As llama.cpp reads it: a factor without a type is linear, 0 is none, and `scale_linear` is its old name."""
        rope = {"rope_theta": self._of_model("rope.freq_base", 10000.0)}
        kind = self._of_model("rope.scaling.type", "linear")
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope type {kind!r} is not supported; supported in a GGUF file: {', '.join(ROPE_TYPES)}")
        self._refuse_other_rope_keys(kind)
        factor = self._of_model("rope.scaling.factor", self._of_model("rope.scale_linear", 0.0))
        if kind == "yarn" and not factor:
            self._required(f"{self.architecture}.rope.scaling.factor")
        if kind == "none" or factor in (0.0, 1.0):
            return rope
        rope |= {"rope_type": kind, "factor": factor}
        original = self._of_model("rope.scaling.original_context_length")
        betas = {beta: self._of_model(f"rope.scaling.yarn_{beta}") for beta in ("beta_fast", "beta_slow")}
        return (
            rope
            | {"original_max_position_embeddings": original}
            | {beta: value for beta, value in betas.items() if value}
        )

    def _refuse_other_rope_keys(self, kind: str) -> None:
        """A key that turns rotations in a way we do not, unless its value is the one that changes nothing."""
        neutral = {
            "scaling.attn_factor": (1.0,),
            "scaling.yarn_attn_factor": (1.0,),
            "scaling.yarn_ext_factor": (-1.0, 1.0 if kind == "yarn" else 0.0),  # -1: as the type says
            "scaling.yarn_log_multiplier": (0.0,),
        }
        prefix = f"{self.architecture}.rope."
        known = (*ROPE_KEYS, "freq_base_swa") if self.architecture == "gemma3" else ROPE_KEYS
        for key, value in self.metadata.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name not in known and value not in neutral.get(name, ()):
                allowed = " or ".join(f"{one:g}" for one in neutral.get(name, ())) or "a file without it"
                raise ValueError(f"{key}={value} is not supported; supported: {allowed}")

    @property
    def _head_dim(self) -> int:
        return self._of_model("attention.key_length") or self._number("embedding_length") // self._number(
            "attention.head_count"
        )

    def _of_model(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _number(self, key: str, default: int | None = None) -> int:
        """A size, which some files write for every layer."""
        value = self._of_model(key, default)
        if value is None:
            return self._required(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"{self.architecture}.{key}={value} differs by layer; supported is one for all")
            value = value[0]
        if not isinstance(value, int):
            raise ValueError(f"{self.architecture}.{key}={value!r} is not a whole number")
        return value

    def _required(self, key: str) -> Any:
        if (value := self.metadata.get(key)) is None:
            raise ValueError(f"its metadata has no {key!r}, which the decoder cannot be built without")
        return value


def read_gguf(
    decoder: Decoder, tensors: Iterable[tuple[str, Tensor | QuantizedPart]], settings: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Give `decoder` the matrices that stay low-bit, and hand back the other tensors, for the caller to fill in."""
    parts, plain = {}, {}
    for name, tensor in tensors:
        (parts if isinstance(tensor, QuantizedPart) else plain)[name] = tensor
    return chain(plain.items(), install(decoder, parts))


def read_blocks(data: np.ndarray, bits: int) -> QuantizedWeight:
    """Rows of Q8_0 or Q4_0 blocks, uint8 [out_features, bytes of a row], as codes and scales."""
    blocks = torch.from_numpy(data).view(data.shape[0], -1, 2 + BLOCK * bits // 8)
    scales = blocks[:, :, :2].contiguous().view(torch.float16)[:, :, 0]  # [out_features, num_groups]
    codes = blocks[:, :, 2:]
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=2)
    else:
        codes = codes ^ 128  # int8 q to the code q + 128
    return QuantizedWeight(FORMATS[f"int{bits}"], codes.flatten(1).contiguous(), scales.contiguous())


def _halves(rows: int, head_dim: int) -> Tensor:
    """llama.cpp turns dimension 2i of a Llama's head with 2i + 1, we turn i with i + head_dim / 2:
    our order of its rows."""
    return torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()
