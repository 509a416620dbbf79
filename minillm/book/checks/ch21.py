"""Checks of chapter 21: a router, the sorted layout in tiles, grouped matmul, replicas of hot experts.
Built in chapter 21."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.book.checks import Case, Checker, Draw, FunctionChecker
from minillm.book.checks.ch21_oracle import best_largest_load, largest_load

__all__ = ["check_align_rows", "check_grouped_tiles", "check_place_replicas", "check_route_tokens"]


# --- 1: a router with a bias


def routed(
    logits: Tensor,
    bias: Tensor,
    k: int,
    *,
    score: Any = lambda logits: logits.float().sigmoid(),
    choose: Any = lambda scores, bias: scores + bias,
    weigh: Any = lambda scores, bias: scores,
    norm: bool = True,
    ties: int = 1,
    ascending: bool = True,
    refuses: bool = True,
) -> tuple[Tensor, Tensor]:
    """Token by token. The keywords are mistakes."""
    count = logits.shape[1]
    if not 1 <= k <= count and refuses:
        raise ValueError(f"k={k}: from 1 to {count}")
    weights, experts, scores = [], [], score(logits)
    for own, choice in zip(scores, choose(scores, bias).tolist()):
        chosen = sorted(range(count), key=lambda e: (-choice[e], ties * e))[:k]
        chosen = sorted(chosen) if ascending else chosen
        picked = weigh(own, bias)[chosen].double()
        weights.append((picked / picked.sum() if norm else picked).float())
        experts.append(torch.tensor(chosen, dtype=torch.int64))
    if not weights:
        return torch.zeros(0, k), torch.zeros(0, k, dtype=torch.int64)
    return torch.stack(weights), torch.stack(experts)


def _route_edges(draw: Draw) -> list[tuple]:
    plain = torch.zeros(4)
    return [
        (torch.zeros(2, 5), torch.zeros(5), 3),  # all are equal
        (torch.tensor([[0.0, 1.0, 1.0, 1.0]]), plain, 2),  # three are equal
        (torch.tensor([[3.0, -2.0]]), torch.tensor([-1.0, 1.0]), 1),
        (torch.tensor([[3.0, -2.0, 0.5]]), torch.zeros(3), 3),
        (torch.randn(0, 4), plain, 2),  # no token at all
        *((draw.randn(6, 8).to(dtype), torch.zeros(8), 2) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
        (torch.tensor([[-20.0, -21.0, -60.0]]), torch.zeros(3), 2),  # very small scores
        (torch.tensor([[0.5, 0.500001, 0.0]]), torch.zeros(3), 1),  # nearly equal, and not equal
        (torch.tensor([[0.0, 0.01, 3.0]]), torch.tensor([2.0**20, 2.0**20, 0.0]), 1),  # in float32 the sums are equal
        (torch.zeros(1, 4), plain, 0),
        (torch.zeros(1, 4), plain, 5),
    ]


def _random_routes(draw: Draw) -> tuple:
    tokens, experts = draw.randint(1, 9), draw.randint(1, 17)
    logits = 2 * draw.randn(tokens, experts)
    bias = draw.randn(experts) * draw.rng.choice((0.0, 0.5))
    return logits.round() if draw.rng.random() < 0.5 else logits, bias, draw.randint(1, experts + 1)


check_route_tokens = FunctionChecker(
    "route_tokens",
    routed,
    returns=("weights", "experts"),
    examples=[
        (torch.tensor([[1.0, 0.0, 2.0, -1.0]]), torch.zeros(4), 2),
        (torch.tensor([[1.0, 0.0, 2.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 2.0]), 2),
    ],
    edges=_route_edges,
    random=_random_routes,
    raises=(ValueError,),
    rtol=1e-5,
    hint="Choose by score plus bias; weigh by the scores alone, divided by their sum; experts in ascending order.",
    misconceptions={
        "k is from 1 to num_experts: raise ValueError otherwise.": dict(refuses=False),
        "The bias chooses experts; it is not part of their weights.": dict(weigh=lambda scores, bias: scores + bias),
        "Experts are chosen by score plus bias.": dict(choose=lambda scores, bias: scores),
        "A score is the sigmoid of one logit, not a softmax.": dict(score=lambda logits: logits.float().softmax(-1)),
        "The experts of a token stand in ascending order, each with its own weight.": dict(ascending=False),
        "Of experts with equal sums, the smaller indices are chosen.": dict(ties=-1),
        "The weights of a token add up to 1: divide by the sum of the scores of its chosen experts.": dict(norm=False),
        "Compute in float32: .float() comes before the sigmoid.": dict(score=lambda logits: logits.sigmoid().float()),
    },
    forbid=("minillm.model.routing.route",),
)


# --- 2: sorted rows in whole tiles


def aligned(
    experts: Tensor, num_experts: int, tile: int, *, tiles_of: Any = lambda count, tile: -(-count // tile),
    order: int = 1, fill: int = -1, inverted: bool = True, tile_order: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Expert by expert. The keywords are mistakes."""
    flat, rows, tiles = experts.flatten().tolist(), [], []
    for expert in range(num_experts):
        mine = [number for number, other in enumerate(flat) if other == expert][::order]
        count = tiles_of(len(mine), tile)
        rows += mine + [fill] * (count * tile - len(mine))
        tiles += [expert] * count
    real = [(number, place) for place, number in enumerate(rows) if number != fill]
    inverse = [place for _, place in (sorted(real) if inverted else real)]
    return torch.tensor(rows), torch.tensor(tiles[::tile_order], dtype=torch.int64), torch.tensor(inverse)


