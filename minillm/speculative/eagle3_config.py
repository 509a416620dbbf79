"""Eagle3Config: a draft head in the hub's EAGLE-3 layout. Built in chapter 18.

    config.json        architectures ["LlamaForCausalLMEagle3"], draft_vocab_size, the sizes of one Llama layer
    model.safetensors
      fc.weight                        [hidden, 3 * target_hidden]   fuses hidden states of the target, mostly three
      midlayer.input_layernorm.weight  [hidden]                      of the token's embedding
      midlayer.hidden_norm.weight      [hidden]                      of the feature
      midlayer.self_attn.q_proj.weight [heads * head_dim, 2 * hidden]  of both side by side; k_proj and v_proj likewise
      midlayer.self_attn.o_proj, midlayer.post_attention_layernorm, midlayer.mlp.*   as in a Llama
      norm.weight                      [hidden]
      lm_head.weight                   [draft_vocab, hidden]
      d2t                              whole numbers [draft_vocab]: draft token i is the target's token i + d2t[i]
      t2d                              [vocab], which tokens those are: not read
      embed_tokens.weight              [vocab, hidden], or none: then it is the target's

EAGLE's authors (Li et al. 2025, https://arxiv.org/abs/2503.01840) and SpecForge write it. SGLang and vLLM read it, vLLM
with `layers.0.` for `midlayer.` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.model.config import ModelConfig
from minillm.model.errors import CheckpointError, naming
from minillm.model.fields import FLAG, OBJECT, Whole, check_config, check_fields
from minillm.model.files import read_json
from minillm.model.weights import PICKLE_SUFFIXES, some, tensor_places

CONFIG, EMBEDDING = "config.json", "embed_tokens.weight"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")  # the last in the oldest files
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OWN_FIELDS = {
    **dict.fromkeys(("draft_vocab_size", "target_hidden_size"), Whole()),
    "norm_before_residual": FLAG,
    "eagle_config": OBJECT,
}
# What variants of the layout switch on, and this head does not compute: the fields, and what they must be.
FIXED: dict[str, tuple] = {
    "num_hidden_layers": (1,),
    "hidden_act": ("silu", "swish", None),
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "norm_before_fc", "fc_norm", "norm_output"), (False, None)),
    "tie_word_embeddings": (False, None),
    "logit_scale": (1, None),
    **dict.fromkeys(("quantization_config", "parallel_drafting", "sliding_window"), (None, False)),
}


@dataclass(frozen=True)
class Eagle3Config:
    """A head for one target. `layer` is it as a decoder of one Llama layer over the target's vocabulary;
    `feature_layers`: the hidden states behind so many layers of the target are what it reads."""

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    norm_before_residual: bool = False  # the normed feature is what the layer adds to, else the feature itself
    own_embedding: bool = False

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return self.layer.vocab_size

    @property
    def num_parameters(self) -> int:
        layer, size = self.layer, self.hidden_size
        qkv = 2 * size * (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        matrices = len(self.feature_layers) * self.target_hidden_size * size + qkv
        matrices += layer.num_heads * layer.head_dim * size
        words = self.draft_vocab_size + self.own_embedding * self.vocab_size
        return matrices + 3 * size * layer.intermediate_size + words * size + 4 * size

    def fixed_bytes(self, most_tokens: int, itemsize: int) -> int:
        """Of its weights, and of the buffers of a step: what it reads and gives, and the target's hidden states."""
        buffers = most_tokens * (len(self.feature_layers) * self.target_hidden_size + 2 * self.hidden_size)
        return (self.num_parameters + buffers) * itemsize

    def feature_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Of the features of tokens that the head has not read."""
        return num_tokens * self.hidden_size * itemsize

    @classmethod
    def load(cls, path: Path, target: ModelConfig) -> Eagle3Config:
        """Read the head in a folder, for `target`. Raises CheckpointError naming the field, its value and what is
        allowed."""
        raw = read_json(path / CONFIG)
        with naming(path / CONFIG):
            _refuse_pickles(path)
            own = any(name.removeprefix("model.") == EMBEDDING for name in tensor_places(path))
            return cls.of(raw, target.num_layers, own)

    @classmethod
    def of(cls, raw: dict[str, Any], num_layers: int, own_embedding: bool) -> Eagle3Config:
        """From what config.json says, for a target of so many layers. Raises ValueError."""
        _check(raw)
        size, wide = raw["hidden_size"], raw.get("target_hidden_size") or raw["hidden_size"]
        if wide != size and not own_embedding:
            raise ValueError(
                f"a head with hidden_size={size} for target_hidden_size={wide} has no {EMBEDDING}, and the target's "
                "has another width; fetch it again"
            )
        return cls(
            layer=ModelConfig.from_hf({"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1, **raw}),
            draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
            target_hidden_size=wide,
            feature_layers=_feature_layers(raw, num_layers),
            norm_before_residual=bool(raw.get("norm_before_residual")),
            own_embedding=own_embedding,
        )


def is_eagle3(path: Path) -> bool:
    """Whether a folder says that it is a draft head of the hub, of whatever kind: `load` says which are read."""
    if not (path / CONFIG).is_file():
        return False
    raw = read_json(path / CONFIG)
    return any("eagle" in name.lower() for name in _architectures(raw)) or any(
        name in raw for name in ("draft_vocab_size", "speculators_config", "speculators_model_type")
    )


def _architectures(raw: dict[str, Any]) -> list[str]:
    found = raw.get("architectures")
    return [str(name) for name in found] if isinstance(found, list) else []


def _check(raw: dict[str, Any]) -> None:
    """Raise ValueError for what is no head of this layout, or a variant of it that is not computed."""
    named = _architectures(raw)
    if "speculators_config" in raw or "speculators_model_type" in raw:
        raise ValueError(
            f"a head in the format of `speculators` (architectures={named}) is not read; read are heads in EAGLE-3's "
            f"own layout, with architectures {', '.join(ARCHITECTURES[:2])}"
        )
    if len(named) != 1 or named[0] not in ARCHITECTURES or raw.get("model_type", "llama") != "llama":
        raise ValueError(
            f"architectures={named} with model_type={raw.get('model_type')!r} is not read as a draft head; read are "
            f"{' and '.join(ARCHITECTURES[:2])} with model_type 'llama'"
        )
    check_config(raw)
    check_fields(raw, OWN_FIELDS)
    check_fields(raw.get("eagle_config") or {}, {"use_aux_hidden_state": FLAG}, "eagle_config: ")
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings"):
        if raw.get(name) is None:
            raise ValueError(f"{name} is missing")
    for name, allowed in FIXED.items():
        if raw.get(name, allowed[-1]) not in allowed:
            raise ValueError(f"{name}={raw[name]!r} is not supported in a draft head; supported: {allowed[0]!r}")
    if not (raw.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        raise ValueError("eagle_config: use_aux_hidden_state=False is not supported; supported: True")
    if (small := raw.get("draft_vocab_size")) is not None and small > raw["vocab_size"]:
        raise ValueError(f"draft_vocab_size={small} exceeds vocab_size={raw['vocab_size']}, which is the target's")


def _feature_layers(raw: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """As vLLM reads them: the file's ids, each the number of layers that stand before the state, from low to high; or
    those that the authors trained with."""
    written = raw.get(LAYER_IDS, (raw.get("eagle_config") or {}).get(LAYER_IDS))
    found = written if written is not None else [2, num_layers // 2, num_layers - 3]
    is_whole = isinstance(found, list) and all(type(one) is int for one in found)
    if not is_whole or not 1 <= min(found, default=0) <= max(found) <= num_layers or len(set(found)) < len(found):
        default = " (not written, so EAGLE-3's own)" if written is None else ""
        raise ValueError(
            f"{LAYER_IDS}={found!r}{default} does not fit a model of {num_layers} layers; allowed: a list of "
            f"different numbers from 1 to {num_layers}"
        )
    if raw.get("num_aux_hidden_states") not in (None, len(found)):
        raise ValueError(
            f"num_aux_hidden_states={raw['num_aux_hidden_states']!r} does not fit {LAYER_IDS}={found}; make them agree"
        )
    return tuple(sorted(found))


def _refuse_pickles(path: Path) -> None:
    """Many heads are published as a pickle file alone. Raise CheckpointError naming it and the way out."""
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles and not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{path} has {some(pickles)} and no *.safetensors file; a pickle file can run any code when it is read, so "
            f"minillm reads safetensors only; with a file you trust, convert it: safetensors.torch.save_file("
            f"torch.load({pickles[0]!r}, weights_only=True), 'model.safetensors')"
        )
