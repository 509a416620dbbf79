"""Expert parallel: each rank holds some experts, and tokens travel to them and back. Built in chapter 21.

    rank 0   tokens a b        experts 0 1           each token chooses experts 0 and 3
    rank 1   tokens c d        experts 2 3

    dispatch   rank 0 sends a, b to rank 1           an all-to-all: each rank sends each other rank the rows for its
               rank 1 sends c, d to rank 0           experts, and how many they are
    compute    rank 0: expert 0 of a b c d           rank 1: expert 3 of a b c d
    combine    the results go back the same way, and each rank sums up those of its own tokens

Each rank has tokens of its own, as with attention that is data parallel. A row's result has the same bits on every rank
and the sum has the order of the token's choices, so that a rank's result is that of one process to the last bit. An
expert with copies on several ranks takes its tokens in turns.

A shared expert is whole on each rank here. All tokens use it, so the arithmetic of a rank would be the same if it were
cut, but every token would have to reach every rank (`shared_expert_cost`): n - 1 rows there and n - 1 back, where a
token of DeepSeek-V3 sends at most 8 rows to its routed experts. vLLM (0.32.0, `DeepseekV2MLP`, disable_tp) and SGLang
(`deepseek_v2.py`, tp_size=1) keep it whole too. The cost is memory: 58 layers of 44 M weights in DeepSeek-V3.
`ParallelExperts`, whose ranks all have the same tokens, cuts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minillm.kernels.grouped_matmul import SortedRows, sort_by_expert
from minillm.model.moe import ExpertProducts, MixtureOfExperts
from minillm.model.moe_config import MoEConfig
from minillm.parallel.communicator import Communicator
from minillm.parallel.placement import Placement, even_placement

if TYPE_CHECKING:
    from minillm.kernels.lora import TokenSlots


@dataclass
class ExpertTraffic:
    """What one rank has sent to other ranks: rows of hidden states, and bytes of all kinds."""

    rows: int = 0
    bytes: int = 0


class ExpertParallel:
    """The experts of one layer over the ranks of `group` (None: the default group), as `mlp` computes them alone.

    `mlp` is prepared; of its experts, this rank uses those that `placement` gives it, evenly where it is None.
    All ranks call it at the same time, each with its own tokens, of which it may have none. Raises ValueError for a
    placement of another number of ranks or experts.
    """

    def __init__(
        self, mlp: MixtureOfExperts, placement: Placement | None = None, group: dist.ProcessGroup | None = None
    ):
        self.mlp, self.group, self.traffic = mlp, group, ExpertTraffic()
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        num_experts = len(mlp.experts)
        self.placement = placement or even_placement(num_experts, self.world_size)
        if len(self.placement.ranks) != self.world_size or self.placement.num_experts != num_experts:
            raise ValueError(
                f"a placement of {self.placement.num_experts} experts on {len(self.placement.ranks)} ranks does not "
                f"fit {num_experts} experts on {self.world_size} ranks"
            )
        held = self.placement.ranks[self.rank]
        self.products = ExpertProducts([mlp.experts[expert] for expert in held])
        self.products.prepare()
        self.local_ids = torch.full((num_experts,), -1)
        self.local_ids[list(held)] = torch.arange(len(held))
        self.turns = [torch.tensor(hosts) for hosts in self.placement.hosts]

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] in and out: this rank's tokens."""
        weights, experts = self.mlp.choose(x)
        rows = sort_by_expert(self.ranks_of(experts), self.world_size)
        made = self.exchange(x[rows.tokens], experts.flatten()[rows.order], rows)
        out = rows.combine(made, weights)
        return out if self.mlp.shared_expert is None else out + self.mlp.shared(x)

    def ranks_of(self, experts: Tensor) -> Tensor:
        """The rank that each choice goes to, of the shape of `experts`; copies of an expert take turns."""
        flat = experts.flatten()
        turn = torch.arange(len(flat), device=flat.device) + self.rank  # ranks begin at different copies
        ranks = torch.zeros_like(flat)
        for expert, hosts in enumerate(self.turns):
            mine = flat == expert
            ranks[mine] = hosts.to(flat.device)[turn[mine] % len(hosts)]
        return ranks.view(experts.shape)

    def exchange(self, gathered: Tensor, experts: Tensor, rows: SortedRows) -> Tensor:
        """What the experts make of rows that are sorted by the rank they go to: [num_rows, hidden_size]."""
        sends = rows.offsets.diff()
        receives = self._all_to_all(sends, None, None)
        sizes = receives.tolist(), sends.tolist()
        arrived = self._all_to_all(gathered, *sizes)
        ids = self.local_ids.to(experts.device)[self._all_to_all(experts, *sizes)]
        weights = torch.ones(len(ids), 1, device=ids.device)
        made = self.products(arrived, weights, ids[:, None]) if len(ids) else arrived
        self.traffic.rows += sum(sizes[1]) - sizes[1][self.rank]
        return self._all_to_all(made, sizes[1], sizes[0])

    def _all_to_all(self, tensor: Tensor, receives: Sequence[int] | None, sends: Sequence[int] | None) -> Tensor:
        """Rows of `tensor` to each rank in turn, `sends` of them; back come `receives` from each."""
        shape = tensor.shape if receives is None else (sum(receives), *tensor.shape[1:])
        arrived = tensor.new_empty(shape)
        dist.all_to_all_single(arrived, tensor.contiguous(), receives, sends, group=self.group)
        to_others = len(tensor) * (self.world_size - 1) // self.world_size
        if sends is not None:
            to_others = sum(sends) - sends[self.rank]
        self.traffic.bytes += to_others * tensor[:1].nbytes if len(tensor) else 0
        return arrived


