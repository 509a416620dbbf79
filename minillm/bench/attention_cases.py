"""What `minillm bench kernels` measures of attention: prompts, and decoding over pages. Built in chapter 12."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.decode_plan import plan_decode
from ..kernels.flash_attention import flash_attention
from ..kernels.paged_decode import choose_num_splits, paged_decode
from ..kernels.paged_prefill import gather_pages, paged_prefill
from .case import Case


def prefill_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """Causal self-attention of one sequence, head_dim 128, 16 query heads on 8 KV heads."""
    heads, kv_heads, dim = (16, 8, 128) if scale == 1 else (2, 1, 32)
    cases = []
    for length in (1024, 4096, 16384):
        length = max(16, length // scale)
        starts = torch.tensor([0, length], device=device)

        def make(length=length):
            return tuple(
                torch.randn(length, count, dim, device=device, dtype=dtype) for count in (heads, kv_heads, kv_heads)
            )

        candidates = {
            "minillm": lambda q, k, v, starts=starts, length=length: flash_attention(q, k, v, starts, length),
            "minillm, paged": _over_pages(length, heads, kv_heads, dim, device, dtype),
        }
        candidates |= {f"SDPA {name}": partial(_sdpa, backend) for name, backend in _sdpa_backends(device).items()}
        if device.type == "cuda":
            candidates["SDPA efficient, heads repeated"] = partial(_sdpa_repeated, heads // kv_heads)
        if device.type == "cuda":
            candidates["FlexAttention"] = _flex(length, device)
        pairs = length * (length + 1) // 2
        num_bytes = dtype.itemsize * length * dim * 2 * (heads + kv_heads)
        cases.append(Case(f"causal attention {length}", make, candidates, num_bytes, 4 * heads * pairs * dim))
    return cases


def _over_pages(
    length: int, heads: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype
) -> Callable[..., Tensor]:
    """The same attention with keys and values in pages; writing them there is not part of it."""
    blocks = -(-length // 16)
    table = (torch.randperm(blocks, device=device) + 1)[None]
    starts, seq_lens = torch.tensor([0, length], device=device), torch.tensor([length], device=device)
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.data_ptr() not in cache:
            padded = (F.pad(x, (0, 0, 0, 0, 0, blocks * 16 - length)).view(blocks, 16, kv_heads, dim) for x in (k, v))
            keys, values = (
                torch.zeros(blocks + 1, *shape, device=device, dtype=dtype)
                for shape in ((kv_heads, dim, 16), (kv_heads, 16, dim))
            )
            k_pages, v_pages = padded
            keys[table[0]], values[table[0]] = k_pages.permute(0, 2, 3, 1), v_pages.transpose(1, 2)
            cache[k.data_ptr()] = keys, values
        return paged_prefill(q, *cache[k.data_ptr()], starts, seq_lens, table, length)

    return attend


def _sdpa_backends(device: torch.device) -> dict:
    from torch.nn.attention import SDPBackend

    if device.type == "cuda":
        return {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    return {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}


def _sdpa(backend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out[0].transpose(0, 1)


def _sdpa_repeated(times: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The memory-efficient backend knows no groups: every query head gets keys and values of its own."""
    from torch.nn.attention import SDPBackend

    return _sdpa(SDPBackend.EFFICIENT_ATTENTION, q, *(x.repeat_interleave(times, dim=1) for x in (k, v)))


