"""Norm, activation, softmax and matmul in Triton against float64, on ragged and hostile shapes; and the twins
against the model's own layers. Interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minillm.kernels import activation, matmul, norm, softmax
from minillm.kernels.language import tl, triton
from minillm.model.layers import RMSNorm, SwiGLU
from tests.helpers.kernel_cases import (
    ROUNDING,
    device,
    error,
    every_dtype,
    exact_norm,
    framed,
    guarded_outputs,
    needs_triton,
    projection,
    random,
)

pytestmark = needs_triton
EPS = 1e-6


@pytest.fixture(autouse=True)
def guards():
    with guarded_outputs():
        yield


# RMSNorm


@every_dtype
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 64), (64,), (3, 48), (130, 7), (5, 1000), (2, 4096), (0, 64), (2, 3, 4, 24)], ids=str
)
def test_rms_norm_equals_float64_and_its_twin(shape, dtype):
    x, weight = random(shape, dtype), random(shape[-1:], dtype, seed=1)
    out = norm.rms_norm(x, weight, EPS)
    assert out.shape == x.shape and out.dtype == dtype and out.is_contiguous()
    assert error(out, exact_norm(x, weight, EPS)) < ROUNDING[dtype]
    assert error(out, norm.torch_rms_norm(x, weight, EPS)) < ROUNDING[dtype]


@every_dtype
def test_rms_norm_of_rows_that_lie_apart(dtype):
    q, k, v, _ = projection(5, 12, 40, dtype).split([6, 3, 3, 1], dim=1)
    weight = random((40,), dtype, seed=1)
    for x in (q, k, v, q[::2], q[:, ::2], q.transpose(0, 1), q[:, 0], q[..., ::2]):
        given = weight[: x.shape[-1]]
        assert error(norm.rms_norm(x, given, EPS), exact_norm(x, given, EPS)) < ROUNDING[dtype]


@every_dtype
@pytest.mark.parametrize("size", [1, 48, 1000, 2048])
def test_add_rms_norm_equals_float64_and_its_twin(size, dtype):
    wide, wider = framed((5, size + 1), dtype), framed((5, size + 2), dtype)
    x, residual = (
        wide[:, :size].copy_(random((5, size), dtype)),
        wider[:, :size].copy_(random((5, size), dtype, seed=1)),
    )
    weight, before = random((size,), dtype, seed=2), residual.clone()
    out = norm.add_rms_norm(x, residual, weight, EPS)
    total = (before.double() + x.double()).to(dtype)
    assert torch.equal(residual, total), "the sum is rounded once"
    assert error(out, exact_norm(total, weight, EPS)) < ROUNDING[dtype]
    assert error(out, norm.torch_add_rms_norm(x, before, weight, EPS)) < ROUNDING[dtype]
    assert torch.equal(before, residual)
    assert wide[:, size:].isnan().all() and wider[:, size:].isnan().all()


@every_dtype
def test_norms_of_large_tiny_and_zero_rows(dtype):
    large, tiny = {torch.float32: (1e15, 1e-15), torch.bfloat16: (1e15, 1e-15)}.get(dtype, (1e4, 1e-6))
    x = random((4, 96), dtype) * torch.tensor([[large], [tiny], [0.0], [1.0]], device=device()).to(dtype)
    weight = random((96,), dtype, seed=1)
    out, added = norm.rms_norm(x, weight, EPS), norm.add_rms_norm(x, torch.zeros_like(x), weight, EPS)
    for row in range(4):
        assert error(out[row], exact_norm(x[row], weight, EPS)) < 2 * ROUNDING[dtype]
        assert torch.equal(out[row], added[row])


def test_the_quotient_is_rounded_before_it_meets_the_weight():
    """As in the model's own layers: fused and plain must not drift apart in half precision."""
    x, weight = random((64, 256), torch.float16), random((256,), torch.float16, seed=1)
    once = exact_norm(x, weight, EPS).half()
    twice = exact_norm(x, torch.ones_like(weight), EPS).half() * weight
    assert not torch.equal(once, twice)
    out = norm.rms_norm(x, weight, EPS)
    assert (out != twice).double().mean() < 0.01 < (out != once).double().mean()


def test_the_sum_is_rounded_before_it_is_normed():
    x, residual = random((64, 256), torch.float16), random((64, 256), torch.float16, seed=1)
    exact, weight = x.double() + residual.double(), torch.ones_like(x[0])
    rounded, unrounded = exact_norm(exact.half(), weight, EPS).half(), exact_norm(exact, weight, EPS).half()
    out = norm.add_rms_norm(x, residual, weight, EPS)
    assert (out != rounded).double().mean() < 0.01 < (out != unrounded).double().mean()


