"""What is compiled ahead of time: every launcher of the kernels, with arguments that have shapes and no memory."""

from __future__ import annotations

import torch

from minillm.kernels import (
    activation,
    decode_plan,
    flash_attention,
    grouped_matmul,
    latent_decode,
    lora,
    matmul,
    norm,
    packed_weight,
    paged_decode,
    paged_prefill,
    quantized_matmul,
    rotary,
    sampling,
    scaled_matmul,
    softmax,
    tile_plan,
)  # fmt: skip

FP32, FP16 = torch.float32, torch.float16
INT8, FP8, INT4 = torch.int8, torch.float8_e4m3fn, torch.uint8


def empty(*shape: int, dtype: torch.dtype = FP16) -> torch.Tensor:
    """A tensor of a shape and dtype, and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def call_add_rms_norm(size: int):
    return norm.add_rms_norm, (empty(4, size), empty(4, size), empty(size), 1e-6)


def call_rotary(heads: int, kv_heads: int, head_dim: int, with_norm: bool, pages_dtype: torch.dtype = FP16):
    q, k, v = empty(64, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    angles = empty(64, 1, head_dim)
    weights = (empty(head_dim), empty(head_dim), 1e-6) if with_norm else (None, None, 0.0)
    cache = pages(kv_heads, head_dim, pages_dtype)
    return rotary.rotate_and_store, (
        q,
        k,
        v,
        angles,
        angles,
        *cache,
        empty(64, dtype=torch.int64),
        *weights,
        *scales(cache),
    )


def call_matmul(m: int, n: int, k: int, layout: str, dtype: torch.dtype = FP16):
    a = empty(m, k, dtype=dtype) if layout[0] == "n" else empty(k, m, dtype=dtype).t()
    return matmul.matmul, (a, empty(k, n, dtype=dtype) if layout[1] == "n" else empty(n, k, dtype=dtype).t())


def call_flash(head_dim: int, window: int | None = None, dtype: torch.dtype = FP16):
    q, k, v = empty(64, 24, head_dim, dtype=dtype).split([16, 4, 4], dim=1)
    return flash_attention.flash_attention, (q, k, v, empty(3, dtype=torch.int64), 4096, window)


def pages(kv_heads: int, head_dim: int, dtype: torch.dtype):
    head_dim //= 2 if dtype is INT4 else 1  # bytes
    return empty(9, kv_heads, head_dim, 16, dtype=dtype), empty(9, kv_heads, 16, head_dim, dtype=dtype)


def scales(cache: tuple[torch.Tensor, torch.Tensor]):
    one = empty(*cache[1].shape[:3], dtype=FP32) if cache[0].element_size() == 1 else None
    return one, one


def call_prefill(
    head_dim: int,
    window: int | None = None,
    dtype: torch.dtype = FP16,
    heads: int = 16,
    codes=None,
    sinks: int = 0,
    longest: int = 4096,
    learned: bool = False,
):
    index = empty(8, dtype=torch.int64), empty(7, dtype=torch.int64), empty(7, 256, dtype=torch.int64)
    q, cache = empty(64, heads, head_dim, dtype=dtype), pages(2, head_dim, codes or dtype)
    more = (window, None, None, *scales(cache), sinks, q if sinks else None)
    logits = (None, None, empty(heads, dtype=FP32)) if learned else ()
    return paged_prefill.paged_prefill, (q, *cache, *index, longest, *more, *logits)


def call_decode(
    head_dim: int,
    num_splits: int,
    window: int | None = None,
    dtype: torch.dtype = FP16,
    heads: int = 16,
    codes=None,
    sinks: int = 0,
):
    index = empty(7, dtype=torch.int64), empty(7, 256, dtype=torch.int64)
    q, cache = empty(7, heads, head_dim, dtype=dtype), pages(2, head_dim, codes or dtype)
    more = (window, None, None, *scales(cache), sinks, q if sinks else None)
    return paged_decode.paged_decode, (q, *cache, *index, num_splits, *more)


def call_planned(
    head_dim: int, tokens_each: int = 1, window: int | None = None, heads: int = 16, codes=None, learned: bool = False
):
    launcher, (q, keys, values, seq_lens, table, *more) = call_decode(head_dim, 1, window, heads=heads, codes=codes)
    items, counters = empty(decode_plan.FIELDS, 73, dtype=torch.int32), empty(88, 2, dtype=torch.int32)
    plan = decode_plan.DecodePlan(items, counters, tokens_each)
    logits = (empty(heads, dtype=FP32),) if learned else ()
    return launcher, (q, keys, values, seq_lens.int(), table.int(), *more, plan, *logits)


def call_latent(heads: int, dtype: torch.dtype = FP16, codes=None, planned: bool = True):
    """The latents of DeepSeek-V2 and V3: 512 columns, and a rotary key of 64."""
    q, latents = empty(7, heads, 576, dtype=dtype), empty(9, 16, 576, dtype=codes or dtype)
    index = empty(7, dtype=torch.int32), empty(7, 256, dtype=torch.int32)
    counters = empty(88, latent_decode.head_tiles(heads), dtype=torch.int32)
    plan = decode_plan.DecodePlan(empty(decode_plan.FIELDS, 73, dtype=torch.int32), counters, 1) if planned else None
    return latent_decode.latent_decode, (
        q, latents, *index, 512, None, None, empty(9, 16, dtype=FP32) if codes else None, plan,
    )  # fmt: skip


def call_sample(vocab_size: int, *used: str):
    floats, ints = empty(4, dtype=FP32), empty(4, dtype=torch.int64)
    columns = {"min_p": floats, "top_k": ints, "top_p": floats}
    filters = [column if name in used else None for name, column in columns.items()]
    return sampling.sample, (empty(4, vocab_size, dtype=FP32), floats, ints, ints, empty(4, dtype=torch.bool), *filters)


def call_quantized(
    rows: int, format: str, group: int | None, zeros: bool = False, dtype: torch.dtype = FP16, splits: int = 1
):
    unit, groups = 512 // packed_weight.carrier_bits(format), 4096 // group if group else 1
    weight = packed_weight.PackedWeight(
        empty(4096 // unit, 4096, 16, dtype=torch.int32), empty(groups, 4096, dtype=FP16 if group else FP32),
        empty(groups, 4096, dtype=torch.int8) if zeros else None, format, 4096, group or 4096,
        empty(256, dtype=torch.int32),
    )  # fmt: skip
    return quantized_matmul.quantized_matmul, (empty(rows, 4096, dtype=dtype), weight, empty(4096, dtype=dtype), splits)


def call_scaled(rows: int, dtype: torch.dtype):
    scales = empty(rows, dtype=FP32), empty(4096, dtype=FP32)
    return scaled_matmul.scaled_matmul, (
        empty(rows, 4096, dtype=dtype),
        scales[0],
        empty(4096, 4096, dtype=dtype),
        scales[1],
        None,
        FP16,
    )


def call_experts(rows: int, dtype: torch.dtype = FP16, experts: int = 64):
    """Of Qwen3-MoE's size: rows of so many tokens times gate and up, each token gathered."""
    x, weight = empty(rows, 2048, dtype=dtype), empty(experts, 1536, 2048, dtype=dtype)
    offsets, tokens = empty(experts + 1, dtype=torch.int64), empty(8 * rows, dtype=torch.int64)
    return grouped_matmul.grouped_matmul, (x, weight, offsets, tokens)


