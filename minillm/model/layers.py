"""The pieces of a decoder layer: RMSNorm, rotary embedding, Linear, SwiGLU. Built in chapter 02."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.kernels import native
from minillm.model.batch import adapted
from minillm.model.rope import RopeConfig
from minillm.quantization.linear import QuantizedLinear
from minillm.rounding import round_up

if TYPE_CHECKING:
    from minillm.model.lora_slots import AdaptedPart, TokenSlots

# For oneDNN alone, which serves where there is no C compiler (`MINILLM_NATIVE=0`). Measured with AVX-512 on two cores.
# oneDNN's layout for two rows or more is the faster one at any number of rows. It reads a large weight up to 1.3 times
# faster for 4 rows than for 1, so a single row poses as 4. Its calls cost 10 µs more, so in a model that stays in the
# cache one row takes the plain path.
PACK_FOR_ROWS = 16
WIDEN_FROM = 2**19  # elements

CosSin = tuple[Tensor, Tensor]  # as Rotary makes and apply_rotary takes them


class RMSNorm(nn.Module):
    """Divide each row by its root mean square, then scale by a learned weight (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.size, self.eps = size, eps
        self.root = torch.tensor(size**0.5, device=device)
        self.floor = torch.tensor((eps * size) ** 0.5, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [..., size]; the mean is taken in float32."""
        if native.serves(x):  # one pass over x, and no small operations: chapter 14
            return native.rms_norm(x, self.weight, self.eps)
        if not x.is_cpu:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        # On a CPU that is eight small kernels. From the length of x, in one kernel, it takes half as many:
        # sqrt(mean(x²) + eps) = sqrt(|x|² + eps size) / sqrt(size).
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = self.root / torch.hypot(length, self.floor)  # [..., 1]; a Python number over a tensor takes longer
        return (x * scale).to(x.dtype).mul_(self.weight)


class WholeNorm(RMSNorm):
    """RMSNorm over all heads of a token at once (OLMo 2)."""

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, heads, head_dim], with heads * head_dim = size."""
        return super().forward(x.flatten(1)).view(x.shape)


class Linear(nn.Module):
    """y = x Wᵀ + b, by the fastest path through torch for this device, dtype and number of rows.

    On a CPU `prepare` packs the weight once into the layout that the kernel reads: our own where there is one (see
    `minillm.kernels.native`), else oneDNN's. With few rows a product only waits for the weight to be read, and a plain
    fp32 `F.linear` (MKL) reads it at half speed.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight_device: torch.device | None = None,  # where it waits to be quantized: see Decoder
        parts: dict[str, int] | None = None,  # matrices of a checkpoint that this one is fused of, and their rows
    ):
        super().__init__()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        parts = parts or {}
        self.parts = {name: slice(end - parts[name], end) for name, end in zip(parts, accumulate(parts.values()))}
        self.plain = empty_parameter(out_features, in_features, dtype=dtype, device=weight_device or device)
        self.panels: Tensor | None = None  # packed for our own kernel
        self.packed: Tensor | None = None  # packed for oneDNN
        self.quantized: QuantizedLinear | None = None  # in low-bit form instead: chapter 15
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None
        self.adapters: tuple[AdaptedPart, ...] = ()  # chapter 23

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], unpacked if need be: for code that quantizes, slices or adapts it."""
        if self.plain is not None:
            return self.plain
        if self.quantized is not None:
            return self.quantized.dequantize()
        if self.panels is not None:
            return native.unpack(self.panels, self.out_features, self.in_features)
        return self.packed.to_dense()

    def quantize(self, quantized: QuantizedLinear) -> None:
        """Let `quantized` stand in for the weight. Raises ValueError where it has another shape."""
        if (quantized.out_features, quantized.in_features) != (self.out_features, self.in_features):
            raise ValueError(
                f"a quantized weight of {quantized.out_features} x {quantized.in_features} does not fit a product of "
                f"{self.out_features} x {self.in_features}"
            )
        self.quantized, self.plain = quantized, None

    def prepare(self, in_cache: bool = False) -> None:
        """Choose the path, once, when the weights are final. A packed weight replaces the plain one, unless the
        whole model is small enough to stay `in_cache`."""
        if self.panels is not None or self.packed is not None:
            return
        if self.quantized is not None:
            self.quantized.prepare(self.dtype)
            return
        if native.serves(self.plain):
            self.panels, self.plain = native.pack(self.plain), None
            return
        if not can_pack(self.plain):
            return
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.plain, PACK_FOR_ROWS)
        self.packed_linear = torch.ops.mkldnn._linear_pointwise.default
        self.widen = self.plain.numel() >= WIDEN_FROM
        if not in_cache or self.plain.dtype is torch.bfloat16:  # plain bfloat16 takes the slow calls anyway
            self.plain = None

    def forward(self, x: Tensor, token_slots: TokenSlots | None = None) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]; each token with the adapter in its batch slot."""
        out = self._product(x)
        if token_slots is not None:
            for part in self.adapters:
                part.add_(out, x, token_slots)
        return out

    def _product(self, x: Tensor) -> Tensor:
        if self.quantized is not None:
            return self.quantized(x, self.bias)
        if self.panels is not None:
            return native.linear(x, self.panels, self.bias, self.out_features)
        one_row = x.shape[0] == 1
        if self.packed is None or (one_row and self.plain is not None):
            return F.linear(x, self.plain, self.bias)
        if one_row and self.widen:
            return self.packed_linear(x.expand(4, -1), self.packed, self.bias, "none", [], "")[:1]
        return self.packed_linear(x, self.packed, self.bias, "none", [], "")

    def move_to(self, device: torch.device) -> None:
        """Take the weight, not packed yet, to `device`. From "meta", where there are no numbers, it comes unset."""
        if self.plain.device != device:
            moved = torch.empty_like(self.plain, device=device) if self.plain.is_meta else self.plain.to(device)
            self.plain = nn.Parameter(moved, requires_grad=False)

    def checkpoint_rows(self, place: str) -> dict[str, slice]:
        """The matrices of a checkpoint that lie here one under the other, by name, if this Linear stands at `place`:

        "mlp.gate_up_proj" -> {"mlp.gate_proj": slice(0, 96), "mlp.up_proj": slice(96, 192)}
        "mlp.down_proj"    -> {"mlp.down_proj": slice(0, 48)}
        """
        if not self.parts:
            return {place: slice(0, self.out_features)}
        module = place[: place.rfind(".") + 1]
        return {module + name: rows for name, rows in self.parts.items()}

    def checkpoint_views(self, place: str) -> dict[str, Tensor]:
        """Where the tensors of a checkpoint go, by name, if this Linear stands at `place`."""
        tensors = {kind: tensor for kind, tensor in (("weight", self.plain), ("bias", self.bias)) if tensor is not None}
        named = self.checkpoint_rows(place).items()
        return {f"{name}.{kind}": tensor[rows] for kind, tensor in tensors.items() for name, rows in named}


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x.float().contiguous()).to(x.dtype),  # torch computes one row and many in two ways
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), gate and up fused into one matrix product; or gelu instead."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight_device: torch.device | None = None,
        activation: str = "silu",
    ):
        super().__init__()
        self.activation = activation
        halves = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias, dtype, device, weight_device, halves)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, dtype, device, weight_device)

    def forward(self, x: Tensor, token_slots: TokenSlots | None = None) -> Tensor:
        gate_up = adapted(self.gate_up_proj, x, token_slots)  # [num_tokens, 2 * intermediate_size]
        if self.activation in native.GATED and native.serves(gate_up):
            return adapted(self.down_proj, native.gate_mul(gate_up, self.activation), token_slots)
        gate, up = gate_up.chunk(2, dim=-1)
        return adapted(self.down_proj, ACTIVATIONS[self.activation](gate).mul_(up), token_slots)


class Rotary(nn.Module):
    """The angles of rotary embedding: position times a frequency for each pair of dimensions.

    Where only a part of each head is rotated, the loader has its first dimensions beside those that they turn with, and
    the others turn with frequency 0, as all do where `rope` is None. `scale` multiplies queries and keys.
    """

    def __init__(
        self, rope: RopeConfig | None, head_dim: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0
    ):
        super().__init__()
        frequencies, factor = torch.zeros(head_dim // 2), 1.0
        if rope is not None:
            turning = rope_frequencies(rope, int(head_dim * rope.partial))
            frequencies[: len(turning)], factor = turning, rope.attention_factor
        # The first half of sin is negated, for the signs of the two-by-two rotation: see apply_rotary.
        sign = torch.cat([-torch.ones(head_dim // 2), torch.ones(head_dim // 2)])
        self.frequencies = torch.cat([frequencies, frequencies]).to(device)  # [head_dim] float32
        self.cos_scale: float | Tensor = factor * scale
        if factor != 1.0 and not frequencies.all():  # what is not rotated is not multiplied either
            self.cos_scale = torch.where(self.frequencies != 0, factor * scale, scale).to(device)
        self.sin_scale = (sign * factor * scale).to(device)
        self.dtype = dtype

    def forward(self, positions: Tensor) -> CosSin:
        """cos and signed sin of every token, each [num_tokens, 1, head_dim]; made once a step for all layers."""
        if positions.is_cpu and isinstance(self.cos_scale, float) and native.library(self.dtype):
            return native.rotary_angles(positions, self.frequencies, self.sin_scale, self.cos_scale, self.dtype)
        angles = positions[:, None, None] * self.frequencies  # float32: a large angle needs its low bits
        return (angles.cos() * self.cos_scale).to(self.dtype), (angles.sin() * self.sin_scale).to(self.dtype)


class LayerRotaries(nn.Module):
    """Several kinds of angles, where layers rotate in different ways or not at all."""

    def __init__(self, kinds: Sequence[Rotary]):
        super().__init__()
        self.kinds = nn.ModuleList(kinds)

    def forward(self, positions: Tensor) -> CosSin:
        """cos and signed sin, each [num_kinds, num_tokens, 1, head_dim]; a layer takes its own."""
        cos, sin = zip(*(kind(positions) for kind in self.kinds))
        return torch.stack(cos), torch.stack(sin)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head, [num_tokens, heads, head_dim]: dimension i turns with i + head_dim/2 (the layout of
    Hugging Face checkpoints).  (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin); the minus is in `sin` already.
    """
    if native.serves(x) and x.stride(2) == 1 and x.stride(1) == x.shape[2]:  # in one pass: chapter 14
        return native.rotate(x, cos, sin)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position for each rotated pair, [head_dim / 2], fast pairs first."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.type == "default":
        return plain
    if rope.type == "divided":
        return plain / torch.tensor(rope.divisors)
    stretched = plain / rope.factor
    if rope.type == "linear":
        return stretched
    keep = _llama3_keep(rope, plain) if rope.type == "llama3" else _yarn_keep(rope, head_dim)
    return keep * plain + (1 - keep) * stretched


def _llama3_keep(rope: RopeConfig, plain: Tensor) -> Tensor:
    """1 for wavelengths that fit the original text many times, 0 for those that do not fit, a line between."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)  # over the original text
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return keep.clamp(0, 1)


def _yarn_keep(rope: RopeConfig, head_dim: int) -> Tensor:
    """1 for pairs turning over beta_fast times in the original text, 0 under beta_slow, a line over the index."""

    def pair_that_turns(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def rotated_dims(rope: RopeConfig, head_dim: int) -> int:
    """How many dimensions of a head are rotated; of an odd number the last one has a partner too."""
    return round_up(int(head_dim * rope.partial), 2)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a packed path for this weight: x86, float32, or bfloat16 where the CPU knows it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype is torch.float32


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
