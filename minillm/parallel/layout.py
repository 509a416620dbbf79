"""Layout: which part of a model each rank holds. Built in chapter 20.

    tensor_parallel_size=2, pipeline_parallel_size=2, a model of 6 layers, 4 query heads and 2 KV heads

                        tensor rank 0             tensor rank 1
    stage 0  layers 0-2    rank 0: heads 0 1, KV 0   rank 1: heads 2 3, KV 1      + the embedding, half of its rows each
    stage 1  layers 3-5    rank 2: heads 0 1, KV 0   rank 3: heads 2 3, KV 1      + the output matrix, likewise

A rank's model is an ordinary decoder of a smaller shape (`local_config`): fewer heads, a narrower MLP, a part of the
vocabulary, some of the layers. What makes the ranks one model are the sums between them (`minillm.parallel.layers`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillm.model import gpt_oss
from minillm.model.config import ModelConfig
from minillm.model.moe_config import MoEConfig

LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
FUSED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(\.weight)?$")
COLUMN_PARALLEL = ("gate_proj", "up_proj")  # beside q, k and v: the rows of the weight are cut
ROW_PARALLEL = ("o_proj", "down_proj")  # the columns of the weight are cut, and the products are summed
BLOCK = 32  # inputs of an expert of gpt-oss that share a scale in its files


@dataclass(frozen=True)
class Layout:
    """The place of one rank. Ranks of one stage stand together: rank = stage * tensor_parallel_size + tensor rank."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    rank: int = 0
    expert_parallel: bool = False  # a rank has whole experts, not a part of each: chapter 21

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def is_first(self) -> bool:
        """Whether it is in the first stage, which has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it is in the last stage, which has the output matrix."""
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def leader(self) -> int:
        """The rank that answers for all: the first one of the last stage."""
        return self.world_size - self.tensor_parallel_size

    def __str__(self) -> str:
        parts = [f"rank {self.rank} of {self.world_size}"]
        if self.world_size > self.tensor_parallel_size > 1:
            parts.append(f"tensor rank {self.tensor_rank} of stage {self.stage}")
        return ", ".join(parts)

    def layers(self, num_layers: int) -> range:
        """The layers of this rank's stage. Where they do not divide evenly, the first stages have one more: the last
        one has the output matrix beside its layers."""
        each, more = divmod(num_layers, self.pipeline_parallel_size)
        start = self.stage * each + min(self.stage, more)
        return range(start, start + each + (self.stage < more))

    def query_heads(self, config: ModelConfig) -> range:
        count = config.num_heads // self.tensor_parallel_size
        return range(self.tensor_rank * count, (self.tensor_rank + 1) * count)

    def kv_heads(self, config: ModelConfig) -> range:
        """Those that this rank's query heads read. Where ranks outnumber them, several ranks hold the same one."""
        ranks_each = max(1, self.tensor_parallel_size // config.num_kv_heads)
        count = max(1, config.num_kv_heads // self.tensor_parallel_size)
        start = self.tensor_rank // ranks_each * count
        return range(start, start + count)

    def intermediate(self, config: ModelConfig) -> range:
        return self.part(config.intermediate_size)

    def part(self, size: int) -> range:
        """This rank's part of `size` things that divide evenly."""
        count = size // self.tensor_parallel_size
        return range(self.tensor_rank * count, (self.tensor_rank + 1) * count)

    def vocabulary(self, vocab_size: int) -> range:
        """The token ids whose rows of the embedding and of the output matrix this rank holds; the last ranks may have
        fewer."""
        each = -(-vocab_size // self.tensor_parallel_size)
        return range(min(self.tensor_rank * each, vocab_size), min((self.tensor_rank + 1) * each, vocab_size))


def check_layout(
    config: ModelConfig, tensor_parallel_size: int, pipeline_parallel_size: int, expert_parallel: bool = False
) -> None:
    """Raise ValueError for a model that cannot be cut so, naming the size that does not divide."""
    tp, pp = tensor_parallel_size, pipeline_parallel_size
    if expert_parallel and config.moe is None:
        raise ValueError(f"enable_expert_parallel=True needs experts, and model_type={config.model_type!r} has none")
    for name, count in divided(config, expert_parallel).items():
        if count % tp:
            raise ValueError(
                f"tensor_parallel_size={tp} does not divide this model's {name}={count}; "
                f"use {allowed_sizes(config, expert_parallel=expert_parallel)}, or pipeline_parallel_size"
            )
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size={tp} neither divides this model's num_key_value_heads={config.num_kv_heads} nor is "
            f"a multiple of it; use {allowed_sizes(config)}, or pipeline_parallel_size"
        )
    if not expert_parallel and _in_blocks(config) and tp > (most := config.moe.intermediate_size // BLOCK):
        raise ValueError(
            f"tensor_parallel_size={tp} leaves a rank no part of this model's experts, whose intermediate_size="
            f"{config.moe.intermediate_size} has {most} blocks of {BLOCK}; use at most {most}, or "
            "enable_expert_parallel=True"
        )
    if len(Layout(tp, 1, tp - 1).vocabulary(config.vocab_size)) == 0:
        raise ValueError(f"tensor_parallel_size={tp} leaves a rank no part of the vocabulary of {config.vocab_size}")
    if pp > config.num_layers:
        raise ValueError(
            f"pipeline_parallel_size={pp} exceeds this model's num_hidden_layers={config.num_layers}; "
            f"use at most {config.num_layers}, or tensor_parallel_size"
        )


def divided(config: ModelConfig, expert_parallel: bool = False) -> dict[str, int]:
    """The sizes of a model that the ranks share evenly, by their names in a config.json."""
    sizes, moe = {"num_attention_heads": config.num_heads}, config.moe
    if moe is None or len(moe.layers) < config.num_layers:
        sizes["intermediate_size"] = config.intermediate_size
    if moe is not None:
        if expert_parallel:
            sizes["num_experts"] = moe.num_experts
        elif not _in_blocks(config):
            sizes["moe_intermediate_size"] = moe.intermediate_size
        sizes["shared_expert_intermediate_size"] = moe.shared_intermediate_size
    return sizes


def allowed_sizes(config: ModelConfig, most: int = 16, expert_parallel: bool = False) -> str:
    """The tensor-parallel sizes that a model can be cut into, as text."""
    sizes = [
        tp
        for tp in range(1, most + 1)
        if not any(count % tp for count in divided(config, expert_parallel).values())
        and (not config.num_kv_heads % tp or not tp % config.num_kv_heads)
    ]
    return " or ".join(map(str, sizes))


def local_config(config: ModelConfig, layout: Layout) -> ModelConfig:
    """The shape of the decoder that a rank holds."""
    layers = layout.layers(config.num_layers)
    return replace(
        config,
        num_heads=len(layout.query_heads(config)),
        num_kv_heads=len(layout.kv_heads(config)),
        intermediate_size=len(layout.intermediate(config)),
        vocab_size=len(layout.vocabulary(config.vocab_size)),
        num_layers=len(layers),
        layer_windows=config.layer_windows[layers.start : layers.stop],
        layer_ropes=config.layer_ropes[layers.start : layers.stop],
        moe=config.moe and local_experts(config, layout, layers),
    )


def local_experts(config: ModelConfig, layout: Layout, layers: range) -> MoEConfig:
    """The experts that a rank holds: a part of each, or with expert parallel, some of them."""
    moe, mine = config.moe, layout.part(config.moe.num_experts)
    return replace(
        moe,
        layers=tuple(layer - layers.start for layer in moe.layers if layer in layers),
        intermediate_size=moe.intermediate_size if layout.expert_parallel else len(expert_part(config, layout)),
        shared_intermediate_size=len(layout.part(moe.shared_intermediate_size)),
        held=(mine.start, mine.stop) if layout.expert_parallel else None,
    )


def expert_part(config: ModelConfig, layout: Layout) -> range:
    """A rank's part of the intermediate size of each expert. That of gpt-oss is cut between blocks, which have a scale
    each; the first ranks may have one block more."""
    size, ranks, rank = config.moe.intermediate_size, layout.tensor_parallel_size, layout.tensor_rank
    if not _in_blocks(config):
        return layout.part(size)
    each, more = divmod(size // BLOCK, ranks)
    start = rank * each + min(rank, more)
    return range(start * BLOCK, (start + each + (rank < more)) * BLOCK)


def _in_blocks(config: ModelConfig) -> bool:
    return config.activation == gpt_oss.CLAMPED and not config.moe.intermediate_size % BLOCK


class Cut(NamedTuple):
    """A rank's part of a tensor: its name on the rank, and which part of dimension `dim` it is; None for all of it."""

    name: str
    dim: int = 0
    ranges: tuple[range, ...] | None = None

    def of(self, tensor: Any) -> Tensor:
        """That part of a tensor, or of a tensor in a safetensors file, of which no more is read."""
        if self.ranges is None:
            return tensor[:]
        before = (slice(None),) * self.dim
        parts = [tensor[(*before, slice(one.start, one.stop))] for one in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def cut_of(name: str, config: ModelConfig, layout: Layout) -> Cut | None:
    """A rank's part of the tensor that a checkpoint, or an adapter, calls `name`; None where it has none.

    Names that end in .weight or .bias are those of a checkpoint; others are taken for a weight.
    """
    local, is_here = _local_name(name, config, layout)
    if is_here and (match := EXPERT.search(local)) and layout.expert_parallel:
        mine = layout.part(config.moe.num_experts)
        place = f".experts.{int(match[1]) - mine.start}."
        return Cut(local.replace(match[0], place, 1)) if int(match[1]) in mine else None
    if not is_here:
        return None
    if config.activation == gpt_oss.CLAMPED and (match := gpt_oss.STACKED.fullmatch(name)):
        return _stacked(local, match[2], bool(match[3]), config, layout)
    if FUSED_EXPERTS.search(name):
        raise ValueError(
            f"{name} holds all experts of a layer, of which "
            f"tensor_parallel_size={layout.tensor_parallel_size} would cut each; save the model with its experts "
            "apart, as save_pretrained does"
        )
    is_bias = name.endswith(".bias")
    module = next((part for part in reversed(name.split(".")) if part not in ("weight", "bias")), name)
    dim, heads = config.head_dim, layout.query_heads(config)
    queries, keys = _scaled(heads, dim), _scaled(layout.kv_heads(config), dim)
    width, tokens = _width(name, config), layout.vocabulary(config.vocab_size)
    middle = expert_part(config, layout) if ".experts." in name else layout.part(width)
    rows: dict[str, tuple[range, ...]] = {
        "q_proj": (queries,),
        "k_proj": (keys,),
        "v_proj": (keys,),
        "qkv_proj": (queries, _moved(keys, config.num_heads * dim), _moved(keys, _kv_end(config))),
        "gate_proj": (middle,),
        "up_proj": (middle,),
        "gate_up_proj": (middle, _moved(middle, width)),
        "embed_tokens": (tokens,),
        "lm_head": (tokens,),
        "sinks": (heads,),
    }
    if config.qk_norm_whole:
        rows |= {"q_norm": (queries,), "k_norm": (keys,)}
    attended = queries  # the inputs of o_proj
    if (mla := config.mla) is not None:  # cut by heads; what makes the latent is whole, since all heads read it
        rows["q_proj"] = rows["q_b_proj"] = (_scaled(heads, mla.qk_head_dim),)
        rows["kv_b_proj"], attended = (_scaled(heads, mla.up_head_dim),), _scaled(heads, mla.v_head_dim)
    if module in rows:
        return Cut(local, 0, rows[module])
    if module in ROW_PARALLEL and not is_bias:
        return Cut(local, 1, (attended if module == "o_proj" else middle,))
    return Cut(local)


def _stacked(local: str, matrix: str, is_bias: bool, config: ModelConfig, layout: Layout) -> Cut:
    """Of a tensor with all experts of a layer of gpt-oss, whose gate_up_proj has the columns of both in turn."""
    if layout.expert_parallel:
        return Cut(local, 0, (layout.part(config.moe.num_experts),))
    middle = expert_part(config, layout)
    if matrix == "gate_up_proj":
        return Cut(local, 1 if is_bias else 2, (range(2 * middle.start, 2 * middle.stop),))
    return Cut(local) if is_bias else Cut(local, 1, (middle,))


def _local_name(name: str, config: ModelConfig, layout: Layout) -> tuple[str, bool]:
    """What a rank calls a tensor, and whether it has a part of it."""
    if match := LAYER.fullmatch(name):
        layers = layout.layers(config.num_layers)
        return f"{match[1]}{int(match[2]) - layers.start}{match[3]}", int(match[2]) in layers
    if name.endswith("embed_tokens.weight"):
        return name, layout.is_first or (layout.is_last and config.tie_word_embeddings)
    return name, layout.is_last  # the last norm and the output matrix


def _width(name: str, config: ModelConfig) -> int:
    """The intermediate size of the MLP, expert or shared expert that a tensor is of."""
    if ".shared_expert." in name:
        return config.moe.shared_intermediate_size
    return config.moe.intermediate_size if ".experts." in name else config.intermediate_size


def _scaled(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _moved(one: range, by: int) -> range:
    return range(one.start + by, one.stop + by)


def _kv_end(config: ModelConfig) -> int:
    return (config.num_heads + config.num_kv_heads) * config.head_dim
