"""The CPU's kernels compiled for lesser CPUs, against float64 and against the build for this one: products, attention,
a whole layer. In each of them a row has the same bits in any company."""

from __future__ import annotations

from ctypes import pointer
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from minillm.kernels import native
from minillm.kernels.native_build import NO_UNIT
from minillm.kernels.native_structs import Adapters, Layer, LayerAdapters, Matrix, Pages, Sequences
from minillm.model.attention import causal_attention
from minillm.quantization.formats import FORMATS
from tests.kernels.test_kernels_native_draw import test_the_argmax_with_noise as tokens_are_drawn
from tests.kernels.test_kernels_native_quant import (
    ROWS,
    assert_near,
    multiply,
    pack,
    random_weight,
    test_integer_activations_equal_integers_bit_for_bit as integer_activations_are_exact,
    test_rows_unpack_to_the_weight_bit_for_bit as rows_unpack_exactly,
)

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")
FULL = native.library  # the build for this CPU, to compare with
BUILDS = {  # what the compiler leaves out, T, and what pages hold
    "this CPU": ((), torch.bfloat16, None),
    "this CPU, pages of codes": ((), torch.bfloat16, torch.float8_e4m3fn),
    "without a matrix unit": (NO_UNIT, torch.bfloat16, torch.int8),
    "AVX-512 without VBMI": (("-mno-avx512vbmi",), torch.bfloat16, torch.int8),
    "AVX-512 without bfloat16 and VNNI": (("-mno-avx512bf16", "-mno-avx512vnni"), torch.bfloat16, None),
    "AVX2": (("-mno-avx512f",), torch.float32, torch.float8_e4m3fn),
    "AVX2, bfloat16": (("-mno-avx512f",), torch.bfloat16, None),
    "AVX alone": (("-march=sandybridge",), torch.float32, None),
    "no AVX": (("-march=x86-64",), torch.float32, torch.uint8),
}
CUTS = ([1, 2, 3, 6, 8, 50], [69, 1], [9, 33, 28])  # of 70 tokens


