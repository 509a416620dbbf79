"""The experts of a model, as its config.json describes them: how many, of what size, and how a router chooses.
Built in chapter 21.

    family        a token's weights are                              shared experts
    Mixtral       softmax over all, the chosen ones renormalised     none
    OLMoE         softmax over all                                   none
    Qwen2-MoE     softmax over all                                   one, multiplied by a sigmoid of its own
    Qwen3-MoE     softmax over all, renormalised if the file says    none
    DeepSeek-V2   softmax over all, then scaled                      some, added as they are
    DeepSeek-V3,  sigmoids, chosen with a bias that balances the     some, added as they are
    dots.llm1     load, then scaled
    gpt-oss       softmax over the chosen ones alone; router and     none
                  experts have biases
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minillm.model.rope import required

SCORES = ("softmax", "softmax_after_topk", "sigmoid")


@dataclass(frozen=True)
class MoEConfig:
    """The experts of the layers in `layers`; the other layers have one MLP.

    `scoring_func` turns the router's logits into scores: "softmax" over all experts, "softmax_after_topk" over the
    chosen ones alone, or a "sigmoid" of each. With `correction_bias` experts are chosen by score + bias and weighted by
    the score alone. Of `n_group` groups of experts, a token may choose from the best `topk_group`. Raises ValueError
    naming the field that does not fit the others.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    layers: tuple[int, ...]
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False  # the weights of the chosen experts are divided by their sum
    routed_scaling_factor: float = 1.0
    correction_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    shared_intermediate_size: int = 0  # of the MLP that every token goes through; 0 is none
    shared_expert_gate: bool = False
    biases: bool = False  # of the router and of every expert
    held: tuple[int, int] | None = None  # the first expert of this process, and the one behind its last; None is all

    def __post_init__(self):
        if self.scoring_func not in SCORES:
            raise ValueError(f"scoring_func={self.scoring_func!r} is not supported; supported: {', '.join(SCORES)}")
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is not allowed; allowed: 1 to the {self.num_experts} "
                "experts that there are"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        if self.n_group == 1:
            return
        if self.scoring_func == "softmax_after_topk":
            raise ValueError(
                f"n_group={self.n_group} with scoring_func={self.scoring_func!r} is not supported; supported: 1, or "
                "groups with softmax or sigmoid scores"
            )
        size = self.num_experts // self.n_group
        if self.num_experts % self.n_group or size < 2:
            raise ValueError(
                f"n_group={self.n_group} does not divide {self.num_experts} experts into groups of at least 2"
            )
        if not 1 <= self.topk_group <= self.n_group or self.topk_group * size < self.num_experts_per_tok:
            raise ValueError(
                f"topk_group={self.topk_group} is not allowed; allowed: up to n_group={self.n_group}, and so many that "
                f"their {size} experts each hold num_experts_per_tok={self.num_experts_per_tok}"
            )

    @property
    def num_held(self) -> int:
        """How many experts this process holds: with expert parallel, some of them."""
        return self.num_experts if self.held is None else self.held[1] - self.held[0]

    def parameters(self, hidden_size: int, num_experts: int | None = None) -> int:
        """Weights of one layer's router, experts and shared expert; or with `num_experts` of them, such as those that
        one token uses."""
        count = self.num_experts if num_experts is None else num_experts
        routed = 3 * hidden_size * self.intermediate_size * count + hidden_size * self.num_experts
        routed += self.biases * (count * (2 * self.intermediate_size + hidden_size) + self.num_experts)
        shared = 3 * hidden_size * self.shared_intermediate_size + hidden_size * self.shared_expert_gate
        return routed + shared


def read_moe(raw: dict[str, Any]) -> MoEConfig | None:
    """The experts of a config.json in which its family's defaults stand; None for a model that has none.

    Raises ValueError naming the field.
    """
    if (read := READERS.get(raw["model_type"])) is None:
        return None
    fields = read(raw)
    return MoEConfig(num_experts_per_tok=required(raw, "num_experts_per_tok"), **fields) if fields["layers"] else None


def _count(raw: dict[str, Any]) -> int:
    """Families, and versions of transformers, write the number of experts under different names."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if raw.get(name) is not None:
            return raw[name]
    return required(raw, "num_experts")


def _mixtral(raw: dict[str, Any]) -> dict[str, Any]:
    return dict(
        num_experts=_count(raw),
        intermediate_size=required(raw, "intermediate_size"),
        layers=tuple(range(raw["num_hidden_layers"])),
        norm_topk_prob=True,
    )


def _olmoe(raw: dict[str, Any]) -> dict[str, Any]:
    return _mixtral(raw) | {"norm_topk_prob": raw["norm_topk_prob"]}


def _gpt_oss(raw: dict[str, Any]) -> dict[str, Any]:
    return _mixtral(raw) | {"scoring_func": "softmax_after_topk", "norm_topk_prob": False, "biases": True}


def _qwen(raw: dict[str, Any]) -> dict[str, Any]:
    count, step, dense = _count(raw), raw["decoder_sparse_step"], raw.get("mlp_only_layers") or ()
    layers = tuple(i for i in range(raw["num_hidden_layers"]) if count and i not in dense and (i + 1) % step == 0)
    fields = dict(
        num_experts=count,
        intermediate_size=required(raw, "moe_intermediate_size"),
        layers=layers,
        norm_topk_prob=raw["norm_topk_prob"],
    )
    if raw["model_type"] == "qwen2_moe":
        fields |= dict(
            shared_intermediate_size=required(raw, "shared_expert_intermediate_size"), shared_expert_gate=True
        )
    return fields


def _deepseek(raw: dict[str, Any]) -> dict[str, Any]:
    size = required(raw, "moe_intermediate_size")
    return dict(
        num_experts=_count(raw),
        intermediate_size=size,
        layers=tuple(range(raw["first_k_dense_replace"], raw["num_hidden_layers"])),
        scoring_func="sigmoid",
        norm_topk_prob=raw["norm_topk_prob"],
        routed_scaling_factor=float(raw["routed_scaling_factor"]),
        correction_bias=True,
        n_group=raw["n_group"],
        topk_group=raw["topk_group"],
        shared_intermediate_size=size * (raw.get("n_shared_experts") or 0),
    )


def _deepseek_v3(raw: dict[str, Any]) -> dict[str, Any]:
    _check_choices(raw, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    return _deepseek(raw)


def _deepseek_v2(raw: dict[str, Any]) -> dict[str, Any]:
    """Groups count where `topk_method` says so. No released model renormalises, and transformers does not."""
    grouped = raw["topk_method"] == "group_limited_greedy"
    method = "group_limited_greedy" if grouped else "greedy"
    _check_choices(raw, scoring_func="softmax", topk_method=method, moe_layer_freq=1, norm_topk_prob=False)
    changed = dict(scoring_func="softmax", correction_bias=False)
    return _deepseek(raw) | changed | ({} if grouped else dict(n_group=1, topk_group=1))


def _check_choices(raw: dict[str, Any], **computed: Any) -> None:
    """Raise ValueError for a field whose value is not the one that is computed; it may be missing."""
    for name, value in computed.items():
        if raw.get(name) not in (None, value):
            raise ValueError(
                f"{name}={raw[name]!r} is not supported with model_type={raw['model_type']!r}; supported: {value!r}"
            )


READERS = {
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen,
    "qwen3_moe": _qwen,
    "dots1": _deepseek,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