def _flex(length: int, device: torch.device) -> Callable[..., Tensor]:
    @cache
    def compiled_with_mask() -> tuple:  # at the first call, so that where it fails only this candidate does
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, query, key: key <= query, None, None, length, length, device=device.type)
        return torch.compile(flex_attention, dynamic=False), mask

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        compiled, mask = compiled_with_mask()
        return compiled(*(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=mask, enable_gqa=True)[0].transpose(
            0, 1
        )

    return attend


def decode_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """One token a sequence over at least 1 GB of pages at full scale; few long sequences and many short ones."""
    heads, kv_heads, dim = (16, 8, 128) if scale == 1 else (4, 2, 32)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    cases = []
    for num_seqs, length in ((1, 262_144), (16, 16_384), (256, 1024)):
        num_seqs, length = max(1, num_seqs // min(scale, 16)), max(32, length // scale // 16 * 16)
        blocks = length // 16

        def make(num_seqs=num_seqs, length=length, blocks=blocks):
            shape = (num_seqs * blocks + 1, kv_heads)
            keys = torch.randn(*shape, dim, 16, device=device, dtype=dtype)
            values = torch.randn(*shape, 16, dim, device=device, dtype=dtype)
            table = (torch.randperm(num_seqs * blocks, device=device) + 1).view(num_seqs, blocks)
            return torch.randn(num_seqs, heads, dim, device=device, dtype=dtype), keys, values, table

        seq_lens = torch.full((num_seqs,), length, device=device)
        splits = choose_num_splits(num_seqs, kv_heads, length, sms)
        candidates = {
            "minillm": lambda q, keys, values, table, n=splits, lens=seq_lens: paged_decode(
                q, keys, values, lens, table, n
            ),
            "minillm, pages in order": lambda q, keys, values, table, n=splits, lens=seq_lens: paged_decode(
                q, keys, values, lens, torch.arange(1, table.numel() + 1, device=device).view(table.shape), n
            ),
            "SDPA, gathered": lambda q, keys, values, table, length=length: sdpa_gathered(
                q, keys, values, table, length
            ),
        }
        candidates["minillm, planned on the device"] = partial(_planned, seq_lens, length, sms)
        if splits > 1:
            candidates["minillm, one split"] = lambda q, keys, values, table, lens=seq_lens: paged_decode(
                q, keys, values, lens, table, 1
            )
        num_bytes = 2 * dtype.itemsize * num_seqs * length * kv_heads * dim
        cases.append(
            Case(
                f"paged decode {num_seqs} x {length}, {splits} splits",
                make,
                candidates,
                num_bytes,
                4 * num_seqs * heads * length * dim,
                unchecked="minillm, pages in order",
            )
        )
    return cases + uneven_decode_cases(scale, device, dtype)


def _planned(lens: Tensor, longest: int, sms: int, q: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """As the engine does it; the plan, which it makes once for all layers, is made anew and counted."""
    plan = plan_decode(lens, keys.shape[1], longest, sms)
    return paged_decode(q, keys, values, lens, table, plan=plan)


def uneven_decode_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """A long text among many short ones, each split by its own length."""
    heads, kv_heads, dim = (16, 8, 128) if scale == 1 else (4, 2, 32)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    short, long, count = (
        max(16, 1024 // scale // 16 * 16),
        max(64, 102_400 // scale // 16 * 16),
        63 if scale == 1 else 2,
    )
    lengths = [long, *[short] * count]

    def make():
        shape = (sum(lengths) // 16 + 1, kv_heads)
        keys, values = (torch.randn(*shape, *page, device=device, dtype=dtype) for page in ((dim, 16), (16, dim)))
        table = torch.zeros(len(lengths), long // 16, dtype=torch.int64, device=device)
        blocks = (torch.randperm(shape[0] - 1, device=device) + 1).split([length // 16 for length in lengths])
        for row, own in zip(table, blocks):
            row[: len(own)] = own
        return torch.randn(len(lengths), heads, dim, device=device, dtype=dtype), keys, values, table

    def gathered(q, keys, values, table):
        rows = [(q[at : at + 1], table[at : at + 1, : length // 16], length) for at, length in enumerate(lengths)]
        return torch.cat([sdpa_gathered(one, keys, values, pages, length) for one, pages, length in rows])

    lens = torch.tensor(lengths, device=device)
    candidates = {
        "minillm, planned on the device": partial(_planned, lens, long, sms),
        "SDPA, gathered": gathered,
        "minillm, one split": lambda q, keys, values, table: paged_decode(q, keys, values, lens, table, 1),
    }
    return [
        Case(
            f"paged decode 1 x {long} among {count} x {short}",
            make,
            candidates,
            2 * dtype.itemsize * sum(lengths) * kv_heads * dim,
            4 * sum(lengths) * heads * dim,
        )
    ]


def sdpa_gathered(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int) -> Tensor:
    pages = [gather_pages(keys, values, row, length) for row in table]
    k, v = (torch.stack(parts).transpose(1, 2) for parts in zip(*pages))  # [num_seqs, kv_heads, length, dim]
    return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