@dataclass(frozen=True)
class Build:
    dtype: torch.dtype
    kv_dtype: torch.dtype | None

    def near(self, got: Tensor, expected: Tensor) -> None:
        tolerance = 2e-5 if self.dtype is torch.float32 else 3e-2
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.fixture(scope="module", params=BUILDS.values(), ids=BUILDS)
def build(request):
    flags, dtype, kv_dtype = request.param
    with pytest.MonkeyPatch.context() as patch:  # not while tests run: FULL would keep what it compiles then
        patch.setattr(native, "FLAGS", (*native.FLAGS, *flags))
        built = native.library.__wrapped__(dtype, kv_dtype)
    if built is None:
        pytest.skip(f"the compiler here does not know {' '.join(flags)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda dtype=dtype, kv_dtype=None: built)
        yield Build(dtype, kv_dtype)


def cut(run, count: int, lengths: list[int]) -> Tensor:
    """The results of `count` tokens, so many at a time."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    assert starts[-1] == count
    return torch.cat([run(start, end) for start, end in pairwise(starts)])


def test_lesser_builds_multiply_one_by_one(build, request):
    if "this CPU" not in request.node.name and "matrix unit" not in request.node.name:
        assert native.library().code_pair() == 1


def test_products(build):
    torch.manual_seed(0)
    for out, inputs in ((1, 5), (33, 577), (100, 64), (70, 1216)):
        weight, x = torch.randn(out, inputs).to(build.dtype), torch.randn(70, inputs).to(build.dtype)
        packed = native.pack(weight)
        assert torch.equal(native.unpack(packed, out, inputs), weight)
        together = native.linear(x, packed, None, out)
        build.near(together.double(), x.double() @ weight.double().t())
        for lengths in CUTS:
            assert torch.equal(cut(lambda a, b: native.linear(x[a:b], packed, None, out), 70, lengths), together)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_a_product_with_ones_and_zeros_is_exact(rows, build):
    """Numbers that are taken apart must leave nothing of their neighbours behind."""
    numbers, ones = torch.randn(48, 48).to(build.dtype), torch.eye(48).to(build.dtype)
    packed, packed_ones = native.pack(numbers), native.pack(ones)
    for start in range(0, 48, rows):
        part = slice(start, start + rows)
        assert torch.equal(native.linear(ones[part], packed, None, 48), numbers.t()[part])
        assert torch.equal(native.linear(numbers[part], packed_ones, None, 48), numbers[part])


@pytest.mark.parametrize("rows", [1, 5])
def test_tokens(rows, build):
    tokens_are_drawn(rows, 1000)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("inputs, group", [(77, 16), (520, None), (768, 384)])
def test_products_of_codes(format, inputs, group, build):
    weight = random_weight(format, 35, inputs, group, FORMATS[format].is_integer, True)
    matrix, x = pack(weight, build.dtype), torch.randn(70, inputs).to(build.dtype)
    together = multiply(x, matrix)
    assert_near(together, x, weight)
    for rows in ROWS:
        assert torch.equal(multiply(x[-rows:], matrix), together[-rows:]), rows


def test_integer_activations_and_rows(build):
    integer_activations_are_exact((33, 64), build.dtype)
    for format in FORMATS:
        rows_unpack_exactly(format, build.dtype)


def pages_of(build: Build, blocks: int, kv_heads: int, dim: int, size: int) -> tuple[Tensor, Tensor, tuple | None]:
    """Pages in which nothing is written yet: NaN."""
    dtype = build.kv_dtype or build.dtype
    width = dim // 2 if dtype is torch.uint8 else dim
    keys = torch.empty(blocks + 1, kv_heads, width, size, dtype=dtype)
    values = torch.empty(blocks + 1, kv_heads, size, width, dtype=dtype)
    for part in (keys, values):
        part.view(torch.uint8).fill_(0xFF)
    scales = torch.full((2, blocks + 1, kv_heads, size), float("nan")) if build.kv_dtype else None
    return keys, values, scales


def step(start: int, end: int, size: int, table: Tensor, token_slots: Tensor | None = None) -> Sequences:
    positions = torch.arange(start, end)
    slots = table[positions // size] * size + positions % size
    return Sequences.of(torch.tensor([0, end - start]), torch.tensor([end]), table[None], slots, end, token_slots)


class Prompt:
    """Random queries, keys and values of one sequence, and its block table."""

    def __init__(self, build: Build, count: int, heads: int, kv_heads: int, dim: int, size: int):
        generator = torch.Generator().manual_seed(0)
        self.build, self.count, self.kv_heads, self.size = build, count, kv_heads, size
        self.dim = dim = dim + (build.kv_dtype is torch.uint8 and dim % 2)  # a byte holds two
        shapes = [(count, n, dim) for n in (heads, kv_heads, kv_heads)]
        self.q, self.k, self.v = (torch.randn(*shape, generator=generator).to(build.dtype) for shape in shapes)
        self.turn = torch.randn(2, count, dim, generator=generator) if dim % 2 == 0 else None
        self.table = torch.randperm(-(-count // size), generator=generator) + 1

    def attend(self, lengths: list[int], window: int | None = None, sinks: int = 0) -> Tensor:
        """Of so many tokens at a time."""
        keys, values, scales = pages_of(self.build, len(self.table), self.kv_heads, self.dim, self.size)
        pages = Pages.of(keys, values, scales, window, sinks)

        def run(start: int, end: int) -> Tensor:
            turned = self.turn[:, start:end].contiguous() if sinks and self.turn is not None else None
            tokens = (x[start:end].contiguous() for x in (self.q, self.k, self.v))
            return native.paged_attention(*tokens, pages, step(start, end, self.size, self.table), turned)

        return cut(run, self.count, lengths)


@pytest.mark.parametrize("heads, kv_heads, dim", [(9, 3, 20), (8, 1, 32), (4, 2, 64), (3, 1, 7)])
@pytest.mark.parametrize("size", [3, 16])
def test_attention(heads, kv_heads, dim, size, build, monkeypatch):
    prompt = Prompt(build, 70, heads, kv_heads, dim, size)
    for window, sinks in ((None, 0), (9, 0), (11, 3)):
        whole = prompt.attend([70], window, sinks)
        for lengths in CUTS:
            assert torch.equal(prompt.attend(lengths, window, sinks), whole), (window, sinks, lengths)
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", FULL)
            build.near(whole, prompt.attend([70], window, sinks))


@pytest.mark.parametrize("heads, kv_heads, dim, size", [(9, 3, 64, 16), (4, 4, 20, 7), (2, 1, 80, 48), (3, 1, 32, 256)])
def test_attention_over_blocks_of_keys(heads, kv_heads, dim, size, build):
    """More keys than are scored before they become weights; in some of the blocks the largest score grows."""
    prompt = Prompt(build, 1100, heads, kv_heads, dim, size)
    prompt.q[700] *= 0  # all weights equal
    prompt.k[[150, 383, 384, 600, 1050]] *= 9
    whole = prompt.attend([1100])
    for lengths in ([383, 1, 1, 1, 382, 1, 331], [1070, 9, 1, 20], [48, 500, 552]):
        assert torch.equal(prompt.attend(lengths), whole), lengths
    for other in (16, 7, 112, 400):  # of which some reach from one block of keys into the next
        pages = Prompt(build, 1100, heads, kv_heads, dim, other)
        pages.q[:], pages.k[:] = prompt.q, prompt.k
        assert torch.equal(pages.attend([1099, 1]), whole), other
    if build.kv_dtype is None:
        build.near(whole, causal_attention(*(x.double() for x in (prompt.q, prompt.k, prompt.v))).to(whole))


def test_many_sequences_read_all_heads_together_over_blocks_of_keys(build):
    prompt, size = Prompt(build, 1100, 9, 3, 64, 16), 16
    prompt.k[[383, 500, 800]] *= 9
    keys, values, scales = pages_of(build, len(prompt.table), 3, 64, size)
    pages, ends = Pages.of(keys, values, scales), torch.arange(300, 1100, 30)
    whole = native.paged_attention(prompt.q, prompt.k, prompt.v, pages, step(0, 1100, size, prompt.table))
    slots = prompt.table[ends // size] * size + ends % size
    starts, table = torch.arange(len(ends) + 1), prompt.table.repeat(len(ends), 1)
    last = (x[ends].contiguous() for x in (prompt.q, prompt.k, prompt.v))
    together = native.paged_attention(*last, pages, Sequences.of(starts, ends + 1, table, slots, int(ends[-1]) + 1))
    assert torch.equal(together, whole[ends])


@pytest.mark.parametrize("lengths", [[600], [595, 5]])
def test_attention_over_blocks_of_keys_at_the_edge_of_floats(lengths, build):
    """A block whose scores are no numbers, or minus infinity; one whose weights are 0 beside those of the next."""
    if build.kv_dtype is not None:
        pytest.skip("codes are finite")

    def attend(**changes: float) -> Tensor:
        prompt = Prompt(build, 600, 3, 1, 64, 16)
        prompt.q[:], prompt.k[:], prompt.v[1:], prompt.v[0] = 1, 0, 0, 1e38
        prompt.k[384:] = changes.get("later", 0)
        prompt.k[1:384] = changes.get("first", 0)
        prompt.k[0] = changes.get("zeroth", 0)
        return prompt.attend(lengths)

    nan = float("nan")
    assert attend(first=nan, zeroth=nan)[384:].isnan().all()
    assert attend(first=-float("inf"), zeroth=nan)[384:].isnan().all()
    assert not attend(first=-float("inf"), zeroth=-float("inf"))[384:].any()
    assert not attend(later=25)[384:].any() and attend(later=25)[:384].isfinite().all()


@pytest.mark.parametrize(
    "format, adapted", [(None, False), (None, True), ("int4", False), ("int4", True), ("fp8", False)]
)
def test_a_layer(format, adapted, build, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden, inner, heads, kv_heads, dim, size = 264, 56, 4, 2, 24, 16
    sizes = dict(hidden=hidden, heads=heads, kv_heads=kv_heads, dim=dim, intermediate=inner)
    shapes = dict(
        qkv=((heads + 2 * kv_heads) * dim, hidden),
        o=(hidden, heads * dim),
        gate_up=(2 * inner, hidden),
        down=(hidden, inner),
    )

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(build.dtype)

    numbers = {name: random(*shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    codes = {name: random_weight(format or "int4", *shape, None, False, True) for name, shape in shapes.items()}
    for weight in codes.values():
        weight.scales.fill_(0.02)
    weights = {f"{name}_bias": random(shape[0]) for name, shape in shapes.items()}
    weights |= dict(input_norm=random(hidden), post_norm=random(hidden), q_norm=random(dim), k_norm=None)
    x, angles = random(128, hidden), random(2, 128, 1, dim)
    table = torch.randperm(8, generator=generator) + 1
    # The parts of a matrix and their ranks; k has no adapter. Tokens with the same one stand apart and side by side.
    parts = dict(qkv=[heads * dim, kv_heads * dim, kv_heads * dim], o=[hidden], gate_up=[inner, inner], down=[hidden])
    ranks = dict(qkv=[16, 0, 3], o=[16], gate_up=[5, 16], down=[8])
    slots = torch.randint(-1, 3, (128,), generator=generator, dtype=torch.int32)
    slots[20:30] = 1
    loras = {
        name: [
            (random(3, rank, shapes[name][1]) / shapes[name][1] ** 0.5, random(3, rank, size).transpose(1, 2))
            for rank, size in zip(ranks[name], parts[name])
        ]
        for name in parts
    }
    arrays = {
        name: (Adapters * len(pairs))(*(Adapters.of(*pair, sum(parts[name][:at])) for at, pair in enumerate(pairs)))
        for name, pairs in loras.items()
    }

    def run_layer(lengths: list[int]) -> Tensor:
        if format is None:
            packed = {name: native.pack(weight) for name, weight in numbers.items()}
            matrices = {name: Matrix.of(packed[name], shapes[name][0]) for name in packed}
        else:
            packed = {name: pack(weight, build.dtype) for name, weight in codes.items()}
            matrices = {name: matrix.struct for name, matrix in packed.items()}
        layer = Layer.of(matrices, weights, sizes, 1e-5)
        if adapted:
            layer.adapters = pointer(LayerAdapters.of(arrays))
        keys, values, scales = pages_of(build, 8, kv_heads, dim, size)
        pages = Pages.of(keys, values, scales)

        def run(start: int, end: int) -> Tensor:
            states, (cos, sin) = x[start:end].clone(), angles[:, start:end].contiguous()
            sequences = step(start, end, size, table, slots[start:end] if adapted else None)
            native.decoder_layer(layer, states, cos, sin, pages, sequences, None)
            return states

        return cut(run, sum(lengths), lengths)

    whole = run_layer([70])
    for lengths in CUTS:
        assert torch.equal(run_layer(lengths), whole), lengths
    assert torch.equal(run_layer([128])[:70], whole)  # a chunk as long as there are
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", FULL)
        build.near(whole, run_layer([70]))
