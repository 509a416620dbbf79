"""Checks of chapter 15: columns in groups, codes from the highest bit down, a budget of bytes, mxfp4.
Built in chapter 15.

`ch15_budget` has the budget of bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch15_budget import check_choose_options
from minillm.book.checks.ch15_oracle import Option, columns, mx, words_of
from minillm.book.checks.patience import within

__all__ = ["Option", "check_bit_words", "check_choose_options", "check_quantize_columns", "check_to_mxfp4"]


_RTN = tuple(f"minillm.quantization.rtn.{name}" for name in ("round_to_nearest", "choose_scales", "encode"))
_PACKING = (
    *tuple(f"minillm.quantization.formats.{name}" for name in ("pack_codes", "unpack_codes")),
    *tuple(f"minillm.model.{module}.unpack_words" for module in ("hub_format", "hub_formats", "compressed_tensors")),
)
_FORMATS = ("minillm.quantization.formats.Format", "minillm.quantization.formats.FORMATS")

check_quantize_columns = Checker(
    "quantize_columns",
    hint=(
        "A group is weight[start:start + group]; its maximum and minimum are over dimension 0, its places are float32."
    ),
    forbid=_RTN,
)
check_bit_words = Checker(
    "bit_words",
    hint="Bit k of a row's stream is bit 31 - k % 32 of word k // 32; of a code the highest bit comes first.",
    forbid=_PACKING,
)
check_to_mxfp4 = Checker(
    "to_mxfp4",
    hint="The exponent from the largest of the block, then the nearest of eight values, ties to the even place.",
    forbid=_RTN + _FORMATS,
)


@check_quantize_columns.part("example")
def _columns_example(case: Case) -> None:
    weight = torch.tensor([[0.0, 1.0], [1.0, 1.5], [3.0, 4.0], [-2.0, 0.5], [0.5, 0.5]])
    _quantizes(case, weight, 2, 3)


@check_quantize_columns.part("edges")
def _columns_edges(case: Case) -> None:
    _quantizes(case, torch.full((6, 2), 0.25), 4, 3)  # a step of 0
    _quantizes(case, torch.tensor([[0.0], [0.5], [1.5], [2.5], [3.0]]), 2, 5)  # ties
    _quantizes(case, torch.tensor([[0.10001, -3.3], [0.1, 7.7], [0.7, 0.0]]), 3, 3)  # below the rounded low
    _quantizes(case, torch.tensor([[1000.2], [1000.25], [1000.2]]), 2, 3)  # all of it above the rounded low
    _quantizes(case, torch.tensor([[1000.3], [1000.4], [1000.5]]), 2, 3)  # and below it
    _quantizes(case, torch.tensor([[4.1], [4.1155], [4.13]]), 2, 3)  # another code for the unrounded low
    _quantizes(case, case.randn(7, 3), 4, 7)
    _quantizes(case, case.randn(7, 3), 4, 100)  # one group, shorter than `group`
    _quantizes(case, case.randn(9, 1), 8, 4)
    _quantizes(case, case.randn(5, 4), 3, 1)  # a group for each weight
    _quantizes(case, case.randn(8, 5), 1, 4)
    _quantizes(case, 1e-9 * case.randn(6, 2), 4, 3)  # a step that float16 cannot tell from 0
    _quantizes(case, case.randn(6, 10).T, 4, 4)  # not contiguous


@check_quantize_columns.part("random")
def _columns_random(case: Case) -> None:
    for _ in range(25):
        size, outputs = case.randint(1, 70), case.randint(1, 6)
        weight = case.randn(size, outputs) * 10.0 ** case.randint(-3, 2) + case.rng.choice((0.0, 1.0, -4.0))
        _quantizes(case, weight, case.randint(1, 9), case.randint(1, 40))


def _quantizes(case: Case, weight: Tensor, bits: int, group: int) -> None:
    got = case.call(weight, bits, group)
    told = f"for {weight.shape[0]} inputs, {weight.shape[1]} outputs, bits={bits}, group={group}"
    case.true(isinstance(got, tuple) and len(got) == 3, f"the result {told} is not a tuple (codes, steps, lows)")
    groups = -(-len(weight) // group)
    shapes = {"codes": list(weight.shape), "steps": [groups, weight.shape[1]], "lows": [groups, weight.shape[1]]}
    for (name, shape), tensor in zip(shapes.items(), got):
        case.is_a(tensor, torch.uint8 if name == "codes" else torch.float16, name, hint="")
        case.equal(
            list(tensor.shape),
            shape,
            f"the shape of {name} {told}",
            hint="Inputs come first; a group is some inputs of one output, and the last one may be shorter.",
        )
    codes, steps, lows = columns(weight, bits, group, lambda places: torch.floor(places + 0.5))
    case.equal(got[2], lows, f"lows {told}\n  lows", hint="The smallest weight of the group, in float16.")
    case.equal(
        got[1],
        steps,
        f"steps {told}\n  steps",
        hint="(largest - smallest) / (2 ** bits - 1), rounded once, to float16.",
    )
    case.equal(got[0].long(), codes.long(), f"codes {told}\n  codes", hint=_codes_hint(got[0], weight, bits, group))


def _codes_hint(codes: Tensor, weight: Tensor, bits: int, group: int) -> str | None:
    up = lambda places: torch.floor(places + 0.5)
    steps = columns(weight, bits, group, up)[1].repeat_interleave(group, 0)[: len(weight)]
    if (codes[steps == 0] > 0).any():
        return "Where the step in float16 is 0, all codes are 0; a division by it must not reach them."
    mistakes = {
        "Ties go up: torch.floor(x + 0.5). torch.round takes them to the even number.": dict(nearest=torch.round),
        "They fit the unrounded step or low; whoever reads the weights has the float16 ones.": dict(
            nearest=up, rounded=False
        ),
        "These are cut off below the point, not rounded to the nearest.": dict(nearest=torch.floor),
        "A place below 0 or above 2 ** bits - 1 must be cut off; as a uint8 it wraps around.": dict(
            nearest=up, ends=False
        ),
        "Steps and lows are kept in float16, but the places are computed in float32: .float() first.": dict(
            nearest=up, dtype=torch.float16
        ),
    }
    for hint, arguments in mistakes.items():
        if torch.equal(columns(weight, bits, group, **arguments)[0], codes):
            return hint
    return None


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
    packer = case.run(case.student, 3)
    for wrong in ([[8]], [[1, -1]]):
        case.raises(ValueError, packer.pack, torch.tensor(wrong), hint="Three bits hold 0 to 7.")
    for words, count in ((1, 11), (3, 21), (1, 0), (0, 1)):
        case.raises(
            ValueError,
            packer.unpack,
            torch.zeros(2, words, dtype=torch.int32),
            count,
            hint=f"{count} codes of 3 bits take {-(-count * 3 // 32)} words a row.",
        )


@check_bit_words.part("random")
def _words_random(case: Case) -> None:
    for _ in range(30):
        bits = case.randint(1, 17)
        _streams(case, bits, case.randint(0, 2**bits, case.randint(1, 5), case.randint(1, 70)))
    many = case.randint(0, 8, 8000, 1000)
    with within(case, "eight million codes", "No loop over single codes: take all of them apart into bits at once."):
        _streams(case, 3, many, oracle=False)


def _streams(case: Case, bits: int, codes: Tensor, oracle: bool = True) -> None:
    rows, count = codes.shape
    packer = case.run(case.student, bits)
    words = case.run(packer.pack, codes)
    told = f"bits={bits}, {count} codes in each of {rows} rows"
    num_words = -(-count * bits // 32)
    case.is_a(words, torch.int32, f"what pack returns ({told})", hint="")
    case.equal(
        list(words.shape),
        [rows, num_words],
        f"the shape of the words ({told})",
        hint="Each row starts a new word; ceil(count * bits / 32) of them.",
    )
    if oracle:
        expected = words_of(codes, bits)
        case.equal(words, expected, f"the words ({told})", hint=_words_hint(words, codes, bits))
    noisy, left = words.clone(), num_words * 32 - count * bits
    if left and rows:
        noisy[:, -1] |= 2**left - 1  # what is left over may hold anything
    back = case.run(packer.unpack, noisy, count)
    case.is_a(back, torch.int64, f"what unpack returns ({told})", hint="")
    case.equal(
        back,
        codes.contiguous(),
        f"the codes that unpack returns ({told})",
        hint="The word may be negative: after >> keep one bit by & 1. And only count * bits bits of a row are codes.",
    )


def _words_hint(words: Tensor, codes: Tensor, bits: int) -> str | None:
    mirrored = torch.tensor(
        [[int(f"{word & 0xFFFFFFFF:032b}"[::-1], 2) for word in row] for row in words.tolist()], dtype=torch.int64
    )
    flipped = torch.tensor(
        [[int(f"{code:0{bits}b}"[::-1], 2) for code in row] for row in codes.tolist()], dtype=torch.int64
    ).view_as(codes)
    as_words = lambda x: torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)
    if codes.numel() and torch.equal(as_words(mirrored.view_as(words)), words_of(flipped, bits)):
        return "These words begin at the lowest bit. Here the stream begins at the highest."
    if codes.numel() and torch.equal(words, words_of(flipped, bits)):
        return "Of each code, the highest bit comes first."
    per_word = 32 // bits
    if 32 % bits and torch.equal(
        words[:, :1].long() & 0xFFFFFFFF, (words_of(codes[:, :per_word], bits)[:, :1].long() & 0xFFFFFFFF)
    ):
        return "Codes cross the borders of words: what does not fit goes on at the top of the next word."
    return None


@check_to_mxfp4.part("example")
def _mx_example(case: Case) -> None:
    _writes(case, torch.cat([torch.tensor([6.0, -3.0, 0.6, 0.2, 1.1, -0.5, 4.4, 2.1]), torch.zeros(24)])[None])


@check_to_mxfp4.part("edges")
def _mx_edges(case: Case) -> None:
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    ties = (table[1:] + table[:-1]) / 2
    _writes(case, torch.cat([ties, -ties, torch.tensor([4.0]), torch.zeros(17)])[None])
    _writes(case, torch.cat([ties * 2.0**-20, torch.tensor([2.0**-18]), torch.zeros(24)])[None])
    _writes(case, torch.zeros(2, 64))
    _writes(case, -torch.zeros(1, 32))
    _writes(case, torch.cat([torch.tensor([4.0, -0.1, -0.0, 0.1]), torch.zeros(28)])[None])
    for most in (7.0, 7.9999995, 8.0, -7.5, 1.9999999, 3.0000002, 5.0):  # beyond 6, and powers of two
        _writes(case, torch.cat([torch.tensor([most]), torch.linspace(-1, 1, 31) * abs(most) / 3])[None])
    for most in (3e38, 1e-38, 1e-45, 2.0**-126):
        _writes(case, torch.cat([torch.tensor([most]), torch.linspace(-1, 1, 31) * most])[None])
    _writes(case, torch.cat([torch.full((1, 32), 100.0), torch.full((1, 32), 0.01)], 1))  # each block its own
    _writes(case, case.randn(64, 3).T)


@check_to_mxfp4.part("random")
def _mx_random(case: Case) -> None:
    for _ in range(20):
        x = case.randn(case.randint(1, 4), 32 * case.randint(1, 5)) * 10.0 ** case.randint(-6, 6)
        _writes(case, x)
        steps = (4 * x / x.abs().max()).round() / 4 + 0.0  # many ties
        _writes(case, steps)


def _writes(case: Case, x: Tensor) -> None:
    got = case.call(x)
    case.true(isinstance(got, tuple) and len(got) == 2, "the result is not a tuple (packed, exponents)", hint="")
    shapes = ([x.shape[0], x.shape[1] // 2], [x.shape[0], x.shape[1] // 32])
    for name, tensor, shape in zip(("packed", "exponents"), got, shapes):
        case.is_a(tensor, torch.uint8, name, hint="")
        case.equal(list(tensor.shape), shape, f"the shape of {name}")
    codes, exponents = mx(x)
    found, stored = torch.stack([got[0] >> 4, got[0] & 15], -1).flatten(1).int(), got[1].int()
    case.equal(
        stored, exponents, f"exponents {_block(x, stored != exponents)}\n  exponents", hint=_exponent_hint(stored, x)
    )
    wrong = (found != codes).view(len(x), -1, 32).any(-1)
    case.equal(found, codes, f"codes {_block(x, wrong)}; unpacked, upper half first\n  codes", hint=_mx_hint(found, x))


def _block(x: Tensor, wrong: Tensor) -> str:
    """Where the first wrong block is, and what is in it; `wrong` is [num_rows, blocks]."""
    row, place = (wrong.nonzero().tolist() or [[0, 0]])[0]
    block = x[row, 32 * place : 32 * place + 32]
    begins = ", ".join(repr(round(value, 7) if abs(value) > 1e-3 else value) for value in block[:5].tolist())
    return (
        f"of {x.shape[0]} x {x.shape[1]}, first in row {row}, block {place}, which begins {begins}; "
        f"largest magnitude {float(block.abs().max())!r}"
    )


def _exponent_hint(found: Tensor, x: Tensor) -> str | None:
    right = mx(x)[1]
    most = x.double().view(len(x), -1, 32).abs().amax(-1)
    wrong = found != right
    if bool((most[wrong] == 0).all()):
        return "A block of zeros stores 0."
    if bool((most[wrong] < 2.0**-124).all()):
        return "Of so small a block the exponent is cut off, at -127, before 127 is added and it becomes a uint8."
    if bool((found - right).unique().numel() == 1) and int((found - right).flatten()[0]) == 2:
        return "The largest value of the table is between 4 and 8: two less than the logarithm of the block's largest."
    for up in (torch.ceil(torch.log2(most / 6)), torch.ceil(torch.log2(most)) - 2):
        clear = (most > 0) & (torch.frexp(most * (1 + 1e-5)).exponent == torch.frexp(most * (1 - 1e-5)).exponent)
        if bool((clear & wrong).any()) and torch.equal(found[clear], (up.clamp(-127, 125) + 127).int()[clear]):
            return (
                "The standard takes the floor of the logarithm, even if the largest is cut off at 6 then. "
                "This is the next power up."
            )
    near = (found - right).abs().max() <= 1
    return (
        (
            "Is the logarithm exact? torch.log2 rounds, next to a power of two and among the smallest numbers; "
            "torch.frexp does not. And it is the floor."
        )
        if near
        else None
    )


def _mx_hint(found: Tensor, x: Tensor) -> str | None:
    swapped = found.view(-1, 2).flip(1).view(found.shape)
    codes = mx(x)[0]
    if torch.equal(swapped, codes):
        return "The first weight of two is the upper half of the byte."
    if torch.equal(found & 7, codes & 7):
        return "The fourth bit is the sign bit of x, of -0.0 and of what rounds to zero too: torch.signbit."
    for ties, hint in (("down", "These ties go to the smaller value."), ("up", "These ties go to the larger value.")):
        if torch.equal(found, mx(x, ties)[0]):
            return f"{hint} They go to the even place: 0.75 to 1, but 1.25 to 1 too."
    return None
