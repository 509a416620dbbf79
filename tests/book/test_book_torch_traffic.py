"""What eager torch operations read and write, counted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minillm.book.traffic import record_torch_traffic, record_traffic
from minillm.kernels.language import MODE

pytestmark = pytest.mark.skipif(MODE == "absent", reason="Triton is not installed")


@pytest.mark.parametrize("inference", [False, True])
def test_torch_operations_cost_their_inputs_and_outputs(inference):
    x, weight, table, out = torch.randn(4, 256), torch.randn(256), torch.randn(64, 256), torch.empty(4, 256)
    cases = [
        (lambda: x * weight, [("mul", 4096 + 1024, 4096)]),
        (lambda: x * x, [("mul", 4096, 4096)]),
        (lambda: x.add_(1), [("add_", 4096, 4096)]),
        (lambda: out.copy_(x), [("copy_", 4096, 4096)]),
        (lambda: out.zero_(), [("zero_", 0, 4096)]),
        (lambda: torch.mul(x, 2, out=out), [("mul", 4096, 4096)]),
        (lambda: x.half(), [("_to_copy", 4096, 2048)]),
        (lambda: F.linear(x, table), [("mm", 4096 + 65536, 1024)]),
        (lambda: F.embedding(torch.arange(2), table)[:1], [("arange", 0, 16), ("embedding", 16 + 2048, 2048)]),
        (lambda: table.index_copy_(0, torch.arange(4), x), [("arange", 0, 32), ("index_copy_", 32 + 4096, 4096)]),
        (lambda: weight.expand(4, 256) + 1, [("add", 1024, 4096)]),
        (lambda: x.view(-1).t().unsqueeze(0).chunk(2, -1), []),
        (lambda: (torch.empty(9), x.detach(), x.contiguous()), []),
    ]  # fmt: skip
    for operation, expected in cases:
        with torch.inference_mode(inference), record_torch_traffic() as traffic:
            operation()
        assert traffic.ops == expected
        assert traffic.bytes == traffic.bytes_read + traffic.bytes_written == sum(sum(op[1:]) for op in expected)


def test_a_compound_operation_is_taken_apart_under_inference_mode():
    def rms_norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    counts = []
    for inference in (False, True):
        with torch.inference_mode(inference), record_torch_traffic() as traffic:
            rms_norm(torch.ones(8, 64)), F.linear(torch.ones(2, 3, 64), torch.ones(16, 64))
        counts.append(traffic.ops)
    assert counts[0] == counts[1]
    assert [name for name, _, _ in counts[0]][1:6] == ["pow", "mean", "add", "rsqrt", "mul"]


def test_what_the_interpreter_does_for_a_kernel_is_no_torch_operation():
    from minillm.kernels.activation import silu_mul

    x = torch.randn(3, 8)
    with record_traffic() as kernel, record_torch_traffic() as eager:
        y = silu_mul(x)
        y + 1
    assert [name for name, _, _ in eager.ops] == ["add"] and kernel.bytes_stored == 3 * 4 * 4


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN here")
def test_weights_packed_for_onednn_are_read_once():
    weight = torch.randn(32, 16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 4)
    with record_torch_traffic() as traffic:
        torch.ops.mkldnn._linear_pointwise.default(torch.randn(4, 16), packed, None, "none", [], "")
    product = traffic.ops[-1]
    assert product[1:] == (4 * (4 * 16 + 32 * 16), 4 * 4 * 32)
