"""Questions of chapter 04, batching and the roofline."""

from __future__ import annotations

from minillm.course.questions.question import Bank, Draw, Variant, each_of
from minillm.parallel.cost import LINKS, Machine, Shape, Split, step_cost

BANK = Bank()


def _machine(bandwidth: float, flops: float) -> Machine:
    return Machine("exam", 80e9, bandwidth, flops, LINKS["NVLink 3"])


@BANK.computed(
    4,
    "at which batch more requests begin to cost more time",
    title="Where the ridge point is",
    minutes=6,
    unit="requests",
    within=(60, 600),
    rubric=("time to read the weights", "time of the arithmetic of one row", "the ratio, rounded up"),
)
def bend(draw: Draw) -> Variant:
    bandwidth, itemsize = draw.number(300, 900, 50), draw.of(1, 2)
    flops = draw.until(lambda: draw.number(40, 190, 5), lambda f: 70 < f * 1e3 / bandwidth * itemsize / 2 < 500)
    machine = _machine(bandwidth * 1e9, flops * 1e12)
    answer = -int(-machine.flops * itemsize // (2 * machine.bandwidth))
    return Variant(
        f"A machine reads {bandwidth} GB/s and computes {flops} TFLOP/s. The weights of a model take {itemsize} "
        f"byte{'s' * (itemsize > 1)} each, and a decode step does 2 FLOP per weight and request. Leave the KV cache "
        "out. What is the smallest batch at which the arithmetic takes at least as long as reading the weights?",
        answer,
        (
            f"Reading a weight: {itemsize} / ({bandwidth} · $10^9$) s.",
            f"Arithmetic of a weight in a row: 2 / ({flops} · $10^{{12}}$) s.",
            f"Ratio: {machine.flops * itemsize / 2 / machine.bandwidth:.1f}, so {answer} requests.",
        ),
        {
            "a weight costs two operations, not one": -int(-machine.flops * itemsize // machine.bandwidth),
            "the smallest batch is the ratio rounded up": answer - 1,
        },
        "memory-bound below it",
    )


@BANK.computed(
    4,
    "build a ragged batch and count what a padded one would waste",
    title="Padding",
    minutes=4,
    unit="%",
    tolerance=0.01,
    within=(20, 75),
    rubric=("the rectangle", "the tokens in it", "the share that is padding"),
)
def padding(draw: Draw) -> Variant:
    lengths = draw.until(lambda: draw.numbers(5, 11, 99), lambda n: 0.25 < 1 - sum(n) / 5 / max(n) < 0.7)
    rectangle, tokens = 5 * max(lengths), sum(lengths)
    return Variant(
        f"Five prompts have {each_of(lengths)} tokens. They are padded to one rectangle. Which share of its "
        "positions, in percent, is padding?",
        100 * (1 - tokens / rectangle),
        (
            f"The rectangle: 5 · {max(lengths)} = {rectangle} positions.",
            f"Tokens: {tokens}.",
            f"Padding: {rectangle - tokens} of {rectangle}, {100 * (1 - tokens / rectangle):.1f}%.",
        ),
        {"this is the padding over the tokens, not over the rectangle": 100 * (rectangle - tokens) / tokens},
    )


@BANK.computed(
    4,
    "compute the arithmetic intensity of a step",
    title="Time of a decode step",
    minutes=8,
    unit="ms",
    tolerance=0.02,
    within=(2, 20),
    rubric=("bytes of the weights", "bytes of the keys and values", "compares with the arithmetic", "the time"),
)
def decode_step(draw: Draw) -> Variant:
    def make() -> tuple:
        return (
            draw.number(16, 32, 2),
            draw.of(1024, 2048),
            draw.number(4, 24),
            draw.number(500, 1900, 100),
            draw.number(7, 15),
        )

    def cost(drawn: tuple) -> tuple[Shape, float, float]:
        layers, hidden, batch, context, bandwidth = drawn
        shape = Shape("exam", layers, hidden, 4 * hidden, hidden // 64, 4, 64, 0)
        seconds = step_cost(shape, _machine(bandwidth * 1e11, 2e14), Split(), batch=batch, context=context).compute
        return shape, seconds, 2 * shape.num_parameters * batch / 2e14

    def fits(drawn: tuple) -> bool:
        _, seconds, arithmetic = cost(drawn)
        return 2.1e-3 < seconds < 19e-3 and arithmetic < seconds / 2

    layers, _, batch, context, bandwidth = drawn = draw.until(make, fits)
    shape, seconds, arithmetic = cost(drawn)
    weights, cached = shape.num_parameters * 2, batch * context * shape.kv_bytes_per_token
    return Variant(
        f"A model has {layers} layers with {shape.layer_parameters / 1e6:.2f} million weights each in bfloat16, and a "
        f"token's keys and values take {shape.kv_bytes_per_token:,} bytes. The machine reads {bandwidth * 100} GB/s "
        f"and computes 200 TFLOP/s. How long does a decode step of {batch} requests with {context} cached tokens each "
        "take, if it takes no longer than the slower of reading and computing? Leave the embedding out.",
        seconds * 1e3,
        (
            f"Weights: {layers} · {shape.layer_parameters / 1e6:.2f} M · 2 = {weights / 1e9:.3f} GB.",
            f"Keys and values: {batch} · {context} · {shape.kv_bytes_per_token:,} = {cached / 1e9:.3f} GB.",
            f"Arithmetic: 2 · weights · {batch} takes {arithmetic * 1e3:.2f} ms, less than reading.",
            f"Reading: {(weights + cached) / 1e9:.3f} GB at {bandwidth * 100} GB/s takes {seconds * 1e3:.2f} ms.",
        ),
        {
            "the keys and values are read, too": weights / bandwidth / 1e8,
            "the weights are read once for the whole batch": (batch * weights + cached) / bandwidth / 1e8,
        },
        "memory-bound",
    )


BANK.written(
    4,
    "no batch is large enough",
    "A batch that does not help",
    "The throughput of decoding grows with the batch, then stops to grow, for some models and contexts long before "
    "the arithmetic is busy. Which bytes of a step are shared by the batch and which are not? What follows for long "
    "contexts?",
    "Weights are read once for all rows, keys and values once for each request. With a long context the keys and "
    "values outweigh the weights, their bytes grow with the batch as the arithmetic does, and the intensity "
    "approaches a limit below the machine's ridge: no batch is large enough.",
    rubric=(
        "weights are shared",
        "keys and values are not",
        "the intensity has a limit",
        "with long contexts it lies below the ridge",
    ),
)
