"""What an adapter_config.json of PEFT says: rank, scaling and targets of every matrix. Built in chapter 23.

    scaling = lora_alpha / r            or lora_alpha / sqrt(r) with use_rslora
    r, lora_alpha                       of all matrices, except those that rank_pattern and alpha_pattern name

A setting that changes what an adapter computes, and that is not served, is refused by its name. Settings of the
training, such as lora_dropout, are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from minillm.model.errors import AdapterError
from minillm.model.files import read_json
from minillm.model.weights import ADAPTER

HIGHEST_RANK = 64
# Settings that change the computation, and what to do instead; each is refused unless it is None, False or empty.
REFUSED = {
    "use_dora": "DoRA scales each row of the weight: merge the adapter into its model, or train it with use_dora=False",
    "modules_to_save": "it replaces whole matrices: merge the adapter into its model",
    "fan_in_fan_out": "its matrices are transposed, as GPT-2's are; this model has none of those",
    "lora_bias": "train the adapter with lora_bias=False",
    "target_parameters": "adapters of single parameters are not served",
    "trainable_token_indices": "it changes the embedding: merge the adapter into its model",
    "layer_replication": "it changes the number of layers: merge the adapter into its model",
    "alora_invocation_tokens": "an adapter serves all tokens of its request: train it without invocation tokens",
    "use_qalora": "merge the adapter into its model",
    "use_bdlora": "merge the adapter into its model",
    "arrow_config": "a request has one adapter: merge the adapters first",
    "kasa_config": "merge the adapter into its model",
    "monteclora_config": "merge the adapter into its model",
}
# Ways to begin that change the weights of the base model too: the adapter fits the changed ones alone.
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
LONGEST_PATTERN, MOST_REPEATS = 200, 4  # of a key of rank_pattern: matching more can take for ever


@dataclass(frozen=True)
class LoraConfig:
    """A checked configuration; `folder` is where it was read."""

    folder: Path
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | None  # names; None: an expression, or all matrices
    is_partial: bool  # whether some layers or modules are left out, so that matrices without tensors are no mistake

    def rank(self, module: str) -> int:
        """Of a matrix by its full name, as in model.layers.0.self_attn.q_proj."""
        return self.rank_pattern.get(_key(self.rank_pattern, module), self.r)

    def scaling(self, module: str) -> float:
        """What the product of its two matrices is multiplied with."""
        alpha, rank = self.alpha_pattern.get(_key(self.alpha_pattern, module), self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool | None:
        """Whether `target_modules` names this matrix; None where only PEFT can tell."""
        if self.target_modules is None:
            return None
        return any(module == name or module.endswith(f".{name}") for name in self.target_modules)


def read_lora_config(folder: Path, max_rank: int) -> LoraConfig:
    """Read and check adapter_config.json. Raises AdapterError naming the setting, its value and what is allowed."""
    raw = read_json(folder / ADAPTER)

    def refuse(name: str, why: str) -> None:
        raise AdapterError(f"{folder / ADAPTER}: {name}={shown(raw.get(name))} {why}")

    if str(raw.get("peft_type", "")).upper() != "LORA":
        refuse("peft_type", "is not served; served is 'LORA'")
    for name, why in REFUSED.items():
        if raw.get(name):
            refuse(name, f"is not served: {why}")
    if raw.get("bias", "none") not in ("none", None):
        refuse("bias", "is not served: biases of the model would change; train the adapter with bias='none'")
    begins = raw.get("init_lora_weights", True)
    if isinstance(begins, str) and begins.lower().startswith(CHANGE_THE_BASE):
        refuse("init_lora_weights", "changes the weights of the base model too: convert the adapter with PEFT first")
    allowed = f"is not allowed; allowed: a whole number from 1 to max_lora_rank={max_rank}"
    ranks = {"r": raw.get("r")} | {f"rank_pattern[{key!r}]": one for key, one in _pattern(folder, raw, "rank").items()}
    for name, rank in ranks.items():
        if type(rank) is not int or not 1 <= rank <= max_rank:
            more = f"; start with a larger max_lora_rank, {HIGHEST_RANK} at most" if max_rank < HIGHEST_RANK else ""
            raise AdapterError(f"{folder / ADAPTER}: {name}={shown(rank)} {allowed}{more}")
    alphas = {"lora_alpha": raw.get("lora_alpha", 8)}
    alphas |= {f"alpha_pattern[{key!r}]": one for key, one in _pattern(folder, raw, "alpha").items()}
    for name, alpha in alphas.items():
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise AdapterError(f"{folder / ADAPTER}: {name}={shown(alpha)} is not allowed; allowed: a finite number")
    return LoraConfig(
        folder,
        raw["r"],
        alphas["lora_alpha"],
        bool(raw.get("use_rslora")),
        _pattern(folder, raw, "rank"),
        _pattern(folder, raw, "alpha"),
        _targets(folder, raw),
        any(raw.get(name) is not None for name in ("layers_to_transform", "layers_pattern", "exclude_modules")),
    )


def _targets(folder: Path, raw: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The list of names; None for an expression, which the tensors of the file have answered already."""
    given = raw.get("target_modules")
    if given is None or (isinstance(given, str) and given):
        return None
    if not isinstance(given, list) or not given or not all(isinstance(name, str) and name for name in given):
        raise AdapterError(
            f"{folder / ADAPTER}: target_modules={shown(given)} is not allowed; allowed: a list of names, "
            "an expression, or 'all-linear'"
        )
    return tuple(given)


def _pattern(folder: Path, raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """rank_pattern or alpha_pattern, whose keys are expressions over the ends of names."""
    given = raw.get(f"{kind}_pattern") or {}
    where = f"{folder / ADAPTER}: {kind}_pattern"
    if not isinstance(given, dict):
        raise AdapterError(f"{where}={shown(given)} is not allowed; allowed: names and a number for each")
    for key in given:
        repeats = len(re.findall(r"[*+{]", key))
        if len(key) > LONGEST_PATTERN or repeats > MOST_REPEATS or re.search(r"\)[*+{]", key):
            raise AdapterError(
                f"{where} has the key {shown(key)}, which may take for ever to match; write the names of the modules"
            )
        try:
            re.compile(key)
        except (re.error, RecursionError) as error:
            raise AdapterError(f"{where} has the key {shown(key)}, which is no expression: {error}") from error
    return given


def _key(patterns: Iterable[str], module: str) -> str | None:
    """The first key that fits the end of the name, as PEFT looks for it."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