def call_lora(num_tokens: int, rank: int, dtype: torch.dtype = FP16, size: int = 4096):
    """8 adapters of the query columns of a fused projection, B as the engine keeps it."""
    output = empty(num_tokens, size + 2 * 1024, dtype=dtype)[:, :size]
    a, b = empty(8, rank, size, dtype=dtype), empty(8, rank, size, dtype=dtype).transpose(1, 2)
    plan = lora.LoRAPlan(empty(num_tokens, dtype=torch.int64), empty(9, dtype=torch.int32))
    slots = empty(num_tokens, dtype=torch.int32)
    return lora.triton_add_lora_, (output, empty(num_tokens, size, dtype=dtype), a, b, slots, plan)


# name -> a launcher and its arguments, or a function of them. Add the kernels of a new module here.
CALLS = {
    "rms_norm, hidden state": (norm.rms_norm, (empty(4, 4096), empty(4096), 1e-6)),
    "rms_norm, heads": (norm.rms_norm, (empty(64, 32, 128)[:, :8], empty(128), 1e-6)),
    "add_rms_norm": call_add_rms_norm(4096),
    "add_rms_norm, not a power of two": call_add_rms_norm(2880),
    "silu_mul": (activation.silu_mul, (empty(4, 2 * 3072),)),
    "softmax": (softmax.softmax, (empty(4, 4096),)),
    "rotary": call_rotary(32, 8, 128, False),
    "rotary, normed": call_rotary(32, 8, 128, True),
    "rotary, 80 dimensions": call_rotary(9, 3, 80, True),
    "matmul, large": call_matmul(4096, 4096, 4096, "nn"),
    "matmul, large, weights": call_matmul(4096, 4096, 4096, "nt"),
    "matmul, medium": call_matmul(256, 512, 4096, "nt"),
    "matmul, few rows": call_matmul(16, 4096, 4096, "nt"),
    "matmul, fp32": call_matmul(512, 512, 512, "nn", FP32),
    "matmul, fp32, weights": call_matmul(512, 512, 512, "nt", FP32),
    "plan of tiles": (tile_plan.plan_tiles, (empty(8, dtype=torch.int64), empty(7, dtype=torch.int64), 64, 4096, 32)),
    "flash, 64": call_flash(64),
    "flash, 128": call_flash(128),
    "flash, 128, window": call_flash(128, 1024),
    "flash, 80, window": call_flash(80, 1024),
    "flash, 256": call_flash(256),
    "flash, fp32": call_flash(128, dtype=FP32),
    "prefill, 64": call_prefill(64),
    "prefill, 128": call_prefill(128),
    "prefill, 128, window": call_prefill(128, 1024),
    "prefill, 80": call_prefill(80),
    "prefill, 256": call_prefill(256, 1024),
    "prefill, group of 7": call_prefill(64, heads=14),
    "prefill, fp32": call_prefill(64, dtype=FP32),
    "decode, 64": call_decode(64, 1),
    "decode, 128": call_decode(128, 1),
    "decode, 128, split": call_decode(128, 8),
    "decode, 128, split, window": call_decode(128, 8, 1024),
    "decode, 80": call_decode(80, 1),
    "decode, 256, split": call_decode(256, 4),
    "decode, group of 7": call_decode(64, 8, heads=14),
    "decode, fp32": call_decode(128, 8, dtype=FP32),
    "decode, 64, planned": call_planned(64),
    "decode, 128, planned": call_planned(128),
    "decode, 128, planned, window": call_planned(128, window=1024),
    "decode, 128, planned, two tokens": call_planned(128, 2),
    "decode, 128, planned, drafts": call_planned(128, 4),
    "decode, 64, planned, drafts, window": call_planned(64, 8, 1024, heads=8),
    "decode, 128, planned, drafts, fp8": call_planned(128, 4, codes=FP8),
    "plan of decoding": (decode_plan.plan_decode, (empty(256, dtype=torch.int32), 8, 40_960, 132)),
    "plan of decoding, drafts": (
        decode_plan.plan_decode,
        (empty(256, dtype=torch.int32), 8, 40_960, 132, 1024, empty(256, dtype=torch.int32), 8),
    ),
    "rotary, int8": call_rotary(32, 8, 128, False, INT8),
    "rotary, fp8, normed": call_rotary(32, 8, 128, True, FP8),
    "rotary, int4": call_rotary(32, 8, 128, False, INT4),
    "prefill, 64, int8": call_prefill(64, codes=INT8),
    "prefill, 128, int8": call_prefill(128, codes=INT8),
    "prefill, 128, int8, short": call_prefill(128, codes=INT8, longest=3),
    "prefill, 128, bf16, fp8": call_prefill(128, dtype=torch.bfloat16, codes=FP8),
    "prefill, 64, int4": call_prefill(64, codes=INT4),
    "prefill, 128, int4": call_prefill(128, codes=INT4),
    "prefill, 128, sinks": call_prefill(128, 1024, sinks=4),
    "prefill, 64, learned sinks": call_prefill(64, 128, torch.bfloat16, learned=True),  # gpt-oss
    "decode, 64, int8": call_decode(64, 1, codes=INT8),
    "decode, 128, split, int8": call_decode(128, 8, codes=INT8),
    "decode, 128, split, fp8": call_decode(128, 8, codes=FP8),
    "decode, 128, split, bf16, fp8": call_decode(128, 8, dtype=torch.bfloat16, codes=FP8),
    "decode, 64, int4": call_decode(64, 1, codes=INT4),
    "decode, 128, planned, int4": call_planned(128, codes=INT4),
    "decode, 128, split, bf16, int4": call_decode(128, 8, dtype=torch.bfloat16, codes=INT4),
    "decode, 128, split, sinks, fp8": call_decode(128, 8, 1024, codes=FP8, sinks=4),
    "decode, 64, planned, learned sinks": call_planned(64, 1, 128, learned=True),
    "latents, 16 heads": call_latent(16),
    "latents, 16 heads, one split": call_latent(16, planned=False),
    "latents, 128 heads, bf16": call_latent(128, torch.bfloat16),
    "latents, int8": call_latent(16, codes=INT8),
    "latents, bf16, fp8": call_latent(128, torch.bfloat16, FP8),
    "latents, fp32": call_latent(16, FP32),
    "W4A16, few rows": call_quantized(16, "int4", 128, splits=8),
    "W4A16, few rows, bf16": call_quantized(16, "int4", 128, dtype=torch.bfloat16, splits=8),
    "W4A16, few rows, zeros": call_quantized(1, "int4", 64, True),
    "W4A16, few rows, 50": call_quantized(50, "int4", 64, splits=2),
    "W4A16, few rows, fp32": call_quantized(1, "int4", 64, dtype=FP32),
    "W4A16, many rows": call_quantized(256, "int4", 128),
    "W4A16, many rows, bf16": call_quantized(256, "int4", 64, True, torch.bfloat16),
    "W4A16, many rows, fp32": call_quantized(256, "int4", 64, dtype=FP32),
    "W8A16, few rows": call_quantized(8, "int8", None, splits=8),
    "W8A16, few rows, bf16": call_quantized(8, "int8", 64, True, torch.bfloat16),
    "W8A16, many rows, fp8": call_quantized(256, "fp8", 64),
    "W4A16, few rows, fp4": call_quantized(8, "fp4", 32),
    "W4A16, ragged groups": call_quantized(8, "fp4", 16),
    "W4A16, dequantize": call_quantized(2048, "int4", 64),
    "quantize rows, int8": (scaled_matmul.quantize_rows, (empty(8, 4096), "int8")),
    "quantize rows, fp8": (scaled_matmul.quantize_rows, (empty(8, 14336), "fp8", 0.1)),
    "W8A8 int8, few rows": call_scaled(16, torch.int8),
    "W8A8 int8": call_scaled(256, torch.int8),
    "W8A8 fp8, few rows": call_scaled(16, torch.float8_e4m3fn),
    "W8A8 fp8": call_scaled(256, torch.float8_e4m3fn),
    "LoRA, few tokens": call_lora(16, 64),
    "LoRA, many tokens": call_lora(1024, 64),
    "LoRA, fp32": call_lora(1024, 64, FP32),
    "experts, few rows": call_experts(8),
    "experts, few rows, bf16": call_experts(8, torch.bfloat16, 128),
    "experts, some rows": call_experts(256),
    "experts, many rows": call_experts(16_384, experts=8),
    "experts, fp32": call_experts(64, FP32),
    "sample": call_sample(151_936),
    "sample, filtered": call_sample(151_936, "min_p", "top_k", "top_p"),
    "sample, top-k, ragged rows": call_sample(32_003, "top_k"),
    "sample, top-p, ragged rows": call_sample(32_003, "top_p"),
}
