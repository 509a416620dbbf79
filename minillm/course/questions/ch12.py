"""Questions of chapter 12, FlashAttention."""

from __future__ import annotations

import math

import torch

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of
from minillm.rounding import ceil_div

BANK = Bank()


@BANK.computed(
    12,
    "compute a softmax from pieces",
    title="Two softmax states",
    minutes=7,
    tolerance=0.02,
    within=(2, 18),
    rubric=("the common maximum", "rescales both sums", "rescales and adds the outputs", "the result"),
)
def merged_state(draw: Draw) -> Variant:
    def merge(drawn: tuple, rescale: bool = True) -> float:
        maxima, sums, outputs = (torch.tensor(part, dtype=torch.float64) for part in drawn)
        weights = sums * (maxima - maxima.max()).exp() if rescale else sums
        return float((weights / weights.sum() * outputs).sum())

    def make() -> tuple:
        pair = lambda low, high: tuple(n / 10 for n in draw.numbers(2, low, high))
        return pair(11, 39), pair(11, 49), pair(21, 169)

    drawn = draw.until(make, lambda d: 2.5 < merge(d) < 16 and abs(d[0][0] - d[0][1]) > 0.6
                       and abs(merge(d) - merge(d, False)) > 0.1 * merge(d))  # fmt: skip
    (m1, m2), (l1, l2), (o1, o2) = drawn
    top = max(m1, m2)
    f1, f2 = math.exp(m1 - top), math.exp(m2 - top)
    return Variant(
        f"The keys of a query were attended to in two pieces. Piece 1 has the largest score $m = {m1}$, the sum $l = "
        f"{l1}$ of $e^{{s - m}}$ over its keys, and the output $o = {o1}$ (one number, already divided by $l$). Piece "
        f"2 has $m = {m2}$, $l = {l2}$, $o = {o2}$. What is the output over all keys?",
        merge(drawn),
        (
            f"Common maximum {top}; factors {f1:.4f} and {f2:.4f}.",
            f"Sums: {l1 * f1:.4f} and {l2 * f2:.4f}, together {l1 * f1 + l2 * f2:.4f}.",
            f"Output: ({l1 * f1:.4f} · {o1} + {l2 * f2:.4f} · {o2}) / {l1 * f1 + l2 * f2:.4f} = {merge(drawn):.3f}.",
        ),
        {"the sums belong to different maxima": merge(drawn, False), "outputs are weighted by the sums": (o1 + o2) / 2},
    )


