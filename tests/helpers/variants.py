"""A process that counts what Triton would compile: launches with its real binder, a pretended driver, and no compiler.

Prints JSON: kernel -> number of variants. The arguments are those of a model's steps: any number of rows, tables of any
width, index tensors that begin anywhere.
"""

from __future__ import annotations

import json
import os
import types
from collections import Counter

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

from minillm.kernels import activation, norm, packed_weight, quantized_matmul, scaled_matmul
from minillm.kv_cache import triton_attention
from minillm.kv_cache.latent import LatentKVCache
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.triton_latent import TritonLatentAttention
from minillm.model.batch import ForwardBatch

HEADS, KV_HEADS, DIM = 8, 4, 64
COMPILED: set[tuple[str, str]] = set()


class Compiled:
    """Stands in for a kernel that was compiled: launching it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args):
        return None

    def run(self, *args):
        return None


def count_variants() -> None:
    active = types.SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_active_torch_device=lambda: torch.device("cpu"),
    )  # fmt: skip
    jit.driver = triton.runtime.driver = types.SimpleNamespace(active=active)

    def compile_nothing(self, key, signature, device, *more, **options):
        COMPILED.add((self.fn.__name__, str(key)))
        self.device_caches[device][0][key] = Compiled()
        return self.device_caches[device][0][key]

    jit.JITFunction._do_compile = compile_nothing


def anywhere(values: list[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
    """An index tensor that begins `offset` elements behind an aligned address."""
    return torch.tensor([0] * offset + values, dtype=dtype)[offset:]


def batch_of(
    lengths: list[int], brings: list[int], columns: int, offset: int, index: torch.dtype, tokens_each: int
) -> ForwardBatch:
    starts = [sum(brings[:at]) for at in range(len(brings) + 1)]
    return ForwardBatch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64), positions=torch.zeros(starts[-1], dtype=torch.int64),
        query_start_loc=anywhere(starts, index, offset), seq_lens=anywhere(lengths, index, offset),
        block_table=anywhere([0] * len(lengths) * columns, index, offset).view(len(lengths), columns),
        slot_mapping=anywhere([-1] * starts[-1], index, offset), max_query_len=max(brings), logits_indices=None,
        max_seq_len=max(lengths), tokens_each=tokens_each,
        query_index=anywhere([0] * starts[-1], index, offset) if tokens_each > 1 else None,
    )  # fmt: skip


def attend(windows: list[int | None], tokens_each: int) -> None:
    triton_attention.serves = lambda keys: True
    cache = PagedKVCache(len(windows), KV_HEADS, DIM, 4, 16, torch.float16)
    attention = triton_attention.TritonAttention(cache, windows, HEADS)
    for step in range(1, 40):
        brings = [1] * step + [(5, 12, 25, 60)[step % 4]] * (step % 3)  # prompts join rows of one token
        batch = batch_of(
            [max(step * 7, bring) for bring in brings], brings, 1 + step * 3 % 37, step % 4, torch.int32, tokens_each
        )
        angles = torch.zeros(batch.num_tokens, 1, DIM, dtype=torch.float16)
        qkv = torch.zeros(batch.num_tokens, HEADS + 2 * KV_HEADS, DIM, dtype=torch.float16)
        for layer in range(len(windows)):
            queries = attention.rotate_and_store(qkv, (angles, angles), None, None, 1e-6, layer, batch.slot_mapping)
            attention.attend_stored(queries, layer, batch)


def attend_latents() -> None:
    triton_attention.serves = lambda latents: True
    cache = LatentKVCache(2, 1, 24, 4, 16, torch.float16)
    attention = TritonLatentAttention(cache, [None, None], HEADS, 16)
    for step in range(1, 40):
        batch = batch_of([step * 7] * step, [1] * step, 1 + step * 3 % 37, step % 4, torch.int32, 1)
        batch.slot_mapping.zero_()
        q = torch.zeros(step, HEADS, 24, dtype=torch.float16)
        for layer in range(2):
            attention.attend(q, q[:, :1], q[:, :1, :16], layer, batch)


def multiply() -> None:
    weight = packed_weight.PackedWeight(
        torch.zeros(8, 1024, 16, dtype=torch.int32), torch.zeros(8, 1024, dtype=torch.float16), None, "int4", 1024, 128,
        torch.zeros(64, dtype=torch.int32),
    )  # fmt: skip
    for rows in range(1, 200):
        x = torch.zeros(rows, 1024, dtype=torch.float16)
        quantized_matmul.quantized_matmul(x, weight)
        codes = scaled_matmul.quantize_rows(x, "int8")
        scaled_matmul.scaled_matmul(*codes, torch.zeros(1024, 1024, dtype=torch.int8), torch.zeros(1024))
        norm.rms_norm(x, x[0], 1e-6), norm.add_rms_norm(x, x, x[0], 1e-6), activation.silu_mul(x)
        norm.rms_norm(x.view(rows, 16, 64)[:, :8], x[0, :64], 1e-6)


def main() -> None:
    count_variants()
    found = {}
    for name, work in {
        "plain": lambda: attend([None, None], 1), "windows": lambda: attend([32, None, 32], 1),
        "drafts": lambda: attend([None], 4), "latents": attend_latents, "products": multiply,
    }.items():  # fmt: skip
        before = set(COMPILED)
        work()
        found[name] = Counter(kernel for kernel, _ in COMPILED - before)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
