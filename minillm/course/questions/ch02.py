"""Questions of chapter 02, inside the model."""

from __future__ import annotations

from minillm.course.questions.question import Bank, Draw, Variant
from minillm.kv_cache.window import Window
from minillm.model.layers import rope_frequencies
from minillm.model.rope import RopeConfig
from minillm.parallel.cost import Shape

BANK = Bank()


@BANK.computed(
    2,
    "count the parameters",
    title="Weights of a layer",
    minutes=6,
    unit="weights",
    within=(2e6, 2e7),
    rubric=("queries and output by query heads, keys and values by KV heads", "three matrices of the MLP", "the sum"),
)
def layer_parameters(draw: Draw) -> Variant:
    heads, kv_heads = draw.of((9, 3), (8, 2), (8, 4), (6, 2), (6, 3))
    inner = draw.number(1536, 2560, 128)
    shape = Shape("exam", 1, 64 * heads + 256, inner, heads, kv_heads, 64, 1)
    hidden, head = shape.hidden_size, shape.head_dim
    attention = hidden * head * 2 * (heads + kv_heads)
    return Variant(
        f"A decoder layer has hidden size {hidden}, {heads} query heads and {kv_heads} KV heads of {head} numbers "
        f"each, and a SwiGLU of intermediate size {inner}. There are no biases. How many weights do its matrices "
        "have?",
        shape.layer_parameters,
        (
            f"Queries and output: 2 · {hidden} · {heads * head} = {2 * hidden * heads * head:,}.",
            f"Keys and values: $2 · {hidden} · {kv_heads * head} = {2 * hidden * kv_heads * head:,}$.",
            f"Gate, up and down: 3 · {hidden} · {inner} = {3 * hidden * inner:,}.",
            f"Together {shape.layer_parameters:,}.",
        ),
        {
            "keys and values were given all heads": hidden * head * 4 * heads + 3 * hidden * inner,
            "a SwiGLU has three matrices, not two": attention + 2 * hidden * inner,
        },
    )


@BANK.computed(
    2,
    "a rotation makes attention depend on distances",
    title="The angle between two positions",
    minutes=5,
    unit="radians",
    tolerance=0.02,
    within=(1, 10),
    rubric=("the frequency of the pair", "multiplies it by the distance, not by a position", "the angle"),
)
def rope_angle(draw: Draw) -> Variant:
    base, pair = draw.of(100, 400, 900), draw.of(1, 2)
    frequency = float(rope_frequencies(RopeConfig(theta=float(base)), 8)[pair])
    query, distance = draw.until(
        lambda: (draw.number(70, 99), draw.number(11, 59)),
        lambda q: 1.1 < frequency * q[1] < 9 and q[0] - q[1] > 10,
    )
    return Variant(
        "Rotary embeddings turn the pairs of a head of 8 numbers by $p · θ^{-2i/8}$ at position $p$, with the base $θ "
        f"= {base}$ and pairs $i = 0, 1, 2, 3$. By which angle is pair {pair} of a query at position {query} turned "
        f"relative to that of a key at position {query - distance}?",
        frequency * distance,
        (
            f"Frequency of pair {pair}: ${base}^{{-{2 * pair}/8}} = {frequency:.4f}$.",
            f"Distance: {query} − {query - distance} = {distance}.",
            f"Angle: {distance} · {frequency:.4f} = {frequency * distance:.3f}.",
        ),
        {
            "the query's position was taken, not the distance": frequency * query,
            "the exponent has a factor 2": distance * base ** (-pair / 8),
        },
    )


@BANK.computed(
    2,
    "count the parameters",
    title="Pairs under a window",
    minutes=5,
    unit="pairs",
    within=(300, 2000),
    rubric=("the triangle of the first queries", "a full window for the others", "the number of pairs"),
)
def window_pairs(draw: Draw) -> Variant:
    tokens, window = draw.number(61, 99), draw.number(11, 19)
    sees = [query + 1 - Window(window, 1).first(query) for query in range(tokens)]
    answer, triangle = sum(sees), window * (window + 1) // 2
    return Variant(
        f"Attention is causal, with a sliding window of {window} positions (a token's own included). How many pairs "
        f"of a query and a key does a prompt of {tokens} tokens have?",
        answer,
        (
            f"The first {window} queries see 1 to {window} keys: {window} · {window + 1} / 2 = {triangle}.",
            f"The other {tokens - window} see {window} each: {window * (tokens - window)}.",
            f"Together {answer}.",
        ),
        {"the first queries have fewer keys": window * tokens, "the window was left out": tokens * (tokens + 1) // 2},
    )


BANK.written(
    2,
    "a rotation makes attention depend on distances only",
    "Rotate the values, too",
    "RoPE rotates queries and keys by an angle that grows with the position. Why does a score then depend on the "
    "distance of the two tokens alone? What would go wrong if values were rotated in the same way?",
    "A score is a scalar product. Rotating both sides by the angles of their positions leaves the product of one side "
    "with the other rotated by the difference. Values enter the output by a weighted sum and are not multiplied with "
    "a rotated vector, so a rotated value would carry its absolute position into the residual stream.",
    rubric=(
        "a scalar product keeps the difference of the angles",
        "both sides are rotated",
        "values are added, not compared: absolute positions leak",
    ),
)