@BANK.computed(
    12,
    "which tiles of a causal or windowed attention are skipped",
    title="Tiles that are not skipped",
    minutes=7,
    unit="tiles",
    within=(30, 300),
    rubric=("the last key of a row of tiles", "tiles of each row", "the sum over rows"),
)
def causal_tiles(draw: Draw) -> Variant:
    def visited(tokens: int, rows: int, columns: int) -> int:
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        padded = torch.nn.functional.pad(mask, (0, -tokens % columns, 0, -tokens % rows))
        return int(padded.unfold(0, rows, rows).unfold(1, columns, columns).flatten(2).any(-1).sum())

    rows, columns = draw.of((32, 16), (64, 32), (64, 16))
    tokens = draw.until(lambda: draw.number(290, 890, 10), lambda n: 40 < visited(n, rows, columns) < 280 and n % rows)
    answer = visited(tokens, rows, columns)
    all_tiles = ceil_div(tokens, rows) * ceil_div(tokens, columns)
    each = [ceil_div(min(row + rows, tokens), columns) for row in range(0, tokens, rows)]
    return Variant(
        f"Causal attention over {tokens} tokens works in tiles of {rows} queries by {columns} keys. How many tiles "
        "hold at least one pair that is allowed?",
        answer,
        (
            f"{len(each)} rows of tiles. The last query of a row sees the keys up to its own position.",
            f"Tiles in the rows: {each_of(each)}.",
            f"Together {answer} of {all_tiles}.",
        ),
        {"these are all tiles, without the skip": all_tiles, "half of all tiles is only about right": all_tiles // 2},
    )


@BANK.computed(
    12,
    "predict the bytes",
    title="Bytes of stored scores",
    minutes=5,
    unit="MB",
    tolerance=0.01,
    within=(40, 400),
    rubric=("scores of a head", "written and read, twice", "all heads, in bytes"),
)
def score_bytes(draw: Draw) -> Variant:
    def size(drawn: tuple[int, int]) -> float:
        tokens, heads = drawn
        return 4 * heads * tokens * tokens * 2 / 1e6

    tokens, heads = drawn = draw.until(
        lambda: (draw.number(600, 1400, 100), draw.number(6, 24, 2)), lambda d: 45 < size(d) < 380
    )
    return Variant(
        "Attention that stores its scores writes them, reads them for the softmax, writes the weights, and reads "
        f"these for the product with the values. A prompt has {tokens} tokens, the layer {heads} heads, and numbers "
        "take 2 bytes; nothing is skipped. How many megabytes ($10^6$ bytes) of traffic does the FlashAttention "
        "kernel save in this layer, which keeps scores and weights on the chip?",
        size(drawn),
        (
            f"Scores of a head: {tokens}² = {tokens * tokens:,}, 2 bytes each.",
            "They are moved four times: written and read as scores, written and read as weights.",
            f"4 · {heads} · {tokens * tokens:,} · 2 = {size(drawn):.1f} MB.",
        ),
        {
            "scores and weights are written and read": size(drawn) / 2,
            "every head has scores of its own": size(drawn) / heads,
        },
    )


@BANK.code(12, "which tiles of a causal or windowed attention are skipped", title="A plan of tiles", minutes=15)
def tile_plan(draw: Draw) -> CodeVariant:
    kind = draw.of("causal", "window", "prefix")
    allowed = {
        "causal": "key <= query",
        "window": "query - size < key <= query",
        "prefix": "key <= query or key < size",
    }
    said = {"causal": "keys up to its own position (`size` is not used)",
            "window": "the last `size` keys up to its own position, its own included",
            "prefix": "keys up to its own position, and all of the first `size` keys"}  # fmt: skip
    body = '''
def plan(tokens: int, rows: int, columns: int, size: int) -> list[str]:
    """One string for each row of tiles: "." skipped, "m" needs a mask, "w" wholly allowed."""
    lines = []
    for top in range(0, tokens, rows):
        line = ""
        for left in range(0, tokens, columns):
            keys = range(left, min(left + columns, tokens))
            pairs = [RULE for query in range(top, min(top + rows, tokens)) for key in keys]
            line += "w" if all(pairs) else "m" if any(pairs) else "."
        lines.append(line)
    return lines
'''
    solution = body.replace("RULE", allowed[kind])
    return CodeVariant(
        "`tokens` queries attend to as many keys, in tiles of `rows` queries by `columns` keys; a query sees "
        f"**{said[kind]}**. Write `plan(tokens, rows, columns, size)`: for each row of tiles a string with a letter "
        "for each tile: `.` where no pair is allowed, `w` where all are, `m` otherwise. The last tiles may be cut off "
        "by the end of the text; what lies behind it does not count.",
        solution,
        ((8, 4, 2, 3), (7, 3, 3, 4)),
        ((0, 2, 2, 1), (1, 4, 4, 1), (6, 1, 1, 2), (5, 8, 2, 2), (6, 2, 3, 0 if kind == "prefix" else 1)),
        lambda rng: (rng.randint(1, 14), rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 6)),
        f"a query sees {said[kind]}",
        {body.replace("RULE", rule): f"this is the plan of {name}" for name, rule in allowed.items() if name != kind}
        | {solution.replace("key <= query", "key < query"): "a query sees its own position"},
    )


BANK.written(
    12,
    "compute a softmax from pieces",
    "Without the maximum",
    "A student leaves the running maximum out of the online softmax and adds up $e^s$ directly; all tests with random "
    "numbers pass. Why do they pass, and which input shows the mistake? What does the kernel print then?",
    "Random scores are small, so nothing overflows and the result is the same. A score above 88 in float32 (11 in "
    "float16) makes $e^s$ infinite; infinity over infinity is NaN. Very negative scores make the sum 0, and 0 / 0 is "
    "NaN.",
    rubric=(
        "mathematically the same",
        "small random scores do not overflow",
        "an input that overflows",
        "NaN, with the reason",
    ),
)