class ParallelExperts(MixtureOfExperts):
    """The experts of a layer between ranks that all have the same tokens, as with tensor parallel attention.

    A rank has a part of every expert (tensor parallel), or some experts whole (expert parallel), and a part of the
    shared one. Either way it makes a part of each token's sum, and one all-reduce adds the parts up. Of experts with
    biases, the first rank adds those behind a sum that is cut.
    """

    communicator: Communicator

    @classmethod
    def of(cls, mlp: MixtureOfExperts, communicator: Communicator) -> Self:
        """The same weights, which it takes over from `mlp`."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.__dict__.update(mlp.__dict__)
        made.communicator = communicator
        return made

    def drop_biases(self) -> None:
        """Of sums of which this rank, which is not the first one, makes a part; whole experts keep theirs."""
        for place, linear in self.linears().items():
            if place.endswith("down_proj") and (self.moe.held is None or not place.startswith("experts.")):
                linear.bias = None

    def forward(self, x: Tensor, token_slots: TokenSlots | None = None) -> Tensor:
        """[num_tokens, hidden_size] in and out, the same on each rank."""
        weights, experts = self.choose(x)
        out = self.products(x, weights, experts) if self.moe.held is None else self._of_mine(x, weights, experts)
        if self.shared_expert is not None:
            out = out + self.shared(x, token_slots)
        return self.communicator.all_reduce(out)

    def _of_mine(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """What this rank's experts add to each token: zeros where none of them was chosen."""
        first, end = self.moe.held
        mine = (experts >= first) & (experts < end)
        tokens, out = mine.nonzero()[:, 0], torch.zeros_like(x)
        if len(tokens):
            made = self.products(x[tokens], weights[mine][:, None], experts[mine][:, None] - first)
            out.index_add_(0, tokens, made)
        return out


def shared_expert_cost(
    moe: MoEConfig, hidden_size: int, itemsize: int, tokens: Sequence[int], rank: int, is_cut: bool
) -> tuple[int, int]:
    """The bytes that `rank` holds of a layer's shared expert, and those that it sends in a step, where rank r has
    `tokens[r]` tokens of its own. Whole, it sends nothing. Cut by columns and rows, it sends its tokens to all other
    ranks, and to each of them its part of the sums for their tokens."""
    weights, row = 3 * hidden_size * moe.shared_intermediate_size * itemsize, hidden_size * itemsize
    if not is_cut:
        return weights, 0
    others = len(tokens) - 1
    return weights // len(tokens), row * (others * tokens[rank] + sum(tokens) - tokens[rank])


def dispatch_bytes(rows_sent: int, rows_computed_for_others: int, hidden_size: int, itemsize: int, ranks: int) -> int:
    """The bytes that one rank sends in a layer: its rows and their experts' numbers, the results of the rows that
    others sent, and the counts."""
    row = hidden_size * itemsize
    return rows_sent * (row + 8) + rows_computed_for_others * row + (ranks - 1) * 8
