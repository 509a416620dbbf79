"""Training a mixture of experts: Mixtral's layer as modules, and a loss that balances it. Built in chapter 21.

`tinyworld-moe` is a Mixtral of 8 experts, 2 of which a token uses. A run begins with the weights of `tinyworld`
(`minillm.training.upcycle`), and so does the dense model that it is compared with, `tinyworld-active`, whose MLP is as
wide as two experts.

A router left to itself sends most tokens to few experts. The load-balancing loss (Fedus et al., 2021,
arXiv:2101.03961) is num_experts * sum of (share of the tokens) * (mean probability), which is 1 where all experts are
used alike, and larger elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaForCausalLM, MixtralConfig

from ..kernels.grouped_matmul import sort_by_expert
from .config import TrainingConfig, llama_config
from .upcycle import start


class Expert(nn.Module):
    """down(silu(gate(x)) * up(x)), with Mixtral's names."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, intermediate_size, bias=False)  # gate
        self.w2 = nn.Linear(intermediate_size, hidden_size, bias=False)  # down
        self.w3 = nn.Linear(hidden_size, intermediate_size, bias=False)  # up

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

    @torch.no_grad()
    def fill(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        for linear, weight in ((self.w1, gate), (self.w3, up), (self.w2, down)):
            linear.weight.copy_(weight)


class Experts(nn.Module):
    """Mixtral's layer as modules that can be trained; `balance` is the load-balancing loss of the last pass."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.each, self.balance = config.num_experts_per_tok, torch.zeros(())
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        nn.init.normal_(self.gate.weight, std=0.02)
        self.experts = nn.ModuleList(Expert(*sizes) for _ in range(config.num_experts))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] in and out."""
        x = hidden.flatten(0, -2)
        probabilities = self.gate(x).float().softmax(-1)
        weights, chosen = probabilities.topk(self.each, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        rows = sort_by_expert(chosen, len(self.experts))
        counts = rows.offsets.diff()
        made = [expert(part) for expert, part in zip(self.experts, x[rows.tokens].split(counts.tolist()))]
        share = counts / len(rows.order)
        self.balance = len(self.experts) * (share * probabilities.mean(0)).sum()
        return rows.combine(torch.cat(made), weights).to(hidden.dtype).view(hidden.shape)


def build_model(config: TrainingConfig, tokenizer: Tokenizer, sample: Callable[[], Tensor]) -> LlamaForCausalLM:
    """A Llama, its MLPs replaced by experts where `config` has them, with the weights that the run begins with.

    `sample` gives tokens [rows, length] to look at. Raises ValueError for a model to start from that has other sizes.
    """
    model = LlamaForCausalLM(llama_config(config, tokenizer))
    for layer in model.model.layers if config.num_experts else ():
        layer.mlp = Experts(config)
    if config.start_from is not None:
        start(model, config, sample())
    return model


def balance_loss(model: LlamaForCausalLM, config: TrainingConfig) -> Tensor | float:
    """The load-balancing loss of the last pass, the mean of all layers, times its weight; 0 without experts."""
    losses = [layer.mlp.balance for layer in model.model.layers if isinstance(layer.mlp, Experts)]
    return config.balance * torch.stack(losses).mean() if losses else 0.0


def save_mixtral(model: LlamaForCausalLM, config: TrainingConfig, out: Path) -> None:
    """The model as a folder of Mixtral, in bf16."""
    raw = {key: value for key, value in model.config.to_dict().items() if key in KEPT}
    settings = MixtralConfig(
        **raw | {"use_cache": True},
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        router_aux_loss_coef=config.balance,
        architectures=["MixtralForCausalLM"],
        dtype="bfloat16",
    )
    settings.save_pretrained(out)
    GenerationConfig(bos_token_id=settings.bos_token_id, eos_token_id=settings.eos_token_id).save_pretrained(out)
    tensors = {
        name.replace(".mlp.", ".block_sparse_moe."): tensor.to(torch.bfloat16).cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # the embedding
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)
