"""The first weights of a mixture of experts: those of a dense model, its neurons shared out. Built in chapter 21.

A neuron of an MLP is a row of gate, a row of up and a column of down. On a sample of text we look at what each neuron
contributes to each token (the size of its activation times the norm of its column):

    core      the strongest neurons: each expert has all of them
    groups    the others, in as many groups as experts, so that neurons that are active together are together

A token adds up two experts with weights of about one half. So core columns of `down` stay as they are, and those of the
groups are doubled: the token gets the core and two groups of the dense MLP. The router begins as the linear map that
predicts best, from the input of the MLP, which groups contribute most. (Upcycling: Komatsuzaki et al., 2022,
arXiv:2212.05055; experts of neurons that are active together: Zhang et al., 2022, arXiv:2110.01786.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from .. import zoo
from .config import TrainingConfig

Neurons = tuple[Tensor, Tensor, Tensor]  # rows of gate and of up [count, hidden_size], columns of down [hidden, count]
ROUNDS = 10  # of grouping
LOGITS = 0.5  # the standard deviation of the router's first logits: weights near one half


@torch.no_grad()
def start(model: LlamaForCausalLM, config: TrainingConfig, tokens: Tensor) -> None:
    """Give `model` the weights of the bundled model that `config` starts from; `tokens` [rows, length] are the sample.

    A dense `model` with a smaller MLP gets the strongest neurons. Raises ValueError where other sizes do not fit.
    """
    base = AutoModelForCausalLM.from_pretrained(zoo.bundled()[config.start_from], dtype=torch.float32)
    state, taken = model.state_dict(), base.state_dict()
    for name, weight in taken.items():
        if ".mlp." not in name:
            if name not in state or state[name].shape != weight.shape:
                raise ValueError(f"start_from={config.start_from!r} has {name} {list(weight.shape)}, this run has not")
            state[name].copy_(weight)
    generator = torch.Generator().manual_seed(config.seed)
    for layer, theirs, x in zip(model.model.layers, base.model.layers, mlp_inputs(base, tokens)):
        neurons = theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight, theirs.mlp.down_proj.weight
        contributions = contributed(x, neurons)
        if config.num_experts:
            share_out(layer.mlp, x, contributions, neurons, generator)
        else:
            kept = strength(neurons).topk(config.intermediate_size).indices
            layer.mlp.gate_proj.weight.copy_(neurons[0][kept])
            layer.mlp.up_proj.weight.copy_(neurons[1][kept])
            layer.mlp.down_proj.weight.copy_(neurons[2][:, kept])


def mlp_inputs(model: LlamaForCausalLM, tokens: Tensor) -> list[Tensor]:
    """What each layer's MLP reads, [num_tokens, hidden_size]."""
    seen: list[Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].flatten(0, -2)))
        for layer in model.model.layers
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def strength(neurons: Neurons) -> Tensor:
    """By which the core is chosen, [count]: the product of the norms of a neuron's rows and column."""
    gate, up, down = neurons
    return gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)


def contributed(x: Tensor, neurons: Neurons) -> Tensor:
    """How much each neuron adds for each token: [num_tokens, count]."""
    gate, up, down = neurons
    return (F.silu(F.linear(x, gate)) * F.linear(x, up)).abs() * down.norm(dim=0)


def share_out(mlp, x: Tensor, contributions: Tensor, neurons: Neurons, generator: torch.Generator) -> None:
    """Fill the experts and the router of `mlp` (`minillm.training.moe.Experts`)."""
    gate, up, down = neurons
    count, size, num_experts = len(gate), mlp.experts[0].w1.out_features, len(mlp.experts)
    each = (count - size) // (num_experts - 1)  # so that the core and all groups are nearly all neurons
    if not 0 < each <= size:
        raise ValueError(f"{num_experts} experts of {size} do not cover {count} neurons; allowed: "
                         f"{count // num_experts} to {count - num_experts + 1} neurons an expert")  # fmt: skip
    order = strength(neurons).argsort(descending=True)
    core, rest = order[: size - each], order[size - each :][: num_experts * each]
    groups = [rest[group] for group in balanced_groups(contributions[:, rest], num_experts, generator)]
    for expert, group in zip(mlp.experts, groups):
        mine = torch.cat([core, group])
        scale = torch.cat([torch.ones(len(core)), torch.full((len(group),), 2.0)])
        expert.fill(gate[mine], up[mine], down[:, mine] * scale)
    wanted = torch.stack([contributions[:, group].sum(1) for group in groups], dim=1)  # [num_tokens, num_experts]
    wanted = (wanted - wanted.mean(0)) / wanted.std(0)
    square = x.t() @ x / len(x)
    router = torch.linalg.solve(square + 1e-3 * square.trace() / len(square) * torch.eye(len(square)), x.t() @ wanted)
    mlp.gate.weight.copy_(router.t() * LOGITS / (x @ router).std())


def balanced_groups(contributions: Tensor, num_groups: int, generator: torch.Generator) -> list[Tensor]:
    """Groups of equal size of the columns that are large on the same rows: k-means with room for so many in each."""
    columns = F.normalize(contributions - contributions.mean(0), dim=0)  # [num_tokens, count]
    count = columns.shape[1]
    centres = columns[:, torch.randperm(count, generator=generator)[:num_groups]]
    for _ in range(ROUNDS):
        likeness = columns.t() @ F.normalize(centres, dim=0)  # [count, num_groups]
        group_of, room = torch.full((count,), -1), [count // num_groups] * num_groups
        for place in likeness.flatten().argsort(descending=True).tolist():
            column, group = divmod(place, num_groups)
            if group_of[column] < 0 and room[group]:
                group_of[column] = group
                room[group] -= 1
        centres = torch.stack([columns[:, group_of == group].mean(1) for group in range(num_groups)], dim=1)
    return [(group_of == group).nonzero().flatten() for group in range(num_groups)]