def test_norm_twins_equal_the_layer():
    x, residual = random((7, 64), torch.float32), random((7, 64), torch.float32, seed=1)
    layer = RMSNorm(64, EPS, torch.float32, torch.device(device()))
    layer.weight.normal_()
    torch.testing.assert_close(norm.torch_rms_norm(x, layer.weight, EPS), layer(x))
    total = x + residual
    torch.testing.assert_close(norm.torch_add_rms_norm(x, residual, layer.weight, EPS), layer(total))
    assert torch.equal(residual, total)


def test_add_rms_norm_refuses_what_it_would_misread():
    x, weight = random((4, 8), torch.float32), random((8,), torch.float32)
    for residual in (x.t().contiguous().t(), x[:2], x.flatten()):
        with pytest.raises(ValueError, match="residual"):
            norm.add_rms_norm(x, residual, weight, EPS)


# SwiGLU


@every_dtype
@pytest.mark.parametrize("size", [1, 5, 704, 1024, 1025, 3000])
def test_silu_mul_equals_float64_and_its_twin(size, dtype):
    gate_up = framed((3, 2 * size + 2), dtype)[:, 1:-1].copy_(3 * random((3, 2 * size), dtype))
    gate, up = gate_up.double().chunk(2, -1)
    out = activation.silu_mul(gate_up)
    assert out.shape == (3, size)
    assert error(out, gate / (1 + (-gate).exp()) * up) < 2 * ROUNDING[dtype]
    assert error(out, activation.torch_silu_mul(gate_up)) < ROUNDING[dtype]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@every_dtype
def test_silu_mul_at_its_ends(dtype):
    gate = torch.tensor([-6e4, -200.0, -90.0, -1.0, 0.0, 1e-6, 1.0, 90.0, 6e4], device=device())
    for up in (1.0, -0.5):
        gate_up = torch.cat([gate, torch.full_like(gate, up)])[None].to(dtype)
        reference = F.silu(gate_up[:, :9].double()) * up
        torch.testing.assert_close(
            activation.silu_mul(gate_up).double(), reference, rtol=2 * ROUNDING[dtype], atol=1e-6
        )
    with pytest.raises(ValueError, match="one piece"):
        activation.silu_mul(gate_up.t().contiguous().t().expand(2, -1).t())


def test_silu_mul_twin_equals_the_layer():
    mlp = SwiGLU(16, 24, False, torch.float32, torch.device(device()))
    for parameter in mlp.parameters():
        parameter.normal_()
    x = random((5, 16), torch.float32)
    torch.testing.assert_close(mlp.down_proj(activation.torch_silu_mul(mlp.gate_up_proj(x))), mlp(x))


# Softmax


@every_dtype
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 3), (2, 64), (5, 1000), (2, 1025), (2, 40000), (2, 3, 17), (0, 8)], ids=str
)
def test_softmax_equals_float64_and_its_twin(shape, dtype):
    x = 4 * random(shape, dtype)
    out = softmax.softmax(x)
    assert out.shape == x.shape and out.dtype == dtype
    assert error(out, x.double().softmax(-1)) < ROUNDING[dtype]
    of_sum = shape[-1] / 8 * 2**-24  # torch adds in float32, in 8 sums side by side or more
    assert error(out, softmax.torch_softmax(x)) < 4 * ROUNDING[dtype] + of_sum


@every_dtype
def test_softmax_of_masked_large_and_strided_rows(dtype):
    x = framed((6, 101), dtype)[:, :100].copy_(random((6, 100), dtype))
    x[0, 3:] = float("-inf")
    x[1, :99] = float("-inf")
    x[2] += 6e4
    x[3] -= 6e4
    x[4, 7] = 6e4
    assert error(softmax.softmax(x), x.double().softmax(-1)) < ROUNDING[dtype]
    assert softmax.softmax(x)[1].tolist() == [0.0] * 99 + [1.0]
    assert error(softmax.softmax(x[:, ::3]), x[:, ::3].double().softmax(-1)) < ROUNDING[dtype]