def _random_choices(draw: Draw) -> tuple:
    num_experts, tokens = draw.randint(1, 9), draw.randint(1, 20)
    k = draw.randint(1, num_experts + 1)
    experts = [draw.rng.sample(range(num_experts), k) for _ in range(tokens)]
    return torch.tensor(experts), num_experts, draw.rng.choice((1, 2, 3, 4, 8))


check_align_rows = FunctionChecker(
    "align_rows",
    aligned,
    returns=("rows", "tiles", "inverse"),
    examples=[(torch.tensor([[2, 0], [2, 1], [0, 2]]), 3, 2)],
    edges=[
        (torch.tensor([[3], [3]]), 5, 4),  # experts without rows have no tile
        (torch.tensor([[0], [0], [0]]), 1, 3),  # one tile that is exactly full
        (torch.tensor([[1, 0, 2]]), 3, 1),  # tiles of one row have no padding
        (torch.tensor([[1], [0], [1], [0], [1]]), 2, 2),
        (torch.tensor([[0, 1]] * 4), 2, 64),  # tiles larger than the batch
    ],
    random=_random_choices,
    hint="The assignments of an expert are in ascending order, and -1 stands only at the end of its last tile.",
    misconceptions={
        "An expert without assignments has no tile.": dict(tiles_of=lambda count, tile: max(1, -(-count // tile))),
        "An expert whose rows fill whole tiles has no padding.":
            dict(tiles_of=lambda count, tile: count // tile + (count > 0)),
        "The assignments of one expert stand in ascending order: sort with stable=True.": dict(order=-1),
        "The padding is -1.": dict(fill=-2),
        "The inverse has the index in rows of each assignment, in their order: inverse[order] = places.":
            dict(inverted=False),
        "The tiles are in the order of the rows.": dict(tile_order=-1),
    },
    forbid=tuple(f"minillm.kernels.grouped_matmul.{name}" for name in ("sort_by_expert", "SortedRows")),
)  # fmt: skip


# --- 3: a grouped product


def grouped(
    x: Tensor, weight: Tensor, rows: Tensor, tiles: Tensor, k: int, *,
    token_of: Any = lambda number, k: number // k, padding: bool = False, expert: Any = int,
) -> Tensor:  # fmt: skip
    """Row by row, in float64. The keywords are mistakes."""
    tile = len(rows) // len(tiles)
    out = torch.zeros(len(rows), weight.shape[1], dtype=torch.float64)
    for place, number in enumerate(rows.tolist()):
        if number >= 0 or padding:
            token = min(token_of(number, k), len(x) - 1)
            out[place] = weight[expert(tiles[place // tile])].double() @ x[token].double()
    return out.float()


def _product(draw: Draw, experts: list[list[int]], num_experts: int, tile: int, inputs: int, outputs: int) -> tuple:
    rows, tiles, _ = aligned(torch.tensor(experts), num_experts, tile)
    x, weight = draw.randn(len(experts), inputs), draw.randn(num_experts, outputs, inputs)
    return x, weight, rows, tiles, len(experts[0])


def _random_product(draw: Draw) -> tuple:
    experts, num_experts, _ = _random_choices(draw)
    sizes = draw.rng.choice((1, 2, 4)), draw.randint(1, 9), draw.randint(1, 9)
    return _product(draw, experts.tolist(), num_experts, *sizes)


def _grouped_edges(draw: Draw) -> list[tuple]:
    many = [draw.rng.sample(range(4), 2) for _ in range(3000)]
    return [
        _product(draw, [[1]], 3, 4, 5, 2),  # one row, three of padding
        _product(draw, [[0], [0], [2], [2]], 3, 1, 3, 4),  # an expert without rows; tiles of one row
        _product(draw, [[1, 0]] * 5, 2, 8, 6, 6),
        _product(draw, many, 4, 64, 8, 8),
    ]


class _Operations(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class _Taken(TorchFunctionMode):
    """Counts the numbers that are taken out of tensors, to loop over them in Python or NumPy."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("tolist", "numpy", "item", "__array__", "__dlpack__", "__iter__"):
            self.count += args[0].numel()
        return function(*args, **(kwargs or {}))


def _without_loops(case: Case, got: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> None:
    """Asks again, and counts."""
    operations, taken = _Operations(), _Taken()
    with operations, taken:
        case.student(x, weight, *rest)
    most = 60 + 8 * len(weight)
    told = f"for {len(x)} tokens and {len(weight)} experts; allowed are {most}"
    case.true(operations.count <= most, f"{operations.count} operations of torch {told}",
              hint="Gather all rows at once, and multiply all tiles, or all rows of an expert, at once.")  # fmt: skip
    case.true(taken.count <= most, f"{taken.count} numbers are taken out of tensors {told}",
              hint="A loop in Python or NumPy is a loop all the same: compute with whole tensors.")  # fmt: skip


check_grouped_tiles = FunctionChecker(
    "grouped_tiles",
    grouped,
    examples=lambda draw: [_product(draw, [[2, 0], [2, 1], [0, 2]], 3, 2, 4, 3)],
    edges=_grouped_edges,
    random=_random_product,
    trials=20,
    also=_without_loops,
    atol=1e-4,
    rtol=1e-5,
    hint="Row i belongs to token rows[i] // k and to the expert of tile i // tile; a row of -1 is zero.",
    misconceptions={
        "Where rows[i] is -1 the row is zero: the index -1 gathers the last token.": dict(padding=True),
        "Row i belongs to token rows[i] // k: rows holds assignments.": dict(token_of=lambda number, k: number),
        "Each tile has the expert that tiles names.": dict(expert=lambda expert: 0),
    },
    forbid=tuple(f"minillm.kernels.grouped_matmul.{name}" for name in ("grouped_matmul", "torch_grouped_matmul")),
)


# --- 4: replicas of hot experts

check_place_replicas = Checker(
    "place_replicas",
    hint="What counts is the largest load of a rank, with the load of an expert shared evenly by its copies.",
    forbid=tuple(f"minillm.parallel.placement.{name}" for name in ("place_experts", "count_copies", "even_placement")),
)


@check_place_replicas.part("example")
def _place_example(case: Case) -> None:
    _places(case, [70, 10, 10, 10], 2, 3)
    _places(case, [8, 7, 6, 5], 2, 2)  # no room for copies


@check_place_replicas.part("edges")
def _place_edges(case: Case) -> None:
    _places(case, [1, 1, 1], 1, 3)
    _places(case, [5, 1], 2, 2)  # room for everything everywhere
    _places(case, [0, 0, 0, 0], 2, 3)
    _places(case, [9, 0, 0], 3, 1)
    _places(case, [12, 12, 1, 1], 2, 3)
    case.raises(ValueError, case.student, [1, 1, 1], 1, 2, hint="One rank of two cannot hold three experts.")
    case.raises(
        ValueError, case.student, [1, 1], 2, 3, hint="A rank cannot hold three different experts where there are two."
    )


@check_place_replicas.part("random")
def _place_random(case: Case) -> None:
    for _ in range(12):
        ranks, each = case.rng.choice(((2, 4), (3, 3), (3, 4), (4, 2)))
        count = case.randint(each + 1, min(ranks * each - 1, 7) + 1)
        _places(case, [int(100 * case.rng.paretovariate(1.0)) for _ in range(count)], ranks, each)


def _places(case: Case, load: list[float], ranks: int, each: int) -> None:
    got = case.call(load, ranks, each)
    case.is_a(got, list, "the placement", of=list)
    case.true(len(got) == ranks, f"the placement has {len(got)} lists for {ranks} ranks")
    for rank, held in enumerate(got):
        case.is_a(held, list, f"rank {rank}", of=int)
        case.true(
            len(held) == len(set(held)) == each and all(0 <= expert < len(load) for expert in held),
            f"rank {rank} holds {held}; it must hold {each} different experts of {len(load)}",
        )
    missing = set(range(len(load))) - {expert for held in got for expert in held}
    case.true(
        not missing, f"no rank holds expert {min(missing, default=0)}", hint="Every expert is on at least one rank."
    )
    best, found = best_largest_load(tuple(load), ranks, each), largest_load(load, got)
    case.true(
        found <= 1.1 * best + 1e-9,
        f"the largest load of a rank is {found:g} for loads {load} on {ranks} ranks of {each}; {best:g} is possible",
        hint="Within 10% of the best is enough.",
    )
