"""What `minillm bench kernels` measures of a cache of codes: decoding over its pages, beside the same pages in 16 bits.
Built in chapter 17.

The limit of a case counts the codes and their scales; that of the same attention over 16 bits is almost twice as far,
and more than three times as far as that of int4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.paged_decode import choose_num_splits, paged_decode
from ..kv_cache.quantized import KV_DTYPES, bytes_per_vector, dequantize_vectors, quantize_vectors
from .case import Case


def kv8_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """One token a sequence, 8,192 positions and more, in int8 and fp8; the same values in `dtype` are the measure."""
    return code_cases(("int8", "fp8"), scale, device, dtype)


def kv4_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """`kv8_cases` in int4."""
    return code_cases(("int4",), scale, device, dtype)


def code_cases(names: tuple[str, ...], scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    heads, kv_heads, dim = (16, 8, 128) if scale == 1 else (2, 1, 32)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    cases = []
    for name in names:
        codes_dtype = KV_DTYPES[name]
        for num_seqs, length in ((1, 262_144), (16, 16_384), (64, 8192)):
            num_seqs, length = max(1, num_seqs // min(scale, 16)), max(32, length // scale // 16 * 16)
            blocks = length // 16

            def make(num_seqs=num_seqs, blocks=blocks, codes_dtype=codes_dtype):
                shape = (num_seqs * blocks + 1, kv_heads, 16, dim)
                k, v = (quantize_vectors(torch.randn(shape, device=device), codes_dtype) for _ in range(2))
                codes = k[0].view(torch.uint8).transpose(2, 3).contiguous().view(codes_dtype), v[0]
                plain = [dequantize_vectors(x, scales[..., None], dtype) for x, scales in (k, v)]
                plain[0] = plain[0].transpose(2, 3).contiguous()
                table = (torch.randperm(num_seqs * blocks, device=device) + 1).view(num_seqs, blocks)
                return torch.randn(num_seqs, heads, dim, device=device, dtype=dtype), table, codes, (k[1], v[1]), plain

            seq_lens = torch.full((num_seqs,), length, device=device)
            splits = choose_num_splits(num_seqs, kv_heads, length, sms)

            def ours(q: Tensor, table: Tensor, codes, scales, plain, lens=seq_lens, n=splits) -> Tensor:
                return paged_decode(q, *codes, lens, table, n, key_scales=scales[0], value_scales=scales[1])

            def unquantized(q: Tensor, table: Tensor, codes, scales, plain, lens=seq_lens, n=splits) -> Tensor:
                return paged_decode(q, *plain, lens, table, n)

            num_bytes = 2 * num_seqs * length * kv_heads * bytes_per_vector(dim, codes_dtype)
            candidates = {"minillm": ours, f"{str(dtype).removeprefix('torch.')} pages": unquantized}
            cases.append(
                Case(
                    f"paged decode, {name} cache, {num_seqs} x {length}, {splits} splits",
                    make,
                    candidates,
                    num_bytes,
                    4 * num_seqs * heads * length * dim,
                )
            )
    return cases
