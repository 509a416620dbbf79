"""Questions of chapter 10, Triton from zero."""

from __future__ import annotations

from minillm.course.questions.question import Bank, Draw, Variant
from minillm.rounding import ceil_div

BANK = Bank()


@BANK.computed(
    10,
    "count the bytes that it saves",
    title="Bytes that fusing saves",
    minutes=6,
    unit="bytes",
    within=(1e7, 1e8),
    rubric=(
        "bytes of one tensor",
        ("reads and writes of the separate kernels"),
        "those of the fused one",
        "the difference",
    ),
)
def fused_bytes(draw: Draw) -> Variant:
    tokens, width, itemsize = draw.number(1100, 1900, 100), draw.number(1024, 3072, 256), 2
    kernels = draw.number(3, 5)
    one = tokens * width * itemsize
    apart, together = (2 * kernels + 1) * one, 3 * one
    return Variant(
        f"{kernels} elementwise kernels run one after the other on a tensor of {tokens} × {width} numbers in "
        "bfloat16. The first one adds a residual: it reads two tensors and writes one. Each of the others reads the "
        "result of the kernel before it and writes its own. One fused kernel reads the same two tensors and writes "
        "the last result. How many bytes of memory traffic does fusing save?",
        apart - together,
        (
            f"A tensor: {tokens} · {width} · 2 = {one:,} bytes.",
            f"Apart: 3 + {kernels - 1} · 2 = {2 * kernels + 1} tensors.",
            "Fused: 3 tensors.",
            f"Saved: {2 * kernels - 2} tensors, {apart - together:,} bytes.",
        ),
        {
            "this is what the separate kernels move in all": apart,
            "each kernel writes its tensor, too": (kernels - 1) * one,
        },
    )


@BANK.computed(
    10,
    "write, launch and debug Triton kernels",
    title="Places behind the mask",
    minutes=4,
    unit="places",
    within=(100, 999),
    rubric=("programs, rounded up", "places of all programs", "those without an element"),
)
def masked_places(draw: Draw) -> Variant:
    block = draw.of(256, 512, 1024)
    elements = draw.until(lambda: draw.number(4100, 9900), lambda n: 110 < -n % block < 0.95 * block and n % block)
    programs, masked = ceil_div(elements, block), -elements % block
    return Variant(
        f"A kernel adds two vectors of {elements} elements in blocks of {block}. How many places of its programs are "
        "masked?",
        masked,
        (
            f"Programs: {elements} / {block}, rounded up: {programs}.",
            f"Places: {programs} · {block} = {programs * block}.",
            f"Masked: {programs * block - elements}.",
        ),
        {"these are the elements of the last program": elements % block},
    )


@BANK.computed(
    10,
    "say what SMs, warps, registers",
    title="Warps that hide a load",
    minutes=5,
    unit="warps",
    within=(5, 40),
    rubric=("what one warp leaves idle", "how many others fill it, rounded up", "itself included"),
)
def warps_to_hide(draw: Draw) -> Variant:
    compute, latency = draw.until(
        lambda: (draw.number(15, 45), draw.number(310, 590)), lambda d: 7 < ceil_div(d[1], d[0]) < 35 and d[1] % d[0]
    )
    return Variant(
        f"A scheduler issues an instruction of one warp in each cycle. Every warp computes for {compute} cycles, then "
        f"loads and waits for {latency} cycles, and so on. How many warps are needed so that the scheduler is never "
        "idle?",
        1 + ceil_div(latency, compute),
        (
            f"While a warp waits, others have to fill {latency} cycles.",
            f"{latency} / {compute}, rounded up: {ceil_div(latency, compute)} other warps.",
            f"With the warp itself: {1 + ceil_div(latency, compute)}.",
        ),
        {"the warp that waits counts, too": ceil_div(latency, compute)},
    )


BANK.written(
    10,
    "fuse the residual addition",
    "Fuse everything",
    "Fusing the residual addition and the RMSNorm makes them faster although not one operation is saved. Why? Name a "
    "pair of neighbouring operations of a layer that gains little by fusing, and say why.",
    "Both are memory-bound: the time is in the bytes, and the intermediate tensor is neither written nor read. A "
    "large matrix product is compute-bound; fusing an elementwise operation into it saves bytes that are a small part "
    "of its time.",
    rubric=(
        "memory-bound operations take the time of their bytes",
        "the tensor in between is not moved",
        "a pair that gains little",
        "the reason",
    ),
)
