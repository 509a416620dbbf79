"""Questions of chapter 21, mixture of experts."""

from __future__ import annotations

import math

import torch

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of, rows_of
from minillm.model.moe_config import MoEConfig
from minillm.model.routing import route
from minillm.parallel.expert import dispatch_bytes
from minillm.parallel.placement import Placement

BANK = Bank()


def _unshared(placement: Placement, load: list[int]) -> float:
    loads = [sum(load[expert] for expert in rank) for rank in placement.ranks]
    return max(loads) / (sum(load) / len(loads))


@BANK.computed(
    21,
    "predict how many experts a step reads",
    title="Experts that a step reads",
    minutes=5,
    unit="experts",
    tolerance=0.01,
    within=(10, 99),
    rubric=(("the chance that a token misses an expert"), "that all miss it", "the experts read"),
)
def experts_read(draw: Draw) -> Variant:
    def read(drawn: tuple[int, ...]) -> float:
        experts, k, tokens = drawn
        return experts * (1 - (1 - k / experts) ** tokens)

    experts, k, tokens = drawn = draw.until(
        lambda: (draw.of(32, 64, 96, 128), draw.of(2, 4, 6, 8), draw.number(6, 32)), lambda d: 12 < read(d) < 0.9 * d[0]
    )
    return Variant(
        f"A layer has {experts} experts, and each token uses {k}, independently of other tokens and evenly. How many "
        f"experts does a step of {tokens} tokens read on average?",
        read(drawn),
        (
            f"A token misses an expert with probability 1 − {k}/{experts} = {1 - k / experts:.4f}.",
            f"All {tokens} miss it with ${1 - k / experts:.4f}^{{{tokens}}} = {(1 - k / experts) ** tokens:.4f}$.",
            f"{experts} · (1 − {(1 - k / experts) ** tokens:.4f}) = {read(drawn):.2f}.",
        ),
        {
            "several tokens use the same expert": float(k * tokens),
            "these are the experts that are not read": experts - read(drawn),
        },
    )


@BANK.computed(
    21,
    "route tokens to experts",
    title="Weights of a router",
    minutes=5,
    tolerance=0.01,
    within=(0.5, 0.95),
    rubric=("the two best experts", "a softmax", "renormalises over the chosen"),
)
def router_weight(draw: Draw) -> Variant:
    def best(logits: list[float], renormalised: bool = True) -> float:
        moe = MoEConfig(
            num_experts=4, num_experts_per_tok=2, intermediate_size=8, layers=(0,), norm_topk_prob=renormalised
        )
        return float(route(torch.tensor([logits]), moe)[0][0].max())

    logits = draw.until(
        lambda: [n / 10 for n in draw.numbers(4, 2, 29)],
        lambda n: 0.55 < best(n) < 0.88 and best(n) - best(n, False) > 0.05,
    )
    top = sorted(logits, reverse=True)
    return Variant(
        f"A router gives a token the logits {each_of(logits)} for four experts. It takes a softmax over all, uses the "
        "two best experts, and renormalises their weights. What is the weight of the best one?",
        best(logits),
        (
            f"The two best: {top[0]} and {top[1]}.",
            f"Their exponentials: {math.exp(top[0]):.3f} and {math.exp(top[1]):.3f}; the rest of the softmax cancels.",
            f"{math.exp(top[0]):.3f} / {math.exp(top[0]) + math.exp(top[1]):.3f} = {best(logits):.3f}.",
        ),
        {
            "the chosen weights are renormalised": best(logits, False),
            "weights are exponentials": top[0] / (top[0] + top[1]),
        },
    )


@BANK.computed(
    21,
    "count the bytes",
    title="Bytes of a dispatch",
    minutes=6,
    unit="bytes",
    within=(1e5, 9.9e5),
    rubric=("rows that leave the rank", "their bytes, with the expert's number", "results that go back", "the bytes"),
)
def moe_bytes(draw: Draw) -> Variant:
    def sent(drawn: tuple[int, ...]) -> int:
        tokens, k, hidden, others = drawn
        return dispatch_bytes(tokens * k, others, hidden, 2, 4)

    tokens, k, hidden, others = drawn = draw.until(
        lambda: (draw.number(12, 32), draw.of(2, 4), draw.number(1024, 4096, 512), draw.number(20, 90)),
        lambda d: 1.5e5 < sent(d) < 9e5,
    )
    return Variant(
        f"Experts are spread over 4 ranks. In a layer, {tokens} tokens of one rank each need {k} experts of other "
        f"ranks, and it computes {others} rows for others. A row has {hidden} numbers of 2 bytes; with a dispatched "
        "row goes its expert's number, 8 bytes. Beside the rows a rank tells each of the others a count of 8 bytes. "
        "How many bytes does this rank send in this layer?",
        sent(drawn),
        (
            (
                f"Rows that leave: {tokens} · {k} = {tokens * k}, {2 * hidden + 8} bytes each: "
                f"{tokens * k * (2 * hidden + 8):,}."
            ),
            f"Results that go back: {others} · {2 * hidden} = {others * 2 * hidden:,}.",
            "Counts: 3 · 8 = 24.",
            f"Together {sent(drawn):,} bytes.",
        ),
        {
            "results go back, too": dispatch_bytes(tokens * k, 0, hidden, 2, 4),
            "a token has a row for each of its experts": dispatch_bytes(tokens, others, hidden, 2, 4),
        },
    )


