"""Products with a quantized weight, by the road that serves here. Built in chapter 15.

    native   our C kernels on a CPU: codes are decoded in registers, on the way from memory to the multiplication
    triton   our GPU kernels, the same idea
    torch    PyTorch's packed int8 and int4 products on a CPU, where there is no compiler
    plain    the weight is dequantized for every call: slow, and right everywhere; the oracle of the others

The weight that all of them multiply with is the same, scale * (table[code] - zero): they differ in rounding only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.kernels import language, native_quant, quantized_matmul, scaled_matmul
from minillm.quantization.activations import quantize_activations
from minillm.quantization.formats import QuantizedWeight
from minillm.quantization.torch_matrix import Int4Matrix, Int8Matrix

Product = Callable[[Tensor, Tensor | None], Tensor]  # x [num_tokens, in_features], bias -> [num_tokens, out_features]
ROADS = ("native", "triton", "torch", "plain")
PACKED_ROWS = 8  # measured on two cores with AVX-512: beyond it PyTorch's packed products lose to dequantizing


class Matrix(Protocol):
    """A weight packed for its road; the product of the road multiplies with it."""

    @property
    def num_bytes(self) -> int: ...
    def unpack_rows(self, ids: Tensor) -> Tensor: ...  # as numbers, [len(ids), in_features]


class QuantizedLinear(nn.Module):
    """y = x Wᵀ + b with W in low-bit form. `prepare` chooses the road; until then, it is the plain one.

    `activations` ("int8", "fp8") rounds x too, one scale a token, or the fixed `activation_scale`. `outliers` are
    columns that stay as they are, with their weights [out_features, len(columns)] (LLM.int8(), chapter 16).
    `order` is the order in which the weight takes its inputs (GPTQ's act order, chapter 16).

    The road decides what is kept:      weight                  matrix
        native, triton, torch           None                    the packed weight
        triton, integer activations     on the host             None, the product holds what it needs
        plain                           as it came              None
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        activations: str | None = None,
        activation_scale: Tensor | None = None,
        outliers: tuple[Tensor, Tensor] | None = None,
        order: Tensor | None = None,
    ):
        super().__init__()
        self.weight: QuantizedWeight | None = weight
        self.out_features, self.in_features = weight.codes.shape
        self.num_bytes = weight.num_bytes + (
            0 if outliers is None else outliers[1].numel() * outliers[1].element_size()
        )
        self.activations, self.activation_scale = activations, activation_scale
        self.outliers, self.order = outliers, order
        self.road = "plain"
        self.matrix: Matrix | None = None  # packed for the road
        self.product: Product = self._plain

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]"""
        if self.order is not None:
            x = x[:, self.order]
        if self.outliers is None:
            return self.product(x, bias)
        columns, weights = self.outliers
        rest = x.index_fill(1, columns, 0)
        return self.product(rest, bias) + F.linear(x[:, columns], weights.to(x.dtype))

    def prepare(self, dtype: torch.dtype, road: str | None = None) -> QuantizedLinear:
        """Take the first road that serves this weight, dtype and device, or the one named. Returns self."""
        for name in ROADS if road is None else (road,):
            product = getattr(self, f"_prepare_{name}")(dtype)
            if product is not None:
                self.road, self.product = name, product
                return self
        raise ValueError(
            f"the {road!r} road does not serve {self.weight.format.name} in {dtype} on {self.weight.codes.device}"
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that is multiplied with, [out_features, in_features]; columns in the model's order."""
        weight = (
            self.weight.dequantize(dtype)
            if self.weight is not None
            else self.rows(torch.arange(self.out_features), dtype)
        )
        if self.outliers is not None:
            weight = weight.index_copy(1, self.outliers[0], self.outliers[1].to(dtype))
        return weight if self.order is None else weight[:, self.order.argsort()]

    @property
    def held_bytes(self) -> int:
        """What stands in memory now, and is read by a product: the panels of the road, which give codes of 2 and 3 bits
        the room of 4, and those of 5 to 7 a byte; before `prepare`, and on the roads without panels, a byte a code."""
        held = [self.weight.codes, self.weight.scales, self.weight.zeros] if self.weight is not None else []
        held += [*(self.outliers or ()), self.order]
        packed = 0 if self.matrix is None else self.matrix.num_bytes
        return packed + sum(part.nbytes for part in held if part is not None)

    def tensors(self) -> dict[str, Tensor]:
        """All that the product depends on beside x, before `prepare`."""
        parts = {
            "codes": self.weight.codes,
            "scales": self.weight.scales,
            "zeros": self.weight.zeros,
            "order": self.order,
        }
        parts |= dict(
            zip(("outlier columns", "outlier weights"), self.outliers or ()), activation_scale=self.activation_scale
        )
        return {name: torch.as_tensor(part) for name, part in parts.items() if part is not None}

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight as numbers, [len(ids), in_features]: an embedding that is the output matrix too."""
        if self.matrix is not None:
            return self.matrix.unpack_rows(ids).to(dtype)
        return self.weight[ids].dequantize(dtype)

    def _prepare_native(self, dtype: torch.dtype) -> Product | None:
        weight, format = self.weight, self.weight.format
        group_size = weight.group_size if weight.scales.shape[1] > 1 else None
        if weight.codes.device.type != "cpu" or not native_quant.serves(
            format.name, format.bits, self.activations, dtype, group_size
        ):
            return None
        matrix = native_quant.pack(
            weight.codes,
            format.table,
            format.bits,
            weight.scales,
            weight.zeros,
            dtype,
            self.activations,
            self.activation_scale,
        )
        self.matrix, self.weight = matrix, None  # the panels hold it all
        return lambda x, bias: native_quant.linear(x, matrix, bias)

    def _prepare_triton(self, dtype: torch.dtype) -> Product | None:
        weight, format = self.weight, self.weight.format
        if not weight.codes.is_cuda or not language.serves(weight.codes):
            return None
        if self.activations is not None:
            return self._scaled_product()
        if not quantized_matmul.serves_format(format.name, format.bits):
            return None
        packed = quantized_matmul.pack(weight.codes, weight.scales, weight.zeros, format.name)
        self.matrix, self.weight = packed, None
        return lambda x, bias: quantized_matmul.quantized_matmul(x, packed, bias)

    def _scaled_product(self) -> Product:
        """Low-bit on both sides: the tokens are rounded by one kernel, and multiplied by another."""
        weight, format = self.weight, self.activations
        packed, scales = scaled_matmul.pack(weight.codes, format), weight.scales[:, 0].float().contiguous()
        self.weight = weight.to("cpu")  # for `dequantize`; the device has it packed

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            codes, row_scales = scaled_matmul.quantize_rows(x, format, self.activation_scale)
            return scaled_matmul.scaled_matmul(codes, row_scales, packed, scales, bias, x.dtype)

        return product

    def _prepare_torch(self, dtype: torch.dtype) -> Product | None:
        """PyTorch's packed products on a CPU, for few rows; with more, dequantizing first is faster."""
        weight = self.weight
        if self.activations is not None or weight.codes.device.type != "cpu" or dtype is torch.float16:
            return None
        if Int8Matrix.serves(weight):
            matrix = Int8Matrix(weight, dtype)
        elif Int4Matrix.serves(weight, dtype):
            matrix = Int4Matrix(weight)
        else:
            return None
        self.matrix, self.weight = matrix, None

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            if x.shape[0] > PACKED_ROWS:
                return F.linear(x, matrix.unpack_rows(torch.arange(self.out_features)).to(x.dtype), bias)
            out = matrix.multiply(x.contiguous())
            return out if bias is None else out + bias

        return product

    def _prepare_plain(self, dtype: torch.dtype) -> Product | None:
        return self._plain

    def _plain(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.weight
        if self.activations is None:
            return F.linear(x, weight.dequantize(x.dtype), bias)
        values, row_scales = quantize_activations(x, self.activations, self.activation_scale)
        # Products of small integers are exact in float64, whatever their order: this is what integer units compute.
        sums = values.double() @ weight.format.decode(weight.codes).double().t()
        out = (sums.float() * row_scales * weight.scales.float().t()).to(x.dtype)
        return out if bias is None else out + bias
