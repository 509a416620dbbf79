"""Checks of chapter 16: a fast rotation of blocks, a layer in rotated coordinates. Built in chapter 16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.book.checks import Draw, FunctionChecker, Timed
from minillm.book.checks.compare import same

PACKAGE = "minillm.quantization.hadamard"


# 6 · a rotation of blocks, without a matrix


def _matrix(size: int) -> Tensor:
    if size > 4096:
        raise MemoryError(f"a matrix of {size} x {size} is too large")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotated_blocks(
    x: Tensor,
    signs: Tensor,
    block: int,
    *,
    scale: Callable[[int], float] = lambda block: block**-0.5,
    signs_first: bool = True,
    strided: bool = False,
    all_levels: bool = True,
    checked: bool = True,
) -> Tensor:
    """By the matrix of a block; the keywords are mistakes."""
    size = x.shape[1]
    if checked and (block < 1 or block & (block - 1) or size % block):
        raise ValueError(f"block={block} is no power of two that divides {size}")
    y = (x * signs if signs_first else x).reshape(len(x), size // block, block)
    if strided:
        y = (x * signs).view(len(x), block, size // block).transpose(1, 2)
    matrix = (
        _matrix(block) if all_levels else torch.kron(torch.eye(max(1, block // 2)).double(), _matrix(min(2, block)))
    )
    y = y @ matrix * scale(block)
    y = (y.transpose(1, 2) if strided else y).reshape(len(x), size)
    return y if signs_first else y * signs


def _signs(draw: Draw, size: int) -> Tensor:
    return draw.randint(0, 2, size).double() * 2 - 1


def _block_edges(draw: Draw) -> Iterator[tuple]:
    yield draw.randn(2, 8).double(), _signs(draw, 8), 1  # only the signs are left
    yield draw.randn(3, 16).double(), _signs(draw, 16), 16  # one block
    yield torch.eye(4).double(), torch.ones(4).double(), 4  # the matrix itself
    yield torch.zeros(0, 8).double(), _signs(draw, 8), 4
    yield draw.randn(24, 5).double().T, _signs(draw, 24), 8  # not contiguous, and 24 is no power of two
    for size, block in ((24, 16), (24, 3), (24, 0), (8, 16), (12, -4)):
        yield draw.randn(2, size).double(), _signs(draw, size), block


def _block_random(draw: Draw) -> tuple:
    block = 2 ** draw.randint(0, 7)
    size = block * draw.randint(1, 6)
    return draw.randn(draw.randint(1, 5), size).double(), _signs(draw, size), block


_LONG = 2**16
_BUTTERFLIES = "A matrix of 65,536 rows and columns takes 34 GB. Add and subtract halves: 16 levels of n additions."


def _long(draw: Draw) -> tuple:
    return torch.eye(1, _LONG, dtype=torch.float64), torch.ones(_LONG, dtype=torch.float64), _LONG


check_rotate_blocks = FunctionChecker(
    "rotate_blocks",
    rotated_blocks,
    hint="Signs, then for half = 1, 2, 4, ... below block: of each pair of runs of `half`, the sum and the difference.",
    examples=[
        (
            torch.tensor([[8.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0]]).double(),
            torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 1.0, 1.0]).double(),
            4,
        )
    ],
    edges=_block_edges,
    random=_block_random,
    raises=(ValueError,),
    returns="the rotated rows",
    atol=1e-9,
    rtol=1e-9,
    timed=(
        Timed(
            "one row of 65,536 numbers",
            _long,
            _BUTTERFLIES,
            expected=lambda x, signs, block: torch.full_like(x, 1 / 256),
        ),
    ),
    misconceptions={
        "A rotation preserves lengths: divide by the square root of the block.": dict(scale=lambda block: 1.0),
        "By the square root of the block, not by the block.": dict(scale=lambda block: 1 / block),
        "By the square root of the block, not of the row.": lambda x, signs, block: (
            rotated_blocks(x, signs, block) * (block / max(1, x.shape[1])) ** 0.5
        ),
        "The signs come first: x diag(signs) H.": dict(signs_first=False),
        "A block is a run of neighbouring numbers.": dict(strided=True),
        "One level of sums and differences mixes pairs only; half doubles until it reaches the block.": dict(
            all_levels=False
        ),
    },
    forbid=(f"{PACKAGE}.hadamard_transform", f"{PACKAGE}.Rotation", f"{PACKAGE}.paley_matrix"),
)


# 7 · a layer in rotated coordinates

Layer = dict[str, Tensor]


def half_layer(layer: Layer, h: Tensor) -> Tensor:
    """What the MLP's half of a decoder layer makes of the residual stream h [num_tokens, hidden]."""
    n = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer["norm"]
    up = n @ layer["up"].T + layer["up_bias"]
    return h + (F.silu(n @ layer["gate"].T) * up) @ layer["down"].T + layer["down_bias"]


