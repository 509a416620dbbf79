"""What `minillm bench kernels` measures: each kernel's shapes, its peers, and the bytes and operations they cannot
avoid. Built in chapter 12.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import native
from ..kernels.activation import silu_mul, torch_silu_mul
from ..kernels.language import MODE
from ..kernels.matmul import matmul
from ..kernels.norm import add_rms_norm, rms_norm, torch_add_rms_norm, torch_rms_norm
from ..kv_cache.torch_attention import DecodePlan, decode_attention
from ..model.layers import can_pack
from .attention_cases import decode_cases, prefill_cases, sdpa_gathered
from .case import Case
from .kv_cases import kv4_cases, kv8_cases
from .latent_cases import latent_cases
from .quantized_cases import w4a16_cases, w8a8_cases

FAMILIES = {
    "cuda": ("elementwise", "matmul", "prefill", "decode", "w4a16", "w8a8", "kv8", "kv4", "latents"),
    "cpu": ("linear", "c-decode"),
}


def cases_of(families: tuple[str, ...], scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """Raises ValueError for a family that is unknown, or that has nothing to run on here."""
    build = {
        "elementwise": elementwise_cases,
        "matmul": matmul_cases,
        "prefill": prefill_cases,
        "decode": decode_cases,
        "w4a16": w4a16_cases,
        "w8a8": w8a8_cases,
        "kv8": kv8_cases,
        "kv4": kv4_cases,
        "latents": latent_cases,
        "linear": linear_cases,
        "c-decode": c_decode_cases,
    }
    families = families or FAMILIES[device.type]
    if unknown := set(families) - build.keys():
        raise ValueError(f"families={sorted(unknown)} are unknown; choose among {', '.join(build)}")
    if device.type == "cpu" and set(families) & set(FAMILIES["cuda"]) and (MODE != "interpreted" or scale < 16):
        raise ValueError(
            f"families={sorted(families)} are Triton kernels: they need a GPU, "
            "or the interpreter and a scale of 16 at least"
        )
    if set(families) & set(FAMILIES["cpu"]) and (device.type != "cpu" or native.library(dtype) is None):
        raise ValueError(
            f"families={sorted(families)} are C kernels: they need a CPU with a C compiler, float32 or bfloat16"
        )
    return [case for family in families for case in build[family](scale, device, dtype)]


def elementwise_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    tokens, hidden = 8192 // scale, 4096 // scale
    size = dtype.itemsize * tokens * hidden
    random = partial(torch.randn, device=device, dtype=dtype)
    weight = random(hidden)
    return [
        Case(
            f"rms_norm {tokens} x {hidden}",
            lambda: (random(tokens, hidden), weight, 1e-6),
            {
                "minillm": rms_norm,
                "twin": torch_rms_norm,
                "F.rms_norm": lambda x, w, eps: F.rms_norm(x, (hidden,), w, eps),
            },
            2 * size,
        ),
        Case(
            f"add_rms_norm {tokens} x {hidden}",
            lambda: (random(tokens, hidden), random(tokens, hidden), weight, 1e-6),
            {"minillm": add_rms_norm, "twin": torch_add_rms_norm},
            4 * size,
        ),
        Case(
            f"silu_mul {tokens} x {hidden}",
            lambda: (random(tokens, 2 * hidden),),
            {"minillm": silu_mul, "twin": torch_silu_mul},
            3 * size,
        ),
    ]


def matmul_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    cases = []
    for m, n, k in ((4096, 4096, 4096), (16, 4096, 4096)):
        m, n, k = max(1, m // scale), n // scale, k // scale
        make = lambda m=m, n=n, k=k: (
            torch.randn(m, k, device=device, dtype=dtype),
            torch.randn(k, n, device=device, dtype=dtype),
        )
        cases.append(
            Case(
                f"matmul {m} x {n} x {k}",
                make,
                {"minillm": matmul, "torch": torch.matmul},
                dtype.itemsize * (m * k + k * n + m * n),
                2 * m * n * k,
            )
        )
    return cases


def c_decode_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """One token a sequence over pages in host memory: SmolLM2-135M's heads, 9 on 3 of 64 dimensions."""
    cases = []
    for num_seqs, length in ((1, 8192), (16, 2048), (64, 512)):
        num_seqs, length = max(1, num_seqs // scale), max(32, length // scale // 16 * 16)
        blocks = length // 16

        def make(num_seqs=num_seqs, blocks=blocks):
            keys, values = (torch.randn(num_seqs * blocks + 1, 3, *shape).to(dtype) for shape in ((64, 16), (16, 64)))
            table = (torch.randperm(num_seqs * blocks) + 1).view(num_seqs, blocks)
            return torch.randn(num_seqs, 9, 64).to(dtype), keys, values, table

        lens = torch.full((num_seqs,), length)
        candidates = {
            "minillm, C": partial(_in_place, lens),
            "minillm, torch": partial(_embedding_bags, lens),
            "SDPA, gathered": lambda q, keys, values, table, length=length: sdpa_gathered(
                q, keys, values, table, length
            ),
        }
        cases.append(
            Case(
                f"C paged decode {num_seqs} x {length}",
                make,
                candidates,
                2 * dtype.itemsize * num_seqs * length * 3 * 64,
                4 * num_seqs * 9 * length * 64,
            )
        )
    return cases


def _in_place(lens: Tensor, q: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """The C kernel also writes a token: here it writes back what stands in each sequence's last slot."""
    last = table[:, -1]
    k, v = keys[last, :, :, 15].contiguous(), values[last, :, 15].contiguous()
    pages = native.Pages.of(keys, values)
    sequences = native.Sequences.of(torch.arange(len(q) + 1), lens, table, last * 16 + 15, int(lens[0]))
    return native.paged_attention(q, k, v, pages, sequences)


def _embedding_bags(lens: Tensor, q: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """`minillm.kv_cache.torch_attention`, its plan made anew each time, as it is once a step for all layers."""
    counts = (lens.numpy() + 15) // 16
    cache = SimpleNamespace(keys=[keys])
    plan = DecodePlan(table.numpy(), counts, q.shape[1], cache, q.device)
    plan.mask = torch.zeros(len(q), 1, table.shape[1] * 16)
    return decode_attention(q, keys, values, plan)


def linear_cases(scale: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """y = x Wᵀ of SmolLM2-135M's largest layers, few rows and many."""
    cases = []
    for sizes in ((49152, 576), (3072, 576), (576, 1536)):
        out_features, in_features = (max(16, size // scale) for size in sizes)
        for rows in (1, 8, 64, 256):
            weight = torch.randn(out_features, in_features).to(dtype) * in_features**-0.5
            panels = native.pack(weight)
            candidates = {
                "minillm, C": lambda x, panels=panels, n=out_features: native.linear(x, panels, None, n),
                "F.linear": lambda x, weight=weight: F.linear(x, weight),
            }
            if can_pack(weight):  # an older CPU has no packed products of bfloat16
                packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
                candidates["oneDNN, packed"] = lambda x, packed=packed: torch.ops.mkldnn._linear_pointwise.default(
                    x, packed, None, "none", [], ""
                )
            cases.append(
                Case(
                    f"C linear {rows} x {in_features} -> {out_features}",
                    lambda rows=rows, n=in_features: (torch.randn(rows, n).to(dtype),),
                    candidates,
                    dtype.itemsize * (rows * (in_features + out_features) + out_features * in_features),
                    2 * rows * out_features * in_features,
                )
            )
    return cases
