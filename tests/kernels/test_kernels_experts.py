"""Grouped matrix products: the sorted layout, the Triton kernel and its twin, and the C of the CPU, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from minillm.kernels import grouped_matmul, native, native_experts
from minillm.kernels.grouped_matmul import sort_by_expert, torch_grouped_matmul
from minillm.model.layers import SwiGLU
from minillm.model.packed import native_matrix
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.rtn import round_to_nearest
from tests.helpers.kernel_cases import (
    ROUNDING,
    device,
    error,
    every_dtype,
    guarded_outputs,
    needs_triton,
    random,
)
from tests.helpers.tiny import examples

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")


def choices(num_tokens: int, num_experts: int, each: int, like: str = "mixed", seed: int = 0) -> Tensor:
    """Different experts for each token. "one": all tokens choose the last experts, and most have no row."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if like == "one":
        scores = torch.arange(num_experts).float().expand(num_tokens, -1)
    return scores.topk(each, dim=-1).indices


# The sorted layout


@examples(60)
@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_rows_are_sorted_by_expert_and_come_back(num_tokens, num_experts, data):
    each = data.draw(st.integers(1, num_experts))
    experts = choices(num_tokens, num_experts, each, seed=data.draw(st.integers(0, 99)))
    rows = sort_by_expert(experts, num_experts)
    flat = experts.flatten()
    assert flat[rows.order].tolist() == sorted(flat.tolist())
    assert torch.equal(rows.order[rows.inverse], torch.arange(len(flat)))
    assert rows.offsets.tolist() == [int((flat < expert).sum()) for expert in range(num_experts + 1)]
    for first, end in zip(rows.offsets, rows.offsets[1:]):
        assert rows.order[first:end].tolist() == sorted(rows.order[first:end].tolist()), "tokens keep their order"
    x, weights = torch.randn(num_tokens, 5), torch.rand(num_tokens, each)
    torch.testing.assert_close(rows.combine(x[rows.tokens], weights), x * weights.sum(1, keepdim=True))


# Triton

# tokens, experts, each, in, out
SHAPES = [(1, 4, 2, 32, 48), (7, 5, 3, 100, 33), (40, 3, 1, 16, 130), (70, 6, 2, 64, 64), (3, 128, 8, 48, 20)]


