"""Questions of chapter 20, one model, many devices."""

from __future__ import annotations

from minillm.course.questions.question import Bank, Draw, Variant
from minillm.parallel.collectives import ring_sent
from minillm.parallel.schedules import bubble_fraction
from minillm.rounding import ceil_div

BANK = Bank()


@BANK.computed(
    20,
    "write a ring all-reduce over send and receive",
    title="Bytes of a ring",
    minutes=5,
    unit="bytes",
    within=(1e5, 9.9e5),
    rubric=("bytes of a chunk", "steps of the ring, twice", "bytes that a rank sends"),
)
def ring_bytes(draw: Draw) -> Variant:
    ranks = draw.of(4, 8)
    tokens, hidden = draw.until(
        lambda: (draw.number(12, 60, 4), draw.number(1024, 4096, 512)), lambda d: 1.1e5 < 3.5 * d[0] * d[1] < 9e5
    )
    size = tokens * hidden
    answer = ring_sent(size, 2, ranks, 0).bytes
    return Variant(
        f"{ranks} ranks sum up a tensor of {tokens} × {hidden} numbers in bfloat16 by a ring all-reduce. How many "
        "bytes does each rank send?",
        answer,
        (
            f"A chunk: {size:,} · 2 / {ranks} = {2 * size // ranks:,} bytes.",
            f"Steps: 2 · ({ranks} − 1) = {2 * (ranks - 1)}.",
            f"{2 * (ranks - 1)} · {2 * size // ranks:,} = {answer:,} bytes.",
        ),
        {
            "after the sums are complete they go around once more": answer // 2,
            "a step sends a chunk, not the tensor": answer * ranks,
        },
    )


@BANK.computed(
    20,
    "predict the bytes that a tensor-parallel step sends",
    title="Bytes of a tensor-parallel step",
    minutes=6,
    unit="MB",
    tolerance=0.01,
    within=(2, 20),
    rubric=("all-reduces of a step", "bytes of one tensor", "the ring's factor", "megabytes of a rank"),
)
def step_bytes(draw: Draw) -> Variant:
    def sent(drawn: tuple[int, ...]) -> float:
        layers, hidden, batch, ranks = drawn
        return (2 * layers + 1) * ring_sent(batch * hidden, 2, ranks, 0).bytes / 1e6

    layers, hidden, batch, ranks = drawn = draw.until(
        lambda: (draw.number(24, 48, 2), draw.number(2048, 4096, 512), draw.number(8, 32, 8), draw.of(4, 8)),
        lambda d: 2.4 < sent(d) < 18,
    )
    whole = batch * hidden * 2
    return Variant(
        f"A model with {layers} layers and hidden size {hidden} runs on {ranks} ranks, tensor parallel; the embedding "
        "is cut by vocabulary, too, and numbers have 2 bytes. How many megabytes ($10^6$ bytes) does each rank send "
        f"in a decode step of {batch} requests, if all-reduces go around a ring? The logits are not counted.",
        sent(drawn),
        (
            f"All-reduces: two a layer, and one for the embedding: {2 * layers + 1}.",
            f"A tensor: {batch} · {hidden} · 2 = {whole:,} bytes.",
            f"A rank sends 2 · {ranks - 1} / {ranks} of it: {2 * (ranks - 1) * whole // ranks:,} bytes.",
            f"Together {sent(drawn):.2f} MB.",
        ),
        {
            "attention and MLP have a sum each": (layers + 1) / (2 * layers + 1) * sent(drawn),
            "a ring sends nearly twice the tensor": (2 * layers + 1) * whole / 1e6,
        },
    )


@BANK.computed(
    20,
    "say when a pipeline of stages is idle",
    title="Micro-batches that fill a pipeline",
    minutes=6,
    unit="micro-batches",
    within=(10, 99),
    rubric=(("the formula of the bubble"), "solves for the micro-batches", "rounds up"),
)
def micro_batches(draw: Draw) -> Variant:
    def least(stages: int, percent: int) -> int:
        return next(m for m in range(1, 400) if bubble_fraction(stages, m) <= percent / 100)

    stages, percent = draw.until(
        lambda: (draw.number(3, 9), draw.number(6, 19)),
        lambda d: 12 <= least(*d) <= 90 and (d[0] - 1) * (100 - d[1]) % d[1],
    )
    answer = least(stages, percent)
    return Variant(
        f"A pipeline has {stages} stages. What is the smallest number of micro-batches with which its stages are idle "
        f"for at most {percent}% of the time?",
        answer,
        (
            f"Idle: $(p - 1) / (m + p - 1) ≤ {percent / 100}$ with $p = {stages}$.",
            (
                f"$m ≥ {stages - 1} · (1 - {percent / 100}) / {percent / 100} = "
                f"{(stages - 1) * (100 - percent) / percent:.2f}$."
            ),
            f"{answer} micro-batches: idle {100 * bubble_fraction(stages, answer):.2f}%.",
        ),
        {
            "the number has to be rounded up": answer - 1,
            "the last stage drains, too": ceil_div(stages * (100 - percent), percent) + stages,
        },
    )


BANK.written(
    20,
    "two sums a layer are the only messages",
    "Columns after columns",
    "In a tensor-parallel MLP the first matrix is cut by columns and the second by rows. What would have to be sent "
    "if both were cut by columns? Why can the activation function stand between the two cuts of the usual way?",
    "After a column cut each rank holds a part of the hidden features; another column cut needs all of them, so an "
    "all-gather of the activations between the two. A row cut takes the part as it is. An elementwise function needs "
    "no other rank's features.",
    rubric=(
        "a column cut leaves parts of the features",
        "columns again need an all-gather",
        "rows take the part as it is",
        "elementwise functions act on a part",
    ),
)