def test_softmax_sums_in_float32():
    """2^17 equal weights: their sum is beyond half precision, each of them is not."""
    assert (softmax.softmax(torch.zeros(1, 2**17, dtype=torch.float16, device=device())) == 2**-17).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_softmax_of_a_row_that_has_none_is_nan_as_in_torch():
    x = random((4, 8), torch.float32)
    x[0], x[1, 2], x[2, 3] = float("-inf"), float("inf"), float("nan")
    out = softmax.softmax(x)
    assert out[:3].isnan().all() and not out[3].isnan().any()
    assert torch.equal(out.isnan(), x.softmax(-1).isnan())


def test_softmax_says_which_row_is_too_long():
    with pytest.raises(ValueError, match=r"1048577.*1048576"):
        softmax.softmax(torch.zeros(1, 2**20 + 1, device=device()))


# Matrix multiply

SMALL = matmul.Config(tile_m=16, tile_n=16, tile_k=16, group_m=3, num_warps=2, num_stages=2)
ragged = [(1, 1, 1), (1, 33, 70), (17, 1, 40), (16, 64, 128), (65, 50, 129), (75, 70, 3)]


@every_dtype
@pytest.mark.parametrize("config", [None, SMALL], ids=["chosen", "small"])
@pytest.mark.parametrize("shape", ragged, ids=str)
def test_matmul_equals_float64_and_its_twin(shape, config, dtype):
    m, n, k = shape
    a, b = random((m, k), dtype), random((k, n), dtype, seed=1)
    out = matmul.matmul(a, b, config)
    assert out.shape == (m, n) and out.dtype == dtype
    assert error(out, a.double() @ b.double()) < ROUNDING[dtype]
    assert error(out, matmul.torch_matmul(a, b)) < 2 * ROUNDING[dtype]


@every_dtype
def test_matmul_of_strided_inputs(dtype):
    a, b = random((40, 37), dtype), random((37, 21), dtype, seed=1)
    expected = a.double() @ b.double()
    around_a, around_b = framed((80, 3 * 37), dtype), framed((2 * 21, 37), dtype)
    for left in (a, a.t().contiguous().t(), around_a[::2, 1::3].copy_(a)):
        for right in (b, b.t().contiguous().t(), around_b[1::2].copy_(b.t()).t()):
            assert error(matmul.matmul(left, right, SMALL), expected) < ROUNDING[dtype]
    ones = torch.ones(1, 1, dtype=dtype, device=device())
    assert error(matmul.matmul(ones.expand(5, 37), b), b.double().sum(0).expand(5, 21)) < ROUNDING[dtype]


def test_matmul_of_large_numbers_sums_in_float32():
    """Half precision ends at 65504: the sum on the way must not."""
    a = torch.full((16, 64), 100.0, dtype=torch.float16, device=device())
    b = a.t().contiguous()
    b[32:] *= -1  # 32 products of 10000, then as many of -10000
    for config in (None, SMALL):
        assert torch.equal(matmul.matmul(a, b, config), torch.zeros_like(a[:, :16]))


def test_matmul_refuses_what_does_not_fit():
    a = random((4, 8), torch.float32)
    for b in (a, random((8,), torch.float32), random((8, 4), torch.float16)):
        with pytest.raises(ValueError, match="cannot multiply"):
            matmul.matmul(a, b)


@triton.jit
def write_order(out, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    row, column = matmul.grouped_order(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    tl.store(out + tl.program_id(0) * 2, row)
    tl.store(out + tl.program_id(0) * 2 + 1, column)


@pytest.mark.parametrize("tiles_m, tiles_n, group_m", [(5, 4, 2), (4, 4, 4), (3, 5, 8), (7, 1, 3), (1, 6, 1)])
def test_programs_go_down_the_columns_of_a_group(tiles_m, tiles_n, group_m):
    out = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32, device=device())
    write_order[(tiles_m * tiles_n,)](out, tiles_m, tiles_n, GROUP_M=group_m)
    groups = [range(first, min(first + group_m, tiles_m)) for first in range(0, tiles_m, group_m)]
    assert out.tolist() == [[row, column] for group in groups for column in range(tiles_n) for row in group]


@pytest.mark.parametrize("capability, shared", [(75, 64 * 1024), (80, 163 * 1024), (89, 99 * 1024), (90, 227 * 1024)])
def test_every_configuration_fits_its_gpu(capability, shared):
    seen = set()
    for dtype in (torch.float32, torch.float16):
        for m, n in ((1, 4096), (100, 1024), (4096, 4096)):
            config = matmul.choose_config(m, n, 4096, dtype, capability)
            seen.add(config)
            assert config.num_stages * (config.tile_m + config.tile_n) * config.tile_k * dtype.itemsize <= shared
    assert len(seen) == (1 if capability < 80 else 4)
