"""Questions of chapter 14, the whole step."""

from __future__ import annotations

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of
from minillm.engine.graphs import bucket_sizes

BANK = Bank()


@BANK.computed(
    14,
    "split a step into launch overhead and work",
    title=("A device that waits"),
    minutes=5,
    unit="%",
    tolerance=0.01,
    within=(10, 90),
    rubric=("time of the host", "which of the two is slower", "the busy share"),
)
def gpu_busy(draw: Draw) -> Variant:
    launches, each, device = draw.until(
        lambda: (draw.number(210, 490, 10), draw.number(5, 14), draw.number(11, 39) / 10),
        lambda d: 0.15 < d[2] * 1e3 / (d[0] * d[1]) < 0.85,
    )
    host = launches * each / 1e3
    return Variant(
        f"A decode step launches {launches} kernels. Each launch keeps the host busy for {each} µs, the kernels "
        f"together keep the GPU busy for {device} ms, and a kernel starts as soon as it is launched. Which share of "
        "the time, in percent, is the GPU busy?",
        100 * device / host,
        (
            f"Host: {launches} · {each} µs = {host:.2f} ms.",
            f"The host is slower, so a step takes {host:.2f} ms.",
            f"Busy: {device} / {host:.2f} = {100 * device / host:.1f}%.",
        ),
        {"host and device work at the same time": 100 * device / (host + device)},
        "the host is slower",
    )


@BANK.computed(
    14,
    "padded rows and bucketed sizes",
    title=("Padded rows of recorded steps"),
    minutes=6,
    unit="rows",
    within=(10, 60),
    rubric=("the bucket of each step", "its padding", "the sum"),
)
def bucket_padding(draw: Draw) -> Variant:
    sizes = bucket_sizes(64)
    pad = lambda rows: next(size for size in sizes if size >= rows) - rows
    steps = draw.until(
        lambda: draw.numbers(6, 3, 63),
        lambda s: 14 < sum(map(pad, s)) < 50 and sum(one < 8 for one in s) == 2 and all(map(pad, s)),
    )
    return Variant(
        f"Decode steps were recorded for {each_of(sizes)} rows. Six steps have {each_of(steps)} rows; each is run as "
        "the smallest recorded one that holds it. How many rows are computed for nothing?",
        sum(map(pad, steps)),
        (
            f"Buckets: {each_of(pad(one) + one for one in steps)}.",
            f"Padding: {each_of(map(pad, steps))}.",
            f"Together {sum(map(pad, steps))}.",
        ),
        {"every step has the largest bucket": sum(64 - one for one in steps)},
    )


@BANK.computed(
    14,
    "schedule step n + 1 while step n runs",
    title="One step ahead",
    minutes=5,
    tolerance=0.01,
    within=(1.1, 2),
    rubric=("the step one after the other", "the step with both at once", "the ratio"),
)
def ahead(draw: Draw) -> Variant:
    host, device, answer_ms = draw.number(21, 49) / 10, draw.number(52, 99) / 10, draw.number(2, 6) / 10
    apart, together = host + device + answer_ms, device + answer_ms
    return Variant(
        f"For each step the host needs {host} ms to schedule and launch, the device {device} ms to compute, and "
        f"reading the sampled tokens takes {answer_ms} ms, in which both wait. How many times as many steps a second "
        "are there if the host schedules step $n + 1$ while step $n$ runs?",
        apart / together,
        (
            f"One after the other: {host} + {device} + {answer_ms} = {apart:.1f} ms.",
            f"At once: the slower of the two, the device, and the reading: {together:.1f} ms.",
            f"{apart:.1f} / {together:.1f} = {apart / together:.3f}.",
        ),
        {
            "reading the tokens is not hidden": apart / device,
            "the device is the slower one": apart / (host + answer_ms),
        },
        "the device is slower",
    )


@BANK.code(14, "padded rows and bucketed sizes", title="The bucket of a step", minutes=12)
def bucket_of(draw: Draw) -> CodeVariant:
    late = draw.of("is run as it is, without padding", "is cut into steps of the largest size, and a rest")
    body = '''
def padded_rows(steps: list[int], sizes: list[int]) -> list[int]:
    """How many rows each step computes beyond its own."""
    wasted = []
    for rows in steps:
        if rows > max(sizes):
            REST
        fitting = [size for size in sizes if size >= rows]
        wasted.append((min(fitting) if fitting else rows) - rows)
    return wasted
'''
    rests = {"is run as it is, without padding": "wasted.append(0)\n            continue",
             "is cut into steps of the largest size, and a rest": "rows = rows % max(sizes)\n            if not rows:\n"
             "                wasted.append(0)\n                continue"}  # fmt: skip
    tie = "the smallest size that holds them"
    other = ({*rests} - {late}).pop()
    solution = body.replace("REST", rests[late])
    return CodeVariant(
        "Steps were recorded for several numbers of rows, `sizes`, in no order. Write `padded_rows(steps, sizes)`: "
        "for each step, with `steps[i]` rows (at least one), how many rows it computes beyond its own. A step is run "
        f"with **{tie}**; one with more rows than the largest size **{late}**, which is then padded in the same way.",
        solution,
        (([3, 8, 5], [8, 2, 4]), ([9, 1], [4, 2])),
        (([], [1]), ([4, 8], [4]), ([1], [64, 1]), ([5], [4]), ([7, 6], [4, 1, 2])),
        lambda rng: (
            [rng.randint(1, 20) for _ in range(rng.randint(0, 6))],
            rng.sample(range(1, 13), rng.randint(1, 4)),
        ),
        f"a step with more rows than the largest size {late}",
        {
            body.replace("REST", rests[other]): "the rule for steps that are too large",
            solution.replace("size >= rows", "size > rows"): "a step of exactly a recorded size needs no padding",
            solution.replace("min(fitting)", "fitting[0]"): "the sizes are in no order",
        },
    )


BANK.written(
    14,
    "record a step and replay it",
    "A recorded step with a new batch",
    "A recorded decode step (a CUDA graph) is replayed with another batch. What must not change between the recording "
    "and the replay, and how are a varying number of rows and varying block tables handled all the same?",
    "Addresses, shapes and the sequence of kernels are fixed. Inputs are copied into the buffers whose addresses were "
    "recorded. Several numbers of rows are recorded; a step takes the next larger one, and padded rows write to the "
    "null block.",
    rubric=(
        "addresses and shapes are fixed",
        "inputs are copied into fixed buffers",
        "buckets with padded rows",
        "padded rows must not write where others read",
    ),
)