def rotated(layer: Layer, q: Tensor) -> Layer:
    """The same half of a layer, of a stream h @ q."""
    gain = layer["norm"]
    return {
        "norm": torch.ones_like(gain),
        "gate": (layer["gate"] * gain) @ q,
        "up": (layer["up"] * gain) @ q,
        "up_bias": layer["up_bias"],
        "down": q.T @ layer["down"],
        "down_bias": layer["down_bias"] @ q,
    }


def _orthogonal(draw: Draw, size: int) -> Tensor:
    return torch.linalg.qr(draw.randn(size, size).double())[0]


def _layer(draw: Draw, hidden: int, inner: int) -> Layer:
    shapes = dict(norm=(hidden,), gate=(inner, hidden), up=(inner, hidden), up_bias=(inner,), down=(hidden, inner))
    return {name: draw.randn(*shape).double() for name, shape in (shapes | {"down_bias": (hidden,)}).items()}


def _layer_edges(draw: Draw) -> Iterator[tuple]:
    yield _layer(draw, 4, 4), _orthogonal(draw, 4)  # square: nothing but the side tells them apart
    yield _layer(draw, 4, 6), torch.eye(4).double()  # only the gain moves
    yield _layer(draw, 3, 2), torch.eye(3).double()[[1, 2, 0]]  # a permutation is a rotation, too
    yield _layer(draw, 4, 3), _matrix(4) / 2  # symmetric: here Q and its transpose are the same
    yield _layer(draw, 1, 2), -torch.ones(1, 1).double()
    layer = _layer(draw, 4, 5)
    layer["norm"][2] = 0.0
    yield layer, _orthogonal(draw, 4)


def _layer_random(draw: Draw) -> tuple:
    hidden = draw.randint(2, 9)
    return _layer(draw, hidden, draw.randint(1, 9)), _orthogonal(draw, hidden)


_ROTATED = {
    "norm": "The gain is in the products now; what is left of the norm is ones.",
    "gate": "gate reads the stream: first its columns times the gain, then @ Q. In the other order the gain would "
    "scale rotated channels.",
    "up": "up reads the stream, like gate: its columns times the gain, then @ Q. Its rows are inside the MLP.",
    "up_bias": "up_bias is added inside the MLP, where nothing is rotated.",
    "down": "down writes into the stream: its output has to be rotated, y @ Q, so its rows are: Q.T @ down.",
    "down_bias": "down_bias is added to the stream, which is rotated.",
}


def _rotated_as(**wrong) -> Callable[[Layer, Tensor], Layer]:
    """`rotated` with some of its results computed as `wrong` says, from the layer and Q."""

    def rotate(layer: Layer, q: Tensor) -> Layer:
        return rotated(layer, q) | {name: made(layer, q) for name, made in wrong.items()}

    return rotate


check_rotate_layer = FunctionChecker(
    "rotate_layer",
    rotated,
    hint="What reads the stream takes the gain, then Q, on its columns; what writes into it is rotated on its rows.",
    examples=lambda draw: [(_layer(draw, 3, 4), _orthogonal(draw, 3))],
    edges=_layer_edges,
    random=_layer_random,
    trials=20,
    returns="the layer",
    atol=1e-9,
    rtol=1e-9,
    misconceptions={
        "Q and its transpose are not the same: (h @ Q) @ W.T is h @ (W @ Q.T).T, so W becomes W @ Q.": _rotated_as(
            gate=lambda layer, q: (layer["gate"] * layer["norm"]) @ q.T,
            up=lambda layer, q: (layer["up"] * layer["norm"]) @ q.T,
        ),
        _ROTATED["norm"]: _rotated_as(norm=lambda layer, q: layer["norm"]),
        _ROTATED["gate"]: _rotated_as(
            gate=lambda layer, q: (layer["gate"] @ q) * layer["norm"],
            up=lambda layer, q: (layer["up"] @ q) * layer["norm"],
        ),
        _ROTATED["up"]: _rotated_as(up=lambda layer, q: layer["up"] @ q),
        _ROTATED["up_bias"]: _rotated_as(up_bias=lambda layer, q: layer["up_bias"].flip(0) * 2),
        _ROTATED["down"]: _rotated_as(down=lambda layer, q: q @ layer["down"]),
        _ROTATED["down_bias"]: _rotated_as(down_bias=lambda layer, q: layer["down_bias"]),
    },
    explain=lambda got, expected, layer, q: next(
        (hint for name, hint in _ROTATED.items() if not same(got[name], expected[name], 1e-9, 1e-9)), None
    ),
    forbid=tuple(
        f"minillm.model.rotation.{name}" for name in ("rotate_rows", "rotate_inputs", "rotate_outputs", "rotate_layer")
    ),
)
