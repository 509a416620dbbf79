"""What `minillm bench kernels` measures of latent attention: decoding over pages of latents. Built in chapter 13.

The limit of a case counts each latent once, whatever the number of heads. With 128 of them the products can be the
longer part.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..kernels.decode_plan import plan_decode
from ..kernels.latent_decode import head_tiles, latent_decode
from ..kv_cache.latent import latent_attention
from .case import Case


def latent_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """One token a sequence over the latents of DeepSeek-V2-Lite (16 heads) and of V3 (128)."""
    rank, rope = (512, 64) if scale == 1 else (32, 16)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    cases = []
    for heads, num_seqs, length in ((16, 1, 262_144), (16, 16, 32_768), (16, 256, 2048), (128, 16, 32_768)):
        num_seqs, length = max(1, num_seqs // min(scale, 16)), max(32, length // scale // 16 * 16)
        heads = heads if scale == 1 else heads // 8
        blocks = length // 16

        def make(num_seqs=num_seqs, blocks=blocks, heads=heads):
            random = partial(torch.randn, device=device, dtype=dtype)
            table = (torch.randperm(num_seqs * blocks, device=device) + 1).view(num_seqs, blocks)
            return random(num_seqs, heads, rank + rope), random(num_seqs * blocks + 1, 16, rank + rope), table

        lens = torch.full((num_seqs,), length, device=device)
        candidates = {
            "minillm, planned on the device": partial(_planned, lens, length, sms, rank),
            "SDPA, gathered": partial(_gathered, rank),
            "minillm, one split": lambda q, latents, table, lens=lens: latent_decode(q, latents, lens, table, rank),
        }
        cases.append(
            Case(
                f"latent decode {num_seqs} x {length}, {heads} heads",
                make,
                candidates,
                dtype.itemsize * num_seqs * length * (rank + rope),
                2 * num_seqs * heads * length * (2 * rank + rope),
            )
        )
    return cases


def _planned(lens: Tensor, longest: int, sms: int, rank: int, q: Tensor, latents: Tensor, table: Tensor) -> Tensor:
    """As the engine does it; the plan, which it makes once for all layers, is made anew and counted."""
    plan = plan_decode(lens, head_tiles(q.shape[1]), longest, sms)
    return latent_decode(q, latents, lens, table, rank, plan=plan)


def _gathered(rank: int, q: Tensor, latents: Tensor, table: Tensor) -> Tensor:
    """`LatentAttention`: a copy of all latents, then torch's own attention."""
    gathered = latents[table].flatten(1, 2)
    seen = torch.ones(len(q), 1, 1, gathered.shape[1], dtype=torch.bool, device=q.device)
    return latent_attention(q[:, None], gathered, seen, rank)[:, 0]