@BANK.computed(
    21,
    "measure imbalance",
    title="Imbalance with copies",
    minutes=6,
    tolerance=0.01,
    within=(1.05, 2.5),
    rubric=("shares the load of copies", "loads of the ranks", "the largest over the mean"),
)
def imbalance(draw: Draw) -> Variant:
    placement = Placement(((0, 1), (0, 2), (3, 4), (1, 5)))
    load = draw.until(
        lambda: draw.numbers(6, 11, 99),
        lambda n: (
            1.1 < placement.imbalance(n) < 2.2
            and n[0] > 60
            and abs(placement.imbalance(n) - _unshared(placement, n)) > 0.05
        ),
    )
    loads = placement.loads(load)
    table = rows_of(["expert", *range(6)], [["load", *load]])
    return Variant(
        f"The experts of a layer have these loads:\n\n{table}\n\nRank 0 holds experts 0 and 1, rank 1 holds 0 and 2, "
        "rank 2 holds 3 and 4, rank 3 holds 1 and 5; copies share an expert's load evenly. What is the imbalance, the "
        "largest load of a rank over the mean?",
        placement.imbalance(load),
        (
            f"Loads: {each_of(f'{one:g}' for one in loads)}.",
            f"Mean: {sum(load)} / 4 = {sum(load) / 4:g}.",
            f"{max(loads):g} / {sum(load) / 4:g} = {placement.imbalance(load):.3f}.",
        ),
        {"copies share the load": _unshared(placement, load)},
    )


@BANK.code(21, "sort tokens by expert", title="Sorted rows", minutes=15)
def sorted_rows(draw: Draw) -> CodeVariant:
    order = draw.of("in the order of the tokens", "the last token first")
    drop = draw.of("are left out", "come at the end")
    body = '''
def sorted_rows(experts: list[list[int]], num_experts: int) -> list[tuple[int, int]]:
    """(token, expert) of every row, sorted by expert; experts[t] are the experts of token t, -1 for none."""
    rows = [(token, expert) for token, chosen in enumerate(experts) for expert in chosen]
    rows.sort(key=lambda row: (row[1] if row[1] >= 0 else num_experts, SIGNrow[0]))
    return [row for row in rows if KEEP]
'''
    make = lambda backwards, keep: body.replace("SIGN", "-" if backwards else "").replace(
        "KEEP", "True" if keep else "row[1] >= 0"
    )
    backwards, keep = order.startswith("the last"), drop.startswith("come")

    def call(rng):
        experts = rng.randint(1, 5)
        return [[rng.randint(-1, experts - 1) for _ in range(2)] for _ in range(rng.randint(0, 5))], experts

    return CodeVariant(
        "`experts[t]` lists the experts of token `t`; -1 stands for none. Write `sorted_rows(experts, num_experts)`: "
        f"the pairs (token, expert), sorted by expert; rows of the same expert **{order}**. Rows with -1 **{drop}**, "
        "in the same order. A token that names an expert twice has two rows.",
        make(backwards, keep),
        (([[1, 0], [0, 2], [1, -1]], 3),),
        (([], 2), ([[-1, -1]], 2), ([[0, 0], [0, 0]], 1), ([[1, 1], [0, -1]], 2)),
        call,
        f"rows of an expert {order}; rows with -1 {drop}",
        {
            make(not backwards, keep): ("rows of an expert stand in the other order"),
            make(backwards, not keep): "the rule for -1",
            make(backwards, keep)
            .replace(("if row[1] >= 0 else num_experts"), "if row[1] >= 0 else -1")
            .replace("row[1] >= 0]", "row[1] > 0]"): "expert 0 is an expert",
        },
    )


BANK.written(
    21,
    "slower than a dense model",
    "Sparse at batch 16",
    "A mixture of experts uses a quarter of its weights for each token, and yet a decode step of 32 requests takes "
    "almost as long as a dense model with all the weights. Why? For which batch sizes is it fast?",
    "Different tokens choose different experts, so a step of 32 reads nearly all of them, and decoding is bound by "
    "reading weights. It is fast for one or a few tokens, which read few experts, and for batches so large that the "
    "arithmetic decides.",
    rubric=(
        "tokens choose different experts",
        "nearly all experts are read",
        "decoding takes the time of its bytes",
        "small and very large batches gain",
    ),
)
