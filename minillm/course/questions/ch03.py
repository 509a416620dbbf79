"""Questions of chapter 03, the KV cache."""

from __future__ import annotations

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant
from minillm.engine.metrics import RequestRecord
from minillm.parallel.cost import Shape

BANK = Bank()


def _config(draw: Draw) -> Shape:
    layers, kv_heads, head = draw.number(24, 48, 2), draw.of(2, 4, 8), draw.of(64, 128)
    return Shape("exam", layers, 0, 0, kv_heads * draw.of(3, 4, 5), kv_heads, head, 0)


@BANK.computed(
    3,
    "what a cache costs in bytes",
    title="Bytes of a cache",
    minutes=5,
    unit="bytes",
    within=(1e8, 1e9),
    rubric=("keys and values", "layers, KV heads and head size", "bytes of a number, and tokens", "the result"),
)
def cache_bytes(draw: Draw) -> Variant:
    def fits(pair: tuple[Shape, int]) -> bool:
        return 1e8 < pair[0].kv_bytes_per_token * pair[1] < 1e9

    shape, tokens = draw.until(lambda: (_config(draw), draw.number(2000, 9000, 500)), fits)
    each, answer = shape.kv_bytes_per_token, shape.kv_bytes_per_token * tokens
    return Variant(
        f"A model has {shape.num_layers} layers, {shape.num_heads} query heads, {shape.num_kv_heads} KV heads and a "
        f"head size of {shape.head_dim}. Its KV cache is kept in bfloat16. How many bytes does the cache of one "
        f"request with {tokens} tokens take?",
        answer,
        (
            f"A token: $2 · {shape.num_layers} · {shape.num_kv_heads} · {shape.head_dim} · 2 = {each:,}$ bytes.",
            f"All tokens: {each:,} · {tokens} = {answer:,} bytes.",
        ),
        {
            "keys alone were counted": answer // 2,
            "query heads have no cache of their own": answer * shape.num_heads // shape.num_kv_heads,
            "a bfloat16 has 2 bytes": answer * 2,
        },
    )


@BANK.computed(
    3,
    "without a cache computes again",
    title="Positions computed again",
    minutes=5,
    unit="positions",
    within=(1000, 9999),
    rubric=("the sum over steps without a cache", "the positions with a cache", "the difference"),
)
def computed_again(draw: Draw) -> Variant:
    prompt, output = draw.number(31, 59), draw.number(35, 59)
    without, cached = sum(range(prompt, prompt + output)), prompt + output - 1
    return Variant(
        "A generator without a cache sends the whole text through the model for every new token. For a prompt of "
        f"{prompt} tokens and an answer of {output} tokens, how many positions does it send in all, beyond those that "
        "a generator with a KV cache sends?",
        without - cached,
        (
            (
                f"Without: {prompt} + … + {prompt + output - 1} = {output} · ({prompt} + {prompt + output - 1}) / 2 = "
                f"{without}."
            ),
            (
                f"With: the prompt once, then one position for each token but the last: {prompt} + {output - 1} = "
                f"{cached}."
            ),
            f"{without} − {cached} = {without - cached}.",
        ),
        {
            "all positions were counted, not those beyond the cache's": without,
            "the last token is never sent through the model": without - cached - 1,
        },
    )


@BANK.computed(
    3,
    "read TTFT and TPOT off one request",
    title="Time per output token",
    minutes=4,
    unit="ms",
    tolerance=0.01,
    within=(15, 100),
    rubric=(("leaves out the time to the first token"), "divides by the gaps, not the tokens", "the TPOT"),
)
def tpot(draw: Draw) -> Variant:
    first, gap, tokens = draw.number(120, 480, 5), draw.number(18, 49), draw.number(21, 61, 5)
    last = first + gap * (tokens - 1) + draw.of(7, 9, 11)
    record = RequestRecord(0.0, (first / 1e3, *[0.0] * (tokens - 2), last / 1e3))
    return Variant(
        f"A request arrives at 0 ms. Its first token comes at {first} ms, and the last of its {tokens} tokens at "
        f"{last} ms. What is its TPOT, in milliseconds?",
        record.tpot * 1e3,
        (
            f"From the first token to the last: {last} − {first} = {last - first} ms.",
            f"Over {tokens - 1} gaps: {record.tpot * 1e3:.2f} ms.",
        ),
        {
            "the time to the first token does not count": last / tokens,
            ("there is one gap fewer than tokens"): (last - first) / tokens,
        },
    )


@BANK.code(3, "build a KV cache", title="Where a key lies", minutes=12)
def cache_offsets(draw: Draw) -> CodeVariant:
    layouts = {
        "heads first": ("[head, position, element]", "(head * max_len + position) * head_dim + element"),
        "positions first": ("[position, head, element]", "(position * num_heads + head) * head_dim + element"),
        "elements first": ("[head, element, position]", "(head * head_dim + element) * max_len + position"),
    }
    name = draw.of(*layouts)
    body = '''
def offset_of(head: int, position: int, element: int, num_heads: int, max_len: int, head_dim: int) -> int:
    """The place of one number of a key in the flat memory of the cache; -1 where the cache has no such place."""
    if not (0 <= head < num_heads and 0 <= position < max_len and 0 <= element < head_dim):
        return -1
    return PLACE
'''
    solution = body.replace("PLACE", layouts[name][1])
    wrong = {body.replace("PLACE", formula): f"this is the layout {layout}"
             for layout, (_, formula) in layouts.items() if layout != name}  # fmt: skip
    wrong[solution.replace("position < max_len", "position <= max_len")] = "one position more than the cache has"

    def call(rng):
        sizes = rng.randint(2, 4), rng.randint(2, 6), rng.randint(2, 5)
        places = [rng.randint(-1, size) for size in (sizes[0], sizes[1], sizes[2])]
        return (*places, *sizes)

    return CodeVariant(
        "The keys of one layer are kept in one flat piece of memory that has room for `max_len` positions, in the "
        f"layout **{layouts[name][0]}**, the last index running fastest. Write `offset_of(head, position, element, "
        "num_heads, max_len, head_dim)`: the place of one number, from 0 on; -1 where an index is out of its range.",
        solution,
        ((1, 2, 3, 2, 5, 4), (0, 0, 0, 2, 5, 4)),
        ((1, 4, 3, 2, 5, 4), (2, 0, 0, 2, 5, 4), (0, 5, 0, 2, 5, 4), (0, 0, 4, 2, 5, 4), (0, -1, 0, 2, 5, 4)),
        call,
        f"the layout is {layouts[name][0]}",
        wrong,
    )


BANK.written(
    3,
    "build a KV cache and prove",
    "Queries in a cache",
    "A KV cache keeps keys and values, but not queries, of the tokens of the past. Why are queries not needed? Why "
    "may the keys of a prefix be kept although new tokens follow?",
    "The next token's output needs its own query against all keys; an old query would only compute an old output "
    "again. In a causal model the hidden state of a position depends on earlier positions alone, so its key and value "
    "never change.",
    rubric=(
        "an old query computes an old output again",
        "causality: a position sees earlier ones alone",
        "so keys and values do not change",
    ),
)
