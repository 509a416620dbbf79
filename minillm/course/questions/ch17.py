"""Questions of chapter 17, long contexts."""

from __future__ import annotations

import math

from minillm.course.questions.question import Bank, Draw, Variant
from minillm.engine.fleet.costs import Link, ModelShape
from minillm.kv_cache.retention import RetentionPolicy

BANK = Bank()


@BANK.computed(
    17,
    "from which context on a step reads more cache than weights",
    title="Where the cache outweighs the weights",
    minutes=5,
    unit="tokens",
    within=(1000, 9999),
    rubric=("bytes of a token's keys and values", "those of the whole batch", "the context, rounded up"),
)
def cache_over_weights(draw: Draw) -> Variant:
    def context(drawn: tuple[int, ...]) -> float:
        billions, layers, size, batch = drawn
        shape = ModelShape(billions / 10 * 1e9, layers, 0, size)
        return shape.parameters * shape.element_bytes / shape.kv_bytes / batch

    billions, layers, size, batch = drawn = draw.until(
        lambda: (draw.number(11, 79), draw.number(24, 40, 2), draw.of(512, 1024), draw.number(12, 48, 4)),
        lambda d: 1100 < context(d) < 9000,
    )
    answer, each = math.ceil(context(drawn)), 4 * layers * size
    return Variant(
        f"A model has {billions / 10} billion weights in bfloat16 and {layers} layers; the KV heads of a layer have "
        f"{size} numbers together, kept in bfloat16, too. {batch} requests of the same length decode. From which "
        "context, in tokens, on does a step read at least as many bytes of keys and values as of weights?",
        answer,
        (
            f"A token: 2 · {layers} · {size} · 2 = {each:,} bytes.",
            f"A token of each request: {each * batch:,} bytes.",
            f"{billions / 10 * 2} · $10^9$ / {each * batch:,}, rounded up: {answer}.",
        ),
        {
            "there are keys and values": math.ceil(context(drawn) * 2),
            "every request reads its own": math.ceil(context(drawn) * batch),
        },
    )


@BANK.computed(
    17,
    "show why a model fails when its first tokens are dropped",
    title=("Keys that a sink policy keeps"),
    minutes=4,
    unit="positions",
    within=(300, 3000),
    rubric=("the sinks", ("the window, with the token's own position"), "the positions that are gone"),
)
def sink_positions(draw: Draw) -> Variant:
    policy = RetentionPolicy(draw.number(2, 8), draw.number(110, 390))
    position = draw.number(900, 2900)
    gone = position + 1 - policy.num_kept
    return Variant(
        f"A policy keeps the first {policy.sinks} tokens and the last {policy.window}, the query's own included. How "
        f"many of the positions up to its own can the query at position {position} (counted from 0) no longer see?",
        gone,
        (
            f"Positions up to its own: {position + 1}.",
            f"Kept: {policy.sinks} + {policy.window} = {policy.num_kept}.",
            f"{position + 1} − {policy.num_kept} = {gone}.",
        ),
        {"position 0 is one, too": gone - 1, "the sinks are kept, too": gone + policy.sinks},
    )


@BANK.computed(
    17,
    "keep keys and values in 8 or 4 bits",
    title=("A cache in 8 bits"),
    minutes=5,
    unit="MB",
    tolerance=0.01,
    within=(80, 800),
    rubric=("bytes of a head's codes and scale", "keys and values in all layers", "megabytes saved"),
)
def eight_bit_cache(draw: Draw) -> Variant:
    def saved(drawn: tuple[int, ...], scale: int = 4) -> float:
        layers, heads, dim, tokens = drawn
        return 2 * layers * heads * (dim - scale) * tokens / 1e6

    layers, heads, dim, tokens = drawn = draw.until(
        lambda: (draw.number(24, 48, 2), draw.of(4, 8), draw.of(64, 128), draw.number(3000, 9000, 500)),
        lambda d: 90 < saved(d) < 780,
    )
    return Variant(
        f"A cache of {tokens} tokens in {layers} layers with {heads} KV heads of {dim} numbers is kept in int8 in "
        "place of bfloat16, with one float32 scale for each token and head, for keys and for values. How many "
        "megabytes ($10^6$ bytes) does that save?",
        saved(drawn),
        (
            f"A head in bfloat16: {2 * dim} bytes; in int8: {dim} + 4 = {dim + 4} bytes.",
            (
                f"Keys and values of a token: $2 · {layers} · {heads} · {dim - 4} = "
                f"{2 * layers * heads * (dim - 4):,}$ bytes saved."
            ),
            f"All tokens: {saved(drawn):.1f} MB.",
        ),
        {"scales take room, too": saved(drawn, 0), "keys and values are both cached": saved(drawn) / 2},
    )


@BANK.computed(
    17,
    "bringing them back beats computing them again",
    title="Bring back or compute again",
    minutes=6,
    unit="ms",
    tolerance=0.01,
    within=(20, 200),
    rubric=(("bytes of the prefix"), "time of the link", "time of the arithmetic", "the difference"),
)
def bring_back(draw: Draw) -> Variant:
    def times(drawn: tuple[int, ...]) -> tuple[float, float]:
        billions, each, tokens, link, flops = drawn
        moved = Link(link * 1e9, latency=0.0).seconds(tokens * each * 1024) * 1e3
        return moved, 2 * billions * 1e9 * tokens / (flops * 1e12) * 1e3

    billions, each, tokens, link, flops = drawn = draw.until(
        lambda: (
            draw.number(3, 9),
            draw.of(64, 96, 128),
            draw.number(1100, 3900, 100),
            draw.number(8, 24),
            draw.number(110, 390, 10),
        ),
        lambda d: times(d)[1] > 2 * times(d)[0] and 25 < times(d)[1] - times(d)[0] < 190,
    )
    moved, again = times(drawn)
    return Variant(
        f"A prefix of {tokens} tokens lies in host memory, {each * 1024:,} bytes a token. The link to the device "
        f"carries {link} GB/s. Computing a token again takes 2 FLOP for each of {billions} billion weights, at "
        f"{flops} TFLOP/s. How many milliseconds does bringing the prefix back save over computing it again? Latency "
        "is neglected.",
        again - moved,
        (
            f"Bytes: {tokens} · {each * 1024:,} = {tokens * each * 1024 / 1e6:.1f} MB.",
            f"Link: {moved:.2f} ms.",
            f"Arithmetic: 2 · {billions} · $10^9 · {tokens} / ({flops} · 10^{{12}}$) = {again:.2f} ms.",
            f"Saved: {again - moved:.2f} ms.",
        ),
        {"a weight costs two operations": again / 2 - moved, "this is the time to compute it again": again},
        "bringing back is faster",
    )


BANK.written(
    17,
    "show why a model fails when its first tokens are dropped",
    "The first four tokens",
    "A window cache that drops the first tokens ruins a model at once, although those tokens say nothing about the "
    "present text. Why? What does keeping four of them cost, and what can such a cache still not do?",
    "Softmax weights sum to 1; heads that have nothing to attend to put their weight on the first tokens (attention "
    "sinks). Without them the weight spreads over the window, and the outputs change. Four tokens cost four slots. "
    "What left the window is forgotten.",
    rubric=(
        "softmax has to put its weight somewhere",
        "the first tokens serve as sinks",
        "four slots are a small cost",
        "text outside of the window is lost",
    ),
)
