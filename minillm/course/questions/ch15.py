"""Questions of chapter 15, fewer bits."""

from __future__ import annotations

import torch

from minillm.course.questions.coding import CodeVariant
from minillm.course.questions.question import Bank, Draw, Variant, each_of
from minillm.quantization.rtn import round_to_nearest

BANK = Bank()


@BANK.computed(
    15,
    "write weights as codes on a grid",
    title="Codes of a group",
    minutes=5,
    unit="codes",
    within=(-28, 28),
    rubric=("the scale", "divides and rounds", "the codes"),
)
def codes_of_a_group(draw: Draw) -> Variant:
    def codes(weights: list[int], largest: int = 7) -> list[int]:
        return [round(w * largest / max(map(abs, weights))) for w in weights]

    def clear(weights: list[int]) -> bool:
        exact = [w * 7 / max(map(abs, weights)) for w in weights]
        return (
            all(0.1 < x % 1 < 0.42 or 0.58 < x % 1 < 0.9 or abs(x) == 7 for x in exact)
            and len(set(map(abs, weights))) == 4
        )

    weights = draw.until(
        lambda: [draw.of(-1, 1) * n for n in draw.numbers(4, 12, 98)],
        lambda w: (
            clear(w)
            and codes(w) != [int(x * 7 / max(map(abs, w))) for x in w]
            and codes(w) != codes(w, 8)
            and [int(x * 7 / max(map(abs, w))) for x in w] != codes(w, 8)
        ),
    )
    packed = round_to_nearest(torch.tensor([weights], dtype=torch.float32) / 100, "int4", None)
    answer = [int(code) for code in packed.format.decode(packed.codes)[0]]
    scale = max(map(abs, weights)) / 700
    return Variant(
        f"Four weights, {each_of(w / 100 for w in weights)}, share a symmetric scale in 4 bits; the grid has the "
        "codes −7 to 7. Which codes do they get?",
        answer,
        (
            f"Scale: {max(map(abs, weights)) / 100} / 7 = {scale:.4f}.",
            f"Weights over the scale: {each_of(f'{w / 100 / scale:.2f}' for w in weights)}.",
            f"Rounded: {answer}.",
        ),
        {
            "codes are rounded, not cut off": [int(x * 7 / max(map(abs, weights))) for x in weights],
            "the largest code of the grid is 7": codes(weights, 8),
        },
    )


@BANK.computed(
    15,
    "what a scale, a zero point and a group cost",
    title="Bytes of a quantized matrix",
    minutes=5,
    unit="bytes",
    within=(1e6, 9.9e6),
    rubric=("bits of the codes", "scales and zero points of the groups", "bytes of the matrix"),
)
def quantized_bytes(draw: Draw) -> Variant:
    rows, columns, bits, group = (
        draw.number(1024, 3072, 256),
        draw.number(2048, 4096, 512),
        draw.of(3, 4, 6),
        draw.of(32, 64, 128),
    )
    sample = round_to_nearest(torch.ones(2, group), f"int{bits}", group, symmetric=False)
    each = sample.bits_per_weight
    answer = int(rows * columns * each / 8)
    return Variant(
        f"A matrix of {rows} × {columns} weights is quantized to {bits} bits. {group} inputs of an output share a "
        f"scale in float16 and a zero point of {bits} bits. How many bytes does the matrix take, with its codes "
        "packed without gaps?",
        answer,
        (
            f"Beside the codes a group has 16 + {bits} bits: {(16 + bits) / group:g} a weight.",
            f"Bits a weight: {each:g}.",
            f"{rows * columns:,} · {each:g} / 8 = {answer:,} bytes.",
        ),
        {
            "scales and zero points take room, too": rows * columns * bits // 8,
            "the zero points take room, too": int(rows * columns * (bits + 16 / group) / 8),
        },
    )


@BANK.computed(
    15,
    "at how many rows low-bit weights stop paying",
    title="Rows at which low-bit weights stop paying",
    minutes=5,
    unit="rows",
    tolerance=0.02,
    within=(15, 150),
    rubric=("time to read a weight", "time of its arithmetic in a row", "the ratio"),
)
def rows_of_few_bits(draw: Draw) -> Variant:
    bits, bandwidth = draw.of(3, 4, 6), draw.number(300, 900, 50)
    flops = draw.until(lambda: draw.number(60, 290, 5), lambda f: 18 < f * 1e3 / bandwidth * bits / 16 < 120)
    answer = flops * 1e12 / (bandwidth * 1e9) * bits / 8 / 2
    return Variant(
        f"A product reads its weights in {bits} bits each, unpacks them for nothing, and does its arithmetic in 16 "
        f"bits. The machine reads {bandwidth} GB/s and computes {flops} TFLOP/s. At how many rows does its arithmetic "
        "begin to take longer than reading the weights?",
        answer,
        (
            f"Reading a weight: {bits / 8} bytes / {bandwidth} GB/s.",
            f"A row: 2 FLOP / {flops} TFLOP/s.",
            f"The two are equal at {answer:.1f} rows.",
        ),
        {"this is the number of rows for 16 bits": answer * 16 / bits, "a weight costs two operations": answer * 2},
    )


@BANK.code(15, "write weights as codes on a grid", title="Pack codes", minutes=15)
def pack(draw: Draw) -> CodeVariant:
    first = draw.of("the highest bits", "the lowest bits")
    bits = draw.of(2, 4)
    shift = {"the highest bits": "8 - bits - place * bits", "the lowest bits": "place * bits"}
    body = '''
def pack(codes: list[int]) -> list[int]:
    """The bytes that hold the codes."""
    bits, packed = BITS, []
    for start in range(0, len(codes), 8 // bits):
        byte = 0
        for place, code in enumerate(codes[start : start + 8 // bits]):
            byte |= code << (SHIFT)
        packed.append(byte)
    return packed
'''
    other = ({*shift} - {first}).pop()
    make = lambda name, width: body.replace("SHIFT", shift[name]).replace("BITS", str(width))
    return CodeVariant(
        f"Codes of **{bits} bits** (0 to {2**bits - 1}) are packed into bytes. Write `pack(codes)`: the list of "
        f"bytes, each 0 to 255; the first code of a byte takes **{first}** of it, the next one the bits beside them, "
        "and so on. What the last byte has no code for is 0.",
        make(first, bits),
        (([1, 2, 3],), ([3, 0, 1, 2, 3, 1],)),
        (([],), ([1],), ([2**bits - 1] * 8,), ([0, 0, 0, 0, 1],)),
        lambda rng: ([rng.randrange(2**bits) for _ in range(rng.randint(0, 11))],),
        f"{bits} bits, the first code in {first}",
        {
            make(other, bits): "the codes stand in the other order",
            make(first, 6 - bits): "the codes have another width",
            make(first, bits).replace(
                "        packed.append(byte)", "        if place + 1 == 8 // bits:\n            packed.append(byte)"
            ): "the last byte is kept, too",
        },
    )


BANK.written(
    15,
    "say what a scale, a zero point and a group cost",
    "One large weight",
    "A row of weights contains one that is 50 times as large as the others and is quantized to 4 bits with one scale "
    "for the row. What happens to the others? Why do groups help, and what do they cost?",
    "The scale is set by the largest, so the others are below half a step and become 0. With groups the outlier "
    "spoils its own group alone. Each group stores a scale (and a zero point), which adds bits for every weight.",
    rubric=(
        "the scale follows the largest",
        "the others round to zero",
        "groups confine the damage",
        "bits for scales",
    ),
)
