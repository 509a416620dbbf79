"""Checks of chapter 15: columns in groups, codes from the highest bit down, a budget of bytes, mxfp4.
Built in chapter 15.

`ch15_oracle` has the references, `ch15_budget` the budget of bytes, `ch15_nvfp4` nvfp4.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker, Draw, FunctionChecker
from minillm.book.checks.ch15_budget import check_choose_options
from minillm.book.checks.ch15_nvfp4 import check_to_nvfp4
from minillm.book.checks.ch15_oracle import Option, Words, columns, mx
from minillm.book.checks.patience import within

__all__ = [
    "Option",
    "check_bit_words",
    "check_choose_options",
    "check_quantize_columns",
    "check_to_mxfp4",
    "check_to_nvfp4",
]

_RTN = tuple(f"minillm.quantization.rtn.{name}" for name in ("round_to_nearest", "choose_scales", "encode"))
_PACKING = (
    *(f"minillm.quantization.formats.{name}" for name in ("pack_codes", "unpack_codes")),
    *(f"minillm.model.{module}.unpack_words" for module in ("hub_format", "hub_formats", "compressed_tensors")),
)
_FORMATS = ("minillm.quantization.formats.Format", "minillm.quantization.formats.FORMATS")


# --- 1: columns in groups


def _column_edges(draw: Draw) -> list[tuple]:
    return [
        (torch.full((6, 2), 0.25), 4, 3),  # a step of 0
        (torch.full((3, 1), 5001.9), 4, 3),  # and a low that is rounded by more than 1
        (draw.randn(6, 6), 3, 2),  # as many inputs as outputs
        (torch.tensor([[0.0], [0.5], [1.5], [2.5], [3.0]]), 2, 5),  # ties
        (torch.tensor([[0.0], [20.5], [143.5], [287.0]]), 3, 4),  # ties, and 1 / 41 is rounded
        (torch.tensor([[0.0], [0.499995], [2.499995], [3.0]]), 2, 4),  # close to a tie, and none
        (torch.tensor([[-0.8048265], [0.7919921], [1.1108161]]), 2, 3),  # a tie in float32 only
        (torch.tensor([[0.10001, -3.3], [0.1, 7.7], [0.7, 0.0]]), 3, 3),  # below the rounded low
        (torch.tensor([[1000.2], [1000.25], [1000.2]]), 2, 3),  # all of it above the rounded low
        (torch.tensor([[1000.3], [1000.4], [1000.5]]), 2, 3),  # and below it
        (torch.tensor([[4.1], [4.1155], [4.13]]), 2, 3),  # another code for the unrounded low
        (draw.randn(7, 3), 4, 7),
        (draw.randn(7, 3), 4, 100),  # one group, shorter than `group`
        (draw.randn(9, 1), 8, 4),
        (draw.randn(5, 4), 3, 1),  # a group for each weight
        (draw.randn(8, 5), 1, 4),
        (1e-9 * draw.randn(6, 2), 4, 3),  # a step that float16 cannot tell from 0
        (torch.tensor([[0.0], [1e-6], [2e-6]]), 2, 3),  # a step that is subnormal in float16
        (draw.randn(6, 10).T, 4, 4),  # not contiguous
    ]


def _random_columns(draw: Draw) -> tuple:
    size, outputs = draw.randint(1, 70), draw.randint(1, 6)
    weight = draw.randn(size, outputs) * 10.0 ** draw.randint(-3, 2) + draw.rng.choice((0.0, 1.0, -4.0))
    return weight, draw.randint(1, 9), draw.randint(1, 40)


check_quantize_columns = FunctionChecker(
    "quantize_columns",
    columns,
    returns=("codes", "steps", "lows"),
    examples=[(torch.tensor([[0.0, 1.0], [1.0, 1.5], [3.0, 4.0], [-2.0, 0.5], [0.5, 0.5]]), 2, 3)],
    edges=_column_edges,
    random=_random_columns,
    trials=25,
    hint="A group is weight[start:start + group]; its maximum and minimum are over dimension 0.",
    misconceptions={
        "Where the step in float16 is 0, all codes are 0; a division by it must not reach them.": dict(zeros=False),
        "Compute the codes in float32, not in float64: a quotient next to a half is a tie in float32.": dict(
            dtype=torch.float64
        ),
        "A half rounds up: torch.floor(x + 0.5). torch.round rounds ties to even.": dict(nearest=torch.round),
        "These codes fit the unrounded step or low; the weights are read with the float16 ones.": dict(rounded=False),
        "These are truncated, not rounded to the nearest.": dict(nearest=torch.floor),
        "Clamp to 0 and 2 ** bits - 1 first: what lies outside wraps around as a uint8.": dict(ends=False),
        "Steps and lows are kept in float16, but the codes are computed in float32: .float() first.": dict(
            dtype=torch.float16
        ),
        "Divide by the step: 1 / step is rounded, and a tie is lost.": dict(
            divide=lambda distance, step: distance * (1 / step)
        ),
        "2 ** bits codes have 2 ** bits - 1 steps between them.": dict(gaps=0),
        "A group has a step and a low for each output, not one for all.": dict(shared=True),
        "The last group of a column may be shorter; nothing is added to it.": dict(padded=True),
    },
    forbid=_RTN,
)


# --- 2: codes from the highest bit down

check_bit_words = Checker(
    "bit_words",
    hint="Bit k of a row's stream is bit 31 - k % 32 of word k // 32; of a code the highest bit comes first.",
    misconceptions={
        "These words begin at the lowest bit. Here the stream begins at the highest.": partial(Words, mirrored=True),
        "Of each code, the highest bit comes first.": partial(Words, flipped=True),
        "A code may lie in two words: the bits that do not fit continue at the top of the next word.": partial(
            Words, crosses=False
        ),
        "Each row starts a new word.": partial(Words, rows=False),
        "After >> keep one bit by & 1: the word may be negative.": partial(Words, signed=True),
    },
    forbid=_PACKING,
)


@check_bit_words.part("example")
def _words_example(case: Case) -> None:
    _streams(case, 4, torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]))
    _streams(case, 5, torch.arange(1, 8)[None])


@check_bit_words.part("edges")
def _words_edges(case: Case) -> None:
    for bits, count in ((1, 33), (3, 11), (6, 16), (7, 1), (8, 4), (16, 3), (12, 8)):
        _streams(case, bits, torch.full((2, count), 2**bits - 1))
        _streams(case, bits, torch.zeros(1, count, dtype=torch.int64))
        _streams(case, bits, case.randint(0, 2**bits, 3, count))
    _streams(case, 5, torch.zeros(2, 0, dtype=torch.int64))
    _streams(case, 5, torch.zeros(0, 9, dtype=torch.int64))
    _streams(case, 3, case.randint(0, 8, 22, 5).T)  # not contiguous
    packer, other = case.run(case.student, 3), case.run(case.student, 5)
    codes = [case.randint(0, 8, 2, count) for count in (40, 9, 9)]
    words = [case.run(packer.pack, some) for some in codes]
    for some, packed in zip(codes, words):
        told = f"{some.shape[1]} codes a row of the first of two packers, unpacked after others were packed"
        case.equal(case.run(packer.unpack, packed, some.shape[1]), some, told, hint="Two objects share nothing.")
    case.equal(case.run(other.pack, codes[1]), Words(5).pack(codes[1]), "the words of the second packer")
    for wrong in ([[8]], [[1, -1]], [[1, 2], [7, 8]]):
        case.raises(ValueError, packer.pack, torch.tensor(wrong), hint="Three bits hold 0 to 7.")
    for words, count in ((1, 11), (3, 21), (1, 0), (0, 1)):
        hint = f"{count} codes of 3 bits take {-(-count * 3 // 32)} words a row."
        case.raises(ValueError, packer.unpack, torch.zeros(2, words, dtype=torch.int32), count, hint=hint)


@check_bit_words.part("random")
def _words_random(case: Case) -> None:
    for _ in range(30):
        bits = case.randint(1, 17)
        _streams(case, bits, case.randint(0, 2**bits, case.randint(1, 5), case.randint(1, 70)))
    many = case.randint(0, 8, 8000, 1000)
    packer = case.run(case.student, 3)
    with within(case, "eight million codes", "No loop over single codes: split all of them into bits at once."):
        words = packer.pack(many)
        back = packer.unpack(words.flip(0), many.shape[1])
    case.equal(words[:9], Words(3).pack(many[:9]), "the words of eight million codes, the first rows,", dtypes=True)
    case.equal(back, many.flip(0), "eight million codes, packed, and unpacked with the last row first,", dtypes=True)


def _streams(case: Case, bits: int, codes: Tensor) -> None:
    rows, count = codes.shape
    packer, told = case.run(case.student, bits), f"(bits={bits}, {count} codes in each of {rows} rows)"
    words = case.run(packer.pack, codes)
    case.equal(words, Words(bits).pack(codes), f"the words {told}", dtypes=True)
    noisy, left = words.clone(), words.shape[1] * 32 - count * bits
    if left and rows:
        noisy[:, -1] |= 2**left - 1  # what is left over may hold anything
    back = case.run(packer.unpack, noisy, count)
    case.equal(back, codes.contiguous(), f"the codes that unpack returns {told}", dtypes=True)
    others = case.randint(0, 2**bits, rows, count)
    back = case.run(packer.unpack, Words(bits).pack(others), count)
    told = f"the codes of words that this object has not packed {told}"
    case.equal(back, others, told, hint="`unpack` reads the codes out of the words.", dtypes=True)


# --- 4: mxfp4


def _mx_edges(draw: Draw) -> list[tuple]:
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    ties = (table[1:] + table[:-1]) / 2
    edges = [
        torch.cat([ties, -ties, torch.tensor([4.0]), torch.zeros(17)])[None],
        torch.cat([ties * 2.0**-20, torch.tensor([2.0**-18]), torch.zeros(24)])[None],
        torch.zeros(2, 64),
        -torch.zeros(1, 32),
        torch.cat([torch.tensor([4.0, -0.1, -0.0, 0.1]), torch.zeros(28)])[None],
        torch.cat([torch.full((1, 32), 100.0), torch.full((1, 32), 0.01)], 1),  # each block its own
        draw.randn(64, 3).T,
    ]
    beyond, extreme = (7.0, 7.9999995, 8.0, -7.5, 1.9999999, 3.0000002, 5.0), (3e38, 1e-38, 1e-45, 2.0**-126)
    for most, others in (*((most, abs(most) / 3) for most in beyond), *zip(extreme, extreme)):
        edges += [torch.cat([torch.tensor([most]), torch.linspace(-1, 1, 31) * others])[None]]
    return [(x,) for x in edges]


def _random_mx(draw: Draw) -> tuple:
    x = draw.randn(draw.randint(1, 4), 32 * draw.randint(1, 5)) * 10.0 ** draw.randint(-6, 6)
    return ((4 * x / x.abs().max()).round() / 4 + 0.0 if draw.rng.random() < 0.5 else x,)  # many ties, or few


def _first_block(got: tuple, expected: tuple, x: Tensor) -> str:
    """What is in the first block that is wrong."""
    wrong = (got[0] != expected[0]).view(len(x), -1, 16).any(-1) | (got[1] != expected[1])
    row, place = wrong.nonzero().tolist()[0]
    block = x[row, 32 * place : 32 * place + 32]
    begins = ", ".join(f"{value:.8g}" for value in block[:6].tolist())
    codes = [f"{byte >> 4}, {byte & 15}" for byte in expected[0][row, 16 * place : 16 * place + 3].tolist()]
    return (
        f"Row {row}, block {place} begins {begins}, and {block.abs().max():.8g} is its largest magnitude: "
        f"exponent {int(expected[1][row, place])}, codes {', '.join(codes)}, ..."
    )


check_to_mxfp4 = FunctionChecker(
    "to_mxfp4",
    mx,
    returns=("packed", "exponents"),
    examples=[
        (torch.cat([torch.tensor([6.0, -3.0, 0.6, 0.2, 1.1, -0.5, 4.4, 2.1]), torch.zeros(24)])[None],),
    ],
    edges=_mx_edges,
    random=_random_mx,
    explain=_first_block,
    misconceptions={
        "The first of two weights is in the upper four bits of the byte.": dict(swapped=True),
        "Bit 3 is the sign bit of x, also for -0.0 and for what rounds to zero: torch.signbit.": dict(
            negative=lambda block: block < 0
        ),
        "A block of zeros stores 0.": dict(zeros=127),
        "For so small a block, clamp the exponent at -127 before you add 127 and convert it to uint8.": dict(
            least=-1000
        ),
        "The largest power of two in the table is 4: subtract 2 from the logarithm of the largest.": dict(below=0),
        "Is the logarithm exact? torch.log2 rounds, next to a power of two and among the smallest numbers.": dict(
            exact=False
        ),
        "The standard takes the floor of the logarithm, even if the largest becomes 6 then.": dict(up=True),
        "These ties go to the smaller value. A tie takes the even index: 0.75 becomes 1, and so does 1.25.": dict(
            order=lambda place: place
        ),
        "These ties go to the larger value. A tie takes the even index: 0.75 becomes 1, and so does 1.25.": dict(
            order=lambda place: -place
        ),
        "Each block of 32 has an exponent of its own.": dict(shared=True),
    },
    forbid=_RTN + _FORMATS,
)
