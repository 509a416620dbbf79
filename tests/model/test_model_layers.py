"""The pieces of a layer against the formulas they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minillm.kernels import native
from minillm.model import layers
from minillm.model.config import RopeConfig
from minillm.model.layers import Linear, RMSNorm, Rotary, SwiGLU, apply_rotary, can_pack

CPU = torch.device("cpu")
packs = pytest.mark.skipif(not can_pack(torch.empty(1, 1)), reason="oneDNN is not here")


def random_linear(in_features: int, out_features: int, bias: bool = True, dtype=torch.float32) -> Linear:
    linear = Linear(in_features, out_features, bias, dtype, CPU)
    linear.plain.normal_()
    if bias:
        linear.bias.normal_()
    return linear


@pytest.mark.parametrize("shape", [(1, 24), (5, 24), (3, 2, 24)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_rms_norm(shape, dtype, tolerance):
    norm = RMSNorm(24, 0.5, dtype, CPU)
    norm.weight.normal_()
    x = torch.randn(shape).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.5).sqrt() * norm.weight.double()
    out = norm(x)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_rms_norm_of_zeros_is_zero():
    norm = RMSNorm(8, 1e-6, torch.float32, CPU)
    norm.weight.fill_(1)
    assert norm(torch.zeros(2, 8)).tolist() == [[0.0] * 8] * 2


@packs
@pytest.mark.parametrize("widen_from", [0, 10**9], ids=["one row poses as four", "as it is"])
@pytest.mark.parametrize("in_cache", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_every_onednn_road_of_linear_gives_the_same(monkeypatch, rows, dtype, tolerance, in_cache, widen_from):
    monkeypatch.setattr(layers, "WIDEN_FROM", widen_from)
    monkeypatch.setattr(native, "library", lambda dtype=None: None)
    linear = random_linear(40, 24, dtype=dtype)
    packs_it = can_pack(linear.plain)  # of bfloat16 only a CPU that multiplies it
    weight, x = linear.weight.clone(), torch.randn(rows, 40).to(dtype)
    expected = F.linear(x.double(), weight.double(), linear.bias.double())
    torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=tolerance * 10)
    linear.prepare(in_cache)
    linear.prepare(in_cache)  # a second time changes nothing
    out = linear(x)
    assert out.shape == (rows, 24) and (linear.packed is not None) == packs_it
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * 10)


@packs
def test_the_weight_is_held_once_unless_in_cache_and_always_readable(monkeypatch):
    monkeypatch.setattr(native, "library", lambda dtype=None: None)
    linear = random_linear(40, 24)
    weight = linear.weight.clone()
    linear.prepare()
    assert linear.plain is None and torch.equal(linear.weight, weight)
    small = random_linear(40, 24)
    small.prepare(in_cache=True)
    assert small.plain is not None and torch.equal(small.packed.to_dense(), small.weight)


def test_float16_keeps_the_plain_road():
    linear = random_linear(8, 4, dtype=torch.float16)
    linear.prepare()
    assert (
        linear.packed is None
        and linear.panels is None
        and linear(torch.ones(1, 8, dtype=torch.float16)).shape == (1, 4)
    )


def test_swiglu():
    mlp = SwiGLU(12, 20, True, torch.float32, CPU)
    for parameter in mlp.parameters():
        parameter.normal_()
    views = mlp.gate_up_proj.checkpoint_views("gate_up_proj") | mlp.down_proj.checkpoint_views("down_proj")
    x = torch.randn(3, 12)
    gate, up = (F.linear(x, views[f"{name}_proj.weight"], views[f"{name}_proj.bias"]) for name in ("gate", "up"))
    expected = F.linear(F.silu(gate) * up, views["down_proj.weight"], views["down_proj.bias"])
    torch.testing.assert_close(mlp(x), expected)


def test_rotary_turns_pairs_and_keeps_lengths_and_distances():
    rotary = Rotary(RopeConfig(theta=100.0), 6, torch.float32, CPU)
    x = torch.randn(1, 2, 6).expand(5, 2, 6)
    turned = apply_rotary(x, *rotary(torch.tensor([0, 1, 2, 7, 8])))
    torch.testing.assert_close(turned[0], x[0])  # position 0 stands still
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    pair = torch.view_as_complex(torch.stack([x[0, 0, :3], x[0, 0, 3:]], -1)) * torch.exp(
        2j * torch.tensor([1.0, 100 ** (-1 / 3), 100 ** (-2 / 3)])
    )
    torch.testing.assert_close(turned[2, 0], torch.cat([pair.real, pair.imag]))  # i turns with i + head_dim/2
    # What attention sees depends on the distance alone.
    torch.testing.assert_close((turned[1] * turned[2]).sum(-1), (turned[3] * turned[4]).sum(-1))