@needs_triton
@every_dtype
@pytest.mark.parametrize("like", ["mixed", "one"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_grouped_product_is_each_row_times_the_weight_of_its_expert(shape, like, dtype):
    num_tokens, num_experts, each, k, n = shape
    rows = sort_by_expert(choices(num_tokens, num_experts, each, like).to(device()), num_experts)
    x, weight = random((num_tokens, k), dtype), random((num_experts, n, k), dtype, 1)
    exact = torch_grouped_matmul(x.double(), weight.double(), rows.offsets, rows.tokens)
    with guarded_outputs():
        gathered = grouped_matmul.grouped_matmul(x, weight, rows.offsets, rows.tokens)
        sorted_rows = grouped_matmul.grouped_matmul(x[rows.tokens], weight, rows.offsets)
    assert error(gathered, exact) < ROUNDING[dtype] and torch.equal(gathered, sorted_rows)


@needs_triton
def test_all_experts_of_a_layer_at_once():
    x, experts = random((9, 32), torch.float32), choices(9, 4, 2).to(device())
    gate_up, down = random((4, 40, 32), torch.float32, 1), random((4, 32, 20), torch.float32, 2)
    weights = torch.rand(9, 2, device=device())
    expected = torch.zeros(9, 32, dtype=torch.float64, device=device())
    for token in range(9):
        for expert, weight in zip(experts[token], weights[token]):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected[token] += weight.double() * (down[expert].double() @ (F.silu(gate) * up))
    assert error(grouped_matmul.run_experts(x, weights, experts, gate_up, down), expected) < 2e-6
    assert len(grouped_matmul.run_experts(x[:0], weights[:0], experts[:0], gate_up, down)) == 0


def test_what_does_not_fit_is_named():
    x, weight = torch.ones(3, 8), torch.ones(2, 4, 8)
    with pytest.raises(ValueError, match=r"cannot multiply torch.float32 \[3, 8\] by experts of torch.float16"):
        torch_grouped_matmul(x, weight.half(), torch.tensor([0, 1, 3]))
    with pytest.raises(ValueError, match=r"offsets \[2\] of 2 experts; there must be one more"):
        torch_grouped_matmul(x, weight, torch.tensor([0, 3]))


# C

FORMS = {  # how the weights of the experts are written
    "plain": None,
    "int8": ("int8", None, None),
    "int4 in groups": ("int4", 16, None),
    "int4 in groups of zeros": ("int4", 16, "zeros"),
    "int8 on both sides": ("int8", None, "int8"),
}


def build(num_experts: int, hidden: int, size: int, dtype: torch.dtype, form: str = "plain"):
    """Experts with random weights, prepared, and their one structure."""
    torch.manual_seed(num_experts + hidden)
    experts = [SwiGLU(hidden, size, False, dtype, torch.device("cpu")) for _ in range(num_experts)]
    for index, expert in enumerate(experts):
        for linear in (expert.gate_up_proj, expert.down_proj):
            linear.plain.normal_(0, linear.in_features**-0.5)
            if FORMS[form] is not None:
                format, group, more = FORMS[form]
                group = group if group and linear.in_features % group == 0 else None
                symmetric = more != "zeros" or index % 2 == 0  # one with zero points beside one without
                weight = round_to_nearest(linear.plain, format, group, symmetric)
                linear.quantize(QuantizedLinear(weight, more if more == "int8" else None))
            linear.prepare()
    pairs = [(native_matrix(expert.gate_up_proj), native_matrix(expert.down_proj)) for expert in experts]
    return experts, native_experts.join(pairs)


def one_by_one(experts: list[SwiGLU], x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    rows = sort_by_expert(chosen, len(experts))
    made, start = torch.empty(len(rows.order), x.shape[1], dtype=x.dtype), rows.offsets.tolist()
    for index, expert in enumerate(experts):
        if start[index + 1] > start[index]:
            made[start[index] : start[index + 1]] = expert(x[rows.tokens][start[index] : start[index + 1]])
    return rows.combine(made, weights)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(64, 48), (50, 20), (64, 112)], ids=str)
def test_one_call_is_expert_after_expert(sizes, form, dtype):
    """Intermediate sizes that are whole panels, and one that is not."""
    experts, packed = build(6, *sizes, dtype, form)
    for num_tokens in (1, 5, 90):
        x, weights = torch.randn(num_tokens, sizes[0]).to(dtype), torch.rand(num_tokens, 2)
        for like in ("mixed", "one"):
            chosen = choices(num_tokens, 6, 2, like)
            found = native_experts.run_experts(x, weights, chosen, packed)
            reference = one_by_one(experts, x, weights, chosen)
            assert error(found, reference) < (1e-6 if dtype is torch.float32 else 4e-3)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_token_has_the_same_bits_whatever_shares_its_batch(form, dtype):
    _, packed = build(5, 64, 48, dtype, form)
    x, weights, chosen = torch.randn(150, 64).to(dtype), torch.rand(150, 3), choices(150, 5, 3)
    together = native_experts.run_experts(x, weights, chosen, packed)
    for first, count in ((0, 1), (7, 2), (20, 40), (149, 1), (3, 140)):
        part = slice(first, first + count)
        assert torch.equal(native_experts.run_experts(x[part], weights[part], chosen[part], packed), together[part])


@needs_compiler
def test_experts_that_are_not_there_and_experts_that_differ():
    experts, packed = build(4, 32, 16, torch.float32)
    x, weights = torch.ones(2, 32), torch.ones(2, 1)
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match="of 4"):
            native_experts.run_experts(x, weights, torch.tensor([[0], [wrong]]), packed)
    others, _ = build(4, 32, 16, torch.float32, "int8")
    pairs = [(native_matrix(one.gate_up_proj), native_matrix(one.down_proj)) for one in (*experts, *others)]
    assert native_experts.join(pairs) is None
    assert native_experts.join([(pairs[0][0], None)]) is None
    assert native_experts.run_experts(x[:0], weights[:0], torch.zeros(0, 1).long(), packed).shape == (0, 32)


@needs_compiler
def test_many_tokens_are_computed_in_several_pieces(monkeypatch):
    monkeypatch.setattr(native_experts, "MOST_ELEMENTS", 2000)
    experts, packed = build(3, 32, 16, torch.float32)
    assert packed.tokens_at_once < 20
    x, weights, chosen = torch.randn(50, 32), torch.rand(50, 2), choices(50, 3, 2)
    found = native_experts.run_experts(x, weights, chosen, packed)
    assert error(found, one_by_one(experts, x, weights, chosen)) < 1e-6
