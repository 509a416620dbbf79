"""GPTQ, AWQ, SmoothQuant, LLM.int8(): each against an independent reference, on tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.quantization.awq import round_clipped, search_scales
from minillm.quantization.folding import fold_into_norm, fold_into_rows, scale_columns
from minillm.quantization.formats import QuantizedWeight
from minillm.quantization.gptq import gptq, inverse_cholesky
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.mixed import split_outliers
from minillm.quantization.rtn import round_to_nearest
from minillm.quantization.smoothquant import smoothing_scales
from minillm.quantization.statistics import InputStatistics, output_error


def correlated(tokens: int, size: int, seed: int = 0) -> torch.Tensor:
    """Inputs that vary together, and by very different amounts, as activations do: [tokens, size]."""
    generator = torch.Generator().manual_seed(seed)
    turned = torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
    strengths = torch.logspace(0, -1.5, size)[:, None]  # a few directions hold most of what varies
    sizes = torch.exp(0.5 * torch.randn(size, generator=generator))
    return 4 * torch.randn(tokens, size, generator=generator) @ (strengths * turned) * sizes


def random_weight(out: int, size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(out, size, generator=torch.Generator().manual_seed(seed))


def seen(inputs: torch.Tensor) -> InputStatistics:
    statistics = InputStatistics(inputs.shape[1])
    for part in inputs.split(13):
        statistics.add(part)
    return statistics


def assert_same(found: QuantizedWeight, expected: QuantizedWeight) -> None:
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)
    assert (found.zeros is None) == (expected.zeros is None) and (
        found.zeros is None or torch.equal(found.zeros, expected.zeros)
    )


# Statistics


def test_statistics_are_those_of_all_tokens_at_once():
    inputs = correlated(100, 16)
    statistics = seen(inputs)
    hessian = inputs.double().T @ inputs.double()
    rounding = 1e-6 * float(hessian.abs().max())  # of float32 sums, whose terms cancel
    torch.testing.assert_close(statistics.hessian.double(), hessian, rtol=1e-5, atol=rounding)
    torch.testing.assert_close(statistics.largest, inputs.abs().amax(0))
    torch.testing.assert_close(statistics.mean, inputs.abs().mean(0))
    scales = torch.rand(16) + 0.5
    statistics.divide(scales)
    divided = seen(inputs / scales)
    torch.testing.assert_close(
        statistics.hessian, divided.hessian, rtol=1e-5, atol=1e-6 * float(divided.hessian.abs().max())
    )
    for name in ("largest", "mean"):
        torch.testing.assert_close(getattr(statistics, name), getattr(divided, name))


def test_the_output_error_comes_from_the_hessian_alone():
    inputs, weight = correlated(80, 16), random_weight(6, 16)
    rounded = round_to_nearest(weight, "int4", 8).dequantize()
    expected = ((inputs @ weight.T - inputs @ rounded.T) ** 2).sum(0)
    torch.testing.assert_close(output_error(weight, rounded, inputs.T @ inputs), expected, rtol=1e-4, atol=1e-4)


# GPTQ


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size, act_order", [(32, False), (None, False), (32, True), (192, False)])
def test_gptq_without_correlation_is_rounding(symmetric, group_size, act_order):
    weight = random_weight(12, 192)
    found = gptq(weight, 3 * torch.eye(192), "int3", group_size, symmetric, act_order=act_order)
    assert_same(found, round_to_nearest(weight, "int3", group_size, symmetric))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "format, group_size, symmetric", [("int4", 32, True), ("int3", 32, False), ("int2", None, False), ("fp4", 32, True)]
)
def test_gptq_lowers_the_output_error(seed, format, group_size, symmetric):
    inputs, weight = correlated(400, 160, seed), random_weight(24, 160, seed)
    hessian = inputs.T @ inputs
    plain = output_error(weight, round_to_nearest(weight, format, group_size, symmetric).dequantize(), hessian).sum()
    for act_order in (False, True):
        found = gptq(weight, hessian, format, group_size, symmetric, act_order=act_order)
        assert output_error(weight, found.dequantize(), hessian).sum() < 0.8 * plain


def test_the_first_column_moves_the_others_as_the_formula_says():
    """Given q_1, the best w_2.. is w - (w_1 - q_1) [H⁻¹]_1: / [H⁻¹]_11; solved here as least squares, in float64."""
    inputs, weight = correlated(50, 4).double(), random_weight(1, 4).double()
    hessian = inputs.T @ inputs
    upper = inverse_cholesky(hessian, 1e-9).double()
    torch.testing.assert_close(upper.T @ upper, torch.linalg.inv(hessian), rtol=1e-4, atol=1e-6)
    fixed = weight[0, 0].round()
    target = inputs @ weight[0] - inputs[:, 0] * fixed
    best = torch.linalg.lstsq(inputs[:, 1:], target[:, None]).solution[:, 0]
    moved = weight[0, 1:] - (weight[0, 0] - fixed) / upper[0, 0] * upper[0, 1:]
    torch.testing.assert_close(moved, best, rtol=1e-4, atol=1e-5)


def test_gptq_is_near_the_best_of_all_roundings():
    """Four inputs of 2 bits: all 4⁴ code words tried. GPTQ need not find the best, but must close most of the gap."""
    gaps = []
    for seed in range(20):
        inputs, weight = correlated(60, 4, seed), random_weight(1, 4, seed)
        hessian = inputs.T @ inputs
        rounded = round_to_nearest(weight, "int2", None, symmetric=False)
        found = gptq(weight, hessian, "int2", None, symmetric=False, damping=1e-6)
        words = torch.tensor(list(itertools.product(range(4), repeat=4)), dtype=torch.uint8)
        every = QuantizedWeight(
            rounded.format, words, rounded.scales.expand(256, 1), rounded.zeros.expand(256, 1)
        ).dequantize()
        best = output_error(weight.expand(256, 4), every, hessian).min()
        errors = [output_error(weight, one.dequantize(), hessian)[0] for one in (rounded, found)]
        assert errors[1] >= best * 0.999
        gaps.append([(error - best).item() for error in errors])
    plain, compensated = torch.tensor(gaps).sum(0)
    assert compensated < 0.35 * plain


def test_gptq_is_what_inverting_anew_for_every_column_gives():
    """The paper's first form, in float64: no Cholesky, no blocks,
    scales from the weights as they are when a group begins."""
    inputs, weight = correlated(300, 64), random_weight(10, 64)
    hessian = (inputs.T @ inputs).double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(64)
    work, codes, scales = weight.double().clone(), [], []
    for j in range(64):
        if j % 16 == 0:
            scales.append(round_to_nearest(work[:, j : j + 16].float(), "int3", None).scales.half())
        column = (work[:, j] / scales[-1][:, 0].double()).round().clamp(-4, 3)
        inverse = torch.linalg.inv(hessian[j:, j:])
        work[:, j:] -= (work[:, j] - column * scales[-1][:, 0].double())[:, None] * inverse[0] / inverse[0, 0]
        codes.append(column + 4)
    found = gptq(weight, inputs.T @ inputs, "int3", 16)
    assert (found.codes != torch.stack(codes, 1)).double().mean() < 0.01
    torch.testing.assert_close(found.scales.float(), torch.cat(scales, 1).float(), rtol=2e-2, atol=1e-3)
    static = gptq(weight, inputs.T @ inputs, "int3", 16, act_order=True).scales
    assert torch.equal(static, round_to_nearest(weight, "int3", 16).scales) and not torch.equal(static, found.scales)


class ReadsByHost(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: a number read out of a tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "quantize",
    [
        lambda weight, inputs: gptq(weight, inputs.hessian, "int3", 32, symmetric=False),
        lambda weight, inputs: gptq(weight, inputs.hessian, "fp4", 32, act_order=True),
        lambda weight, inputs: search_scales(weight, inputs),
        lambda weight, inputs: round_clipped(weight, inputs.hessian),
    ],
    ids=["gptq", "gptq, act_order", "awq", "awq, clipped"],
)
def test_the_host_reads_no_number_for_a_column_or_a_candidate(quantize):
    weight, inputs = random_weight(8, 64), seen(correlated(90, 64))
    with ReadsByHost() as reads:
        quantize(weight, inputs)
    assert reads.count <= 2  # of checks, once a weight


def test_lazy_blocks_change_nothing(monkeypatch):
    inputs, weight = correlated(600, 256), random_weight(8, 256)
    hessian, module = inputs.T @ inputs, __import__("minillm.quantization.gptq", fromlist=["gptq"])
    whole = gptq(weight, hessian, "int3", 32, symmetric=False)
    monkeypatch.setattr(module, "BLOCK_SIZE", 32)
    small = gptq(weight, hessian, "int3", 32, symmetric=False)
    assert (whole.codes != small.codes).float().mean() < 0.01  # but for the order of additions


def test_gptq_survives_inputs_that_never_were_and_copies():
    inputs = correlated(200, 32)
    inputs[:, 5] = 0
    inputs[:, 7] = inputs[:, 6]
    weight = random_weight(4, 32)
    found = gptq(weight, inputs.T @ inputs, "int4", 16)
    assert found.dequantize().isfinite().all()
    assert_same(gptq(weight, torch.zeros(32, 32), "int4", 16), round_to_nearest(weight, "int4", 16))


# AWQ, SmoothQuant, LLM.int8()


def test_awq_scales_the_inputs_that_are_large():
    inputs = correlated(300, 64) * 0.1
    inputs[:, 10] *= 50
    weight = random_weight(32, 64)
    scales = search_scales(weight, seen(inputs), "int3", 32)
    assert scales.argmax() == 10 and scales[10] > 2 * scales.median()
    hessian = inputs.T @ inputs
    scaled = round_to_nearest(weight * scales, "int3", 32).dequantize() / scales
    plain = round_to_nearest(weight, "int3", 32).dequantize()
    assert output_error(weight, scaled, hessian).sum() < 0.7 * output_error(weight, plain, hessian).sum()


def test_awq_finds_the_best_alpha():
    inputs, weight = correlated(200, 32), random_weight(16, 32)
    mean, errors, tried = inputs.abs().mean(0), [], []
    for step in range(20):
        scales = mean ** (step / 20)
        tried.append(scales / (scales.max() * scales.min()).sqrt())
        rounded = round_to_nearest(weight * tried[-1], "int2", 16, symmetric=False).dequantize()
        errors.append(((inputs / tried[-1]) @ rounded.T - inputs @ weight.T).norm())
    best = int(torch.stack(errors).argmin())
    assert best > 0
    torch.testing.assert_close(
        search_scales(weight, seen(inputs), "int2", 16, symmetric=False), tried[best], rtol=1e-4, atol=1e-5
    )


def test_awq_shares_scales_between_inputs_of_one_source():
    inputs, weight = correlated(300, 64), random_weight(16, 64)
    source = torch.arange(64) % 16
    scales = search_scales(weight, seen(inputs), "int3", 32, source=source)
    assert scales.shape == (16,) and scales.std() > 0


@pytest.mark.parametrize("group_size, symmetric", [(16, True), (16, False), (None, True)])
def test_clipping_lowers_the_error_of_every_group(group_size, symmetric):
    inputs, weight = correlated(300, 64), random_weight(16, 64)
    weight[:, 3] *= 4
    hessian = inputs.T @ inputs
    size = group_size or 64
    errors = []
    for found in (
        round_clipped(weight, hessian, "int3", group_size, symmetric),
        round_to_nearest(weight, "int3", group_size, symmetric),
    ):
        difference = weight - found.dequantize()
        parts = [slice(start, start + size) for start in range(0, 64, size)]
        errors.append(
            torch.stack([((difference[:, part] @ hessian[part, part]) * difference[:, part]).sum(1) for part in parts])
        )
    assert (errors[0] <= errors[1] * 1.0001).all() and errors[0].sum() < 0.9 * errors[1].sum()


def test_smoothing_evens_out_inputs_and_columns():
    inputs, weight = correlated(100, 24), random_weight(8, 24)
    largest, columns = inputs.abs().amax(0), weight.abs().amax(0)
    scales = smoothing_scales(largest, weight, 0.5)
    torch.testing.assert_close(largest / scales, columns * scales)
    torch.testing.assert_close(smoothing_scales(largest, weight, 1.0), largest)
    torch.testing.assert_close(smoothing_scales(largest, weight, 0.0), 1 / columns)
    with pytest.raises(ValueError, match=r"alpha=1.5 is not allowed"):
        smoothing_scales(largest, weight, 1.5)


def test_a_fold_into_bfloat16_loses_nothing():
    """The columns take what the norm was really divided by, its rounding included."""
    norm = torch.nn.Parameter(torch.randn(64).bfloat16(), requires_grad=False)
    norm[7] = 0
    before, weight = norm.clone(), random_weight(8, 64)
    changed = weight.clone()
    scale_columns(changed, fold_into_norm(norm, torch.rand(64) + 0.3))
    assert not torch.equal(norm, before)
    torch.testing.assert_close(changed * norm.float(), weight * before.float(), rtol=1e-5, atol=1e-6)


def test_rows_are_divided_with_their_bias_and_no_others():
    weight, bias = random_weight(6, 4), torch.arange(6.0)
    kept = weight.clone()
    fold_into_rows(weight, bias, 2, torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(weight, kept / torch.tensor([1, 1, 2, 4, 1, 1])[:, None])
    assert bias.tolist() == [0, 1, 1, 0.75, 4, 5]


def test_llm_int8_is_exact_where_all_columns_are_outliers():
    inputs, weight = correlated(30, 32), random_weight(8, 32)
    quantized, outliers = split_outliers(weight, inputs.abs().amax(0), threshold=0.0)
    product = QuantizedLinear(quantized, "int8", outliers=outliers)
    torch.testing.assert_close(product(inputs), inputs @ weight.T)


def test_llm_int8_takes_the_outlier_columns_out_of_both_sides():
    inputs, weight = torch.randn(40, 32, generator=torch.Generator().manual_seed(3)), random_weight(8, 32)
    inputs[:, [4, 9]] *= 100
    weight[:, 9] *= 20  # would stretch the scale of every row
    quantized, outliers = split_outliers(weight, inputs.abs().amax(0))
    assert outliers[0].tolist() == [4, 9] and torch.equal(outliers[1], weight[:, [4, 9]])
    exact = inputs @ weight.T
    mixed, plain = (
        QuantizedLinear(quantized, "int8", outliers=outliers),
        QuantizedLinear(round_to_nearest(weight, "int8", None), "int8"),
    )
    assert (mixed(inputs) - exact).norm() < 0.02 * (plain(inputs) - exact).norm()
    assert split_outliers(weight, inputs.abs().amax(0), threshold=1e6)[1] is None
