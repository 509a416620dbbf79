"""The CPU's matrix unit: asked for, done without, and left as it was found."""

from __future__ import annotations

import pytest
import torch

from minillm.kernels import native, native_build


@pytest.fixture(autouse=True)
def fresh():
    native_build.has_unit.cache_clear()
    yield
    native_build.has_unit.cache_clear()


def test_a_cpu_without_a_unit_is_not_asked(monkeypatch):
    monkeypatch.setattr(native_build, "cpu_name", lambda: "x86_64flags\t\t: fpu avx512f avx512_bf16")
    monkeypatch.setattr(native_build.ctypes, "CDLL", None)
    assert not native_build.has_unit() and native_build.unit_flags() == native_build.NO_UNIT


@pytest.mark.parametrize("answer, granted", [(0, True), (-1, False)])
def test_linux_is_asked_for_leave(answer, granted, monkeypatch):
    asked = []

    class Library:
        def __init__(self, name):
            pass

        def syscall(self, *numbers):
            asked.append(numbers)
            return answer

    monkeypatch.setattr(native_build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native_build, "cpu_name", lambda: "x86_64flags\t\t: fpu amx_bf16 avx512_bf16 amx_tile")
    monkeypatch.setattr(native_build.ctypes, "CDLL", Library)
    assert native_build.has_unit() == granted
    assert native_build.unit_flags() == (() if granted else native_build.NO_UNIT)
    assert asked == [(158, 0x1023, 18)]


@pytest.mark.skipif(native.library(torch.bfloat16) is None, reason="no C compiler with OpenMP here: the twins serve")
def test_products_in_turns_with_another_librarys():
    """PyTorch's own products use the unit with shapes of their own; neither may find the other's."""
    torch.manual_seed(0)
    weight, x = torch.randn(80, 96).bfloat16(), torch.randn(33, 96).bfloat16()
    packed, expected = native.pack(weight), x.double() @ weight.double().t()
    first = native.linear(x, packed, None, 80)
    for rows in (1, 16, 33, 5):
        theirs = torch.nn.functional.linear(x.repeat(4, 1), weight)
        assert torch.equal(native.linear(x[:rows], packed, None, 80), first[:rows])
        torch.testing.assert_close(theirs[:33].double(), expected, rtol=2e-2, atol=0.2)
    torch.testing.assert_close(first.double(), expected, rtol=2e-2, atol=0.2)


@pytest.mark.skipif(native.library(torch.bfloat16) is None, reason="no C compiler with OpenMP here: the twins serve")
@pytest.mark.parametrize("inputs", [64, 100, 1200])
@pytest.mark.parametrize("outputs", [16, 48, 150])
def test_many_rows_as_each_of_them(inputs, outputs):
    """Rows that pass through the unit in pairs of tiles, through more than one chunk, and the rest."""
    torch.manual_seed(0)
    weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(300, inputs).bfloat16()
    packed = native.pack(weight)
    alone = torch.cat([native.linear(row[None], packed, None, outputs) for row in x])
    torch.testing.assert_close(alone.double(), x.double() @ weight.double().t(), rtol=2e-2, atol=0.5)
    for rows in (300, 257, 256, 65, 64, 63, 48, 33, 32, 31, 17):
        assert torch.equal(native.linear(x[:rows], packed, None, outputs), alone[:rows]), rows
