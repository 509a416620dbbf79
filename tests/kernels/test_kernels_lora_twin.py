"""The twin of the adapters' grouped product, against float64."""

from __future__ import annotations

import pytest
import torch

from minillm.kernels.lora import torch_add_lora_


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_each_token_has_the_product_of_its_adapter(dtype, tolerance):
    torch.manual_seed(0)
    x, slots = torch.randn(7, 24).to(dtype), torch.tensor([2, -1, 0, 2, 2, -1, 1], dtype=torch.int32)
    a, b = torch.randn(3, 4, 24).to(dtype), torch.randn(3, 10, 4).to(dtype)
    whole = torch.randn(7, 30).to(dtype)
    before = whole.clone()
    output = whole[:, 10:20]  # as a part of a fused projection
    assert torch_add_lora_(output, x, a, b, slots) is output
    for token, slot in enumerate(slots.tolist()):
        added = torch.zeros(10).double() if slot < 0 else b[slot].double() @ (a[slot].double() @ x[token].double())
        torch.testing.assert_close(
            whole[token, 10:20].double(), before[token, 10:20].double() + added, atol=tolerance, rtol=tolerance
        )
    assert torch.equal(whole[:, :10], before[:, :10]) and torch.equal(whole[:, 20:], before[:, 20:])
    assert torch.equal(whole[slots < 0], before[slots < 0])


def test_a_batch_without_adapters_is_left_alone():
    output = torch.ones(2, 3)
    torch_add_lora_(output, torch.ones(2, 3), torch.ones(1, 2, 3), torch.ones(1, 3, 2), torch.full((2,), -1))
    assert torch.equal(output, torch.ones(2, 3))
