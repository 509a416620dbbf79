"""Checks of chapter 15: nvfp4, with scales of two levels. Built in chapter 15."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4(
    x: Tensor,
    *,
    of_tensor: Callable[[Tensor], Tensor] = lambda x: x.abs().max() / 2688,
    kept: Callable[[Tensor], Tensor] = lambda scale: scale.float().to(torch.float8_e4m3fn),
    block: int = 16,
    order: Callable[[int], int] = lambda place: place % 2,
    rounded: bool = True,
    low_first: bool = True,
    signs_of_zeros: bool = False,
    of_a_row: bool = False,
    negative: Callable[[Tensor], Tensor] = torch.signbit,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, the blocks' scales and the tensor's, one number at a time; the keywords are mistakes."""
    x = x.double()
    whole = of_tensor(x).float()
    whole = torch.where(whole == 0, torch.ones_like(whole), whole)
    scales, codes = [], []
    for row in x:
        told = of_tensor(row).float() if of_a_row and row.any() else whole
        of_row = [kept(part.abs().max() / 6 / told.double()) for part in row.split(block)]
        scales.append(torch.stack(of_row).repeat_interleave(block // 16))
        for part, scale in zip(row.split(block), of_row):
            exact = part.abs().max() / 6 if not rounded else scale.double() * told.double()
            for value in part.tolist():
                if float(scale.float()) == 0:
                    codes.append(8 * (value < 0) if signs_of_zeros else 0)
                    continue
                place = min(
                    range(8),
                    key=lambda i, value=value, exact=exact: (
                        abs(_VALUES[i] - abs(value) / float(exact or 1)),
                        order(i),
                    ),
                )
                codes.append(place + 8 * bool(negative(torch.tensor(value))))
    halves = torch.tensor(codes, dtype=torch.uint8).view(len(x), -1, 2).flip(() if low_first else 2)
    return halves[..., 0] | halves[..., 1] << 4, torch.stack(scales), whole


def _edges(draw: Draw) -> list[tuple]:
    """2688 = 6 · 448 and its powers of two: the tensor's scale is exact, and ties are ties."""
    table = torch.tensor(_VALUES)
    ties = (table[1:] + table[:-1]) / 2
    first = torch.cat([torch.tensor([2688.0]), torch.zeros(15)])
    ones = torch.cat([torch.tensor([6.0]), ties, -ties, torch.tensor([-6.0])])
    blocks = [first, ones, 1.0625 * ones, 1.4 * ones, -0.0 * ones, 2.0**-11 * ones, 2.0**-9 * ones]
    minus_zeros = torch.cat([torch.tensor([6.0, -0.0, -0.1, 0.0]), torch.zeros(12)])
    return [
        (torch.cat(blocks)[None],),  # scales of 448, 1, two between codes of e4m3, 0, one that rounds to 0, the least
        (torch.cat(blocks)[None] * 2.0**-30,),
        (torch.stack([torch.cat([first, ones]), torch.cat([ones, 2 * ones])]),),  # one tensor scale for all rows
        (torch.cat([first, minus_zeros])[None],),
        (_close_calls(),),
        (torch.zeros(2, 32),),
        (-torch.zeros(1, 16),),
        (torch.cat([-first[:1], first[1:] + 0.01])[None],),  # the largest is negative
        (draw.randn(48, 3).T,),
        (1e30 * draw.randn(2, 16),),
    ]


def _close_calls() -> Tensor:
    """Next to ties, where float32 is not exact enough: of weights between two values of the table, and of block scales
    between two numbers of e4m3. The tensor's scale is no power of two."""
    table = torch.tensor(_VALUES, dtype=torch.float64)
    ties, scale = (table[1:] + table[:-1]) / 2, (torch.tensor(5.5).double() / 2688).float().double()
    blocks = [torch.cat([torch.tensor([5.5]), torch.zeros(15)])]
    for place in range(8, 16):
        weights = (torch.cat([table[-1:], ties]) * scale * place / 8).float()
        up = torch.nextafter(weights[1:], torch.tensor(torch.inf))
        between = (6 * scale * (place + 0.5) / 8).float()
        tops = torch.stack([between, torch.nextafter(between, torch.tensor(0.0))])
        blocks += [torch.cat([weights, up, torch.zeros(1)]), *(torch.cat([top[None], torch.zeros(15)]) for top in tops)]
    return torch.cat(blocks)[None]


def _random(draw: Draw) -> tuple:
    sizes = 10.0 ** draw.randn(1, draw.randint(1, 6), 1)
    x = draw.randn(draw.randint(1, 4), sizes.shape[1], 16) * sizes * 10.0 ** draw.randint(-6, 6)
    return (x.flatten(1),)


def _first_block(got: tuple, expected: tuple, x: Tensor) -> str | None:
    if got[2] != expected[2]:
        return None
    if (other := got[1].float() != expected[1].float()).any():
        row, place = other.nonzero().tolist()[0]
        most = x[row, 16 * place : 16 * place + 16].double().abs().max()
        exact, right = float(most / 6 / expected[2].double()), float(expected[1][row, place].float())
        return (
            f"Row {row}, block {place}: its largest magnitude is {most:.8g}; in float64 (m / 6) / g is {exact:.10g}, "
            f"and the nearest e4m3 number is {right:g}."
        )
    wrong = (got[0] != expected[0]).view(len(x), -1, 8).any(-1)
    row, place = wrong.nonzero().tolist()[0]
    block, scale = x[row, 16 * place : 16 * place + 16], float(expected[1][row, place].float())
    begins = ", ".join(f"{value:.8g}" for value in block[:6].tolist())
    codes = [f"{byte & 15}, {byte >> 4}" for byte in expected[0][row, 8 * place : 8 * place + 3].tolist()]
    return (
        f"Row {row}, block {place} begins {begins}; with the scales {scale:g} and {float(expected[2]):.8g} its codes "
        f"are {', '.join(codes)}, ..."
    )


def _power_of_two(scale: Tensor) -> Tensor:
    return torch.exp2(scale.clamp(min=2.0**-9).log2().ceil()).float().to(torch.float8_e4m3fn)


check_to_nvfp4 = FunctionChecker(
    "to_nvfp4",
    nvfp4,
    hint="First one scale for the tensor, then a scale for each block in e4m3, then codes from both rounded scales.",
    returns=("packed", "scales", "tensor_scale"),
    examples=[
        (
            torch.cat(
                [torch.tensor([6.0, -3.0, 0.6, 0.2, 1.1, -0.5, 4.4, 2.1]), torch.zeros(8), torch.full((16,), 100.0)]
            )[None],
        )
    ],
    edges=_edges,
    random=_random,
    explain=_first_block,
    misconceptions={
        "The largest scale of a block becomes 448 and its largest weight 6: divide by 448 · 6 = 2688.": dict(
            of_tensor=lambda x: x.abs().max() / 448
        ),
        "Without the tensor's scale, blocks of small weights have scales below the smallest number of e4m3.": dict(
            of_tensor=lambda x: torch.ones((), dtype=torch.float64)
        ),
        "A power of two is MXFP4's scale. NVFP4 keeps three bits of mantissa: the nearest number of e4m3.": dict(
            kept=_power_of_two
        ),
        "A block has 16 weights; 32 is MXFP4's.": dict(block=32),
        "These codes fit the scale before it was rounded to e4m3; the weights are read with the rounded one.": dict(
            rounded=False
        ),
        "The first of two weights is in the lower four bits of the byte here.": dict(low_first=False),
        "These ties go to the smaller value. A tie takes the even index: 0.75 becomes 1, and so does 1.25.": dict(
            order=lambda place: place
        ),
        "These ties go to the larger value. A tie takes the even index: 0.75 becomes 1, and so does 1.25.": dict(
            order=lambda place: -place
        ),
        "Where the stored scale is 0, all codes are 0, those of negative weights too.": dict(signs_of_zeros=True),
        "Bit 3 is the sign bit of x, also for -0.0: torch.signbit, not x < 0.": dict(negative=lambda value: value < 0),
        "The tensor has one scale, not each row.": dict(of_a_row=True),
    },
    forbid=(
        *(
            f"minillm.quantization.rtn.{name}"
            for name in ("round_to_nearest", "choose_scales", "encode", "two_level_scales")
        ),
        "minillm.quantization.formats.Format",
        "minillm.quantization.formats.FORMATS",
    ),
)
