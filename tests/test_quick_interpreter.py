"""Triton's interpreter in the tests prepares its language once a launch, not at each call of a helper."""

from __future__ import annotations

import pytest
import torch

from minillm.kernels.language import MODE, tl, triton

pytestmark = pytest.mark.skipif(MODE != "interpreted", reason="kernels are not interpreted here")


@triton.jit
def half(x):
    return x // 2


@triton.jit
def halve_kernel(x, out, times: tl.constexpr):
    value = tl.load(x)
    for _ in range(times):
        value = half(value)
    tl.store(out, tl.maximum(value, tl.cdiv(value, 2)))


def test_the_language_is_prepared_once_a_launch(monkeypatch):
    from triton.runtime import interpreter

    prepared, patch = [], interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", lambda *args: (prepared.append(args), patch(*args))[1])
    counts = []
    for times in (1, 2, 5):
        out = torch.zeros(1, dtype=torch.int32)
        halve_kernel[(2,)](torch.tensor([64], dtype=torch.int32), out, times)
        assert out.item() == 64 >> times
        counts.append(len(prepared))
        prepared.clear()
    assert counts[1] == counts[2] > 0, counts  # the first launch also puts names into the modules of its functions
