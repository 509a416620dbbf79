"""HeadConfig: the shape of a draft head, from its folder; and which folder that is. Built in chapter 18.

tinyworld-eagle/drafter_config.json     sizes, and which layers of the target it reads
                model.safetensors       its weights; the embedding and the output matrix are the target's
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from minillm import zoo
from minillm.model.config import ModelConfig
from minillm.model.errors import CheckpointError, naming
from minillm.model.files import read_json
from minillm.model.hub import download
from minillm.speculative.eagle3_config import CONFIG, Eagle3Config, is_eagle3

FILE = "drafter_config.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class HeadConfig:
    """Sizes as in a Llama's config.json, of one layer. `feature_layers`: the hidden states behind so many layers of the
    target are what the head reads, low, mid and high. `target_hidden_size` is their width, by default the head's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    feature_layers: tuple[int, ...]
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    target_hidden_size: int | None = None

    def __post_init__(self):
        layers, wide = self.feature_layers, self.target_hidden_size
        if wide is None:
            object.__setattr__(self, "target_hidden_size", self.hidden_size)
        elif type(wide) is not int or wide < 1:
            raise ValueError(f"target_hidden_size={wide!r} is not allowed; allowed: a whole number from 1 on")
        if not isinstance(layers, (list, tuple)) or not layers or not all(type(one) is int for one in layers):
            raise ValueError(f"feature_layers={layers!r} is not allowed; allowed: a list of whole numbers, such as [1]")
        object.__setattr__(self, "feature_layers", tuple(layers))
        if self.vocab_size < 1 or self.layer.num_layers != 1:  # reading the layer checks the other sizes
            raise ValueError(f"vocab_size={self.vocab_size} is not allowed; allowed: a whole number from 1 on")

    @property
    def layer(self) -> ModelConfig:
        """The head as a decoder of one Llama layer."""
        others = ("feature_layers", "rope_theta", "target_hidden_size")
        sizes = {name: value for name, value in asdict(self).items() if name not in others}
        rope = {"rope_theta": self.rope_theta, "rope_type": "default"}
        shape = {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": True}
        return ModelConfig.from_hf(shape | sizes | {"rope_parameters": rope})

    @property
    def num_parameters(self) -> int:
        """Of the head alone, as trained."""
        size, wide = self.hidden_size, self.target_hidden_size
        heads = self.num_attention_heads + self.num_key_value_heads
        matrices = wide * (len(self.feature_layers) + 2) + size + 2 * heads * self.head_dim + 3 * self.intermediate_size
        return size * (matrices + 4) + wide  # and five norms

    def fixed_bytes(self, most_tokens: int, itemsize: int) -> int:
        """Of its weights, with the target's two matrices in its own width in place of the projections, and of the
        buffers of a step: what it reads and gives, and the target's hidden states."""
        size, wide = self.hidden_size, self.target_hidden_size
        weights = self.num_parameters - 2 * size * wide + 2 * size * self.vocab_size
        return (weights + most_tokens * (len(self.feature_layers) * wide + 2 * size)) * itemsize

    def feature_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Of the features of tokens that the head has not read."""
        return num_tokens * self.hidden_size * itemsize

    @classmethod
    def load(cls, path: Path) -> HeadConfig:
        """Read a head's folder. Raises CheckpointError naming the file and the field."""
        raw = read_json(path / FILE)
        names = [field.name for field in fields(cls)]
        with naming(path / FILE):
            raw = {name: value for name, value in raw.items() if name != "drafter_type"}
            if unknown := [name for name in raw if name not in names]:
                raise ValueError(f"there is no field {unknown[0]!r}; fields: {', '.join(names)}")
            if missing := [name for name in names[:8] if name not in raw]:
                raise ValueError(f"{missing[0]} is missing")
            return cls(**raw)

    def write(self, path: Path) -> None:
        """Write the file that `load` reads."""
        raw: dict[str, Any] = {"drafter_type": "eagle"} | asdict(self)
        (path / FILE).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def resolve_head(name: str | Path) -> Path:
    """The folder of a draft head: a bundled name, a folder that has one, or the hub id of one in EAGLE-3's layout.
    Raises CheckpointError for others."""
    bundled = zoo.bundled_drafters()
    if str(name) in bundled:
        return bundled[str(name)]
    path = Path(name).expanduser()
    if not path.exists() and HUB_ID.fullmatch(str(name)):
        path = download(str(name))
    if (path / FILE).is_file() or is_eagle3(path):
        return path
    held = "is a folder without" if path.is_dir() else "is neither a folder with"
    raise CheckpointError(
        f"speculative_config: model={str(name)!r} {held} {FILE} nor a bundled draft head "
        f"({', '.join(bundled) or 'none here'}), nor a head in EAGLE-3's layout, whose {CONFIG} has a "
        "draft_vocab_size; `minillm train --drafter` makes one"
    )


def load_head_config(path: Path, target: ModelConfig) -> HeadConfig | Eagle3Config:
    """The shape of the head in a folder, in the book's layout or the hub's. Raises CheckpointError naming the file and
    the field."""
    return HeadConfig.load(path) if (path / FILE).is_file() else Eagle3Config.load(path, target)
