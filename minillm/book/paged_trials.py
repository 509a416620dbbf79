"""What chapter 13 tries its kernels on: random pages among NaN, random batches, pages of latents.
Built in chapter 13."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.book.torch_traffic import record_torch_traffic
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_STEPS_OF_NAIVE = (
    "gather the keys",
    "turn them into one piece",
    "gather the values",
    "keys, a copy for each head",
    "values, a copy for each head",
    "scores",
    "scale",
    "softmax",
    "weighted sum",
)


class Case(NamedTuple):
    """One batch for `paged_decode`."""

    q: Tensor
    pages: tuple[Tensor, Tensor, Tensor, Tensor]  # keys, values, block_table, seq_lens
    num_splits: int
    window: int | None
    atol: float


class Latents(NamedTuple):
    """One query of absorbed attention, its pages, and the same as multi-head attention takes it."""

    plain: Tensor  # [heads, nope]
    turned: Tensor  # [heads, rope]
    k_up: Tensor  # [heads, nope, rank]
    v_up: Tensor  # [heads, nope, rank]
    latents: Tensor  # [length, rank + rope]
    pages: Tensor  # [num_blocks, 16, rank + rope], NaN outside of the latents
    table: Tensor


def random_pages(lengths, kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32, seed=0):
    """keys, values, block_table, seq_lens of sequences whose blocks lie in random order; all else is NaN."""
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    order = (1 + torch.randperm(sum(counts) + 3, generator=rng)).tolist()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    keys = torch.full((sum(counts) + 4, kv_heads, head_dim, block_size), float("nan"))
    values = torch.full((sum(counts) + 4, kv_heads, block_size, head_dim), float("nan"))
    for row, length in enumerate(lengths):
        for place in range(counts[row]):
            block = table[row, place] = order.pop()
            used = min(block_size, length - place * block_size)
            keys[block, ..., :used] = torch.randn(kv_heads, head_dim, used, generator=rng)
            values[block, :, :used] = torch.randn(kv_heads, used, head_dim, generator=rng)
    lens = torch.tensor(lengths, device=DEVICE)
    return keys.to(DEVICE, dtype), values.to(DEVICE, dtype), table.to(DEVICE), lens


def random_queries(num_seqs, num_heads, head_dim=64, dtype=torch.float32, seed=1):
    """[num_seqs, num_heads, head_dim]."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(num_seqs, num_heads, head_dim, generator=rng).to(DEVICE, dtype)


def random_case(seed: int) -> Case:
    """A batch of one or two sequences, of any shape, number of splits and window."""
    rng, dtype = random.Random(seed), (torch.float32, torch.float16)[seed % 2]
    kv_heads, group, head_dim = rng.randint(1, 2), rng.choice((1, 3, 4)), rng.choice((16, 40, 64))
    lengths = [rng.choice((1, 15, 16, 17, 64, 65, 200)) for _ in range(rng.randint(1, 2))]
    pages = random_pages(lengths, kv_heads, head_dim, rng.choice((4, 16, 5)), dtype, seed=seed)
    q = random_queries(len(lengths), kv_heads * group, head_dim, dtype)
    splits, window = rng.choice((1, 2, 4)), rng.choice((None, 20))
    return Case(q, pages, splits, window, 1e-5 if dtype is torch.float32 else 4e-3)


def shared_batch(num_seqs: int, shared: int, own: int, head_dim: int = 32, group: int = 4):
    """queries, keys, values, tables, lengths of sequences whose first `shared` positions are the same pages."""
    keys, values, table, _ = random_pages([shared] + num_seqs * [own], 1, head_dim, seed=5)
    prefix, rest = table[:1, : shared // 16].expand(num_seqs, -1), table[1:, : -(-own // 16)]
    tables = torch.cat([prefix, rest], dim=1).contiguous()
    queries = random_queries(num_seqs, group, head_dim)[:, None].contiguous()
    return queries, keys, values, tables, [shared + own] * num_seqs


def random_latents(length: int, heads: int, rank: int, rope: int, nope: int) -> Latents:
    """A query of `heads` heads, and `length` latents in pages of 16."""
    rng = torch.Generator().manual_seed(length)
    plain, turned, k_up, v_up = (
        torch.randn(heads, *size, generator=rng) for size in ((nope,), (rope,), (nope, rank), (nope, rank))
    )
    count = -(-length // 16)
    pages = torch.full((count + 3, 16, rank + rope), float("nan"))
    table = 1 + torch.randperm(count + 2, generator=rng)[:count]
    latents = torch.randn(length, rank + rope, generator=rng)
    pages[table.repeat_interleave(16)[:length], torch.arange(length) % 16] = latents
    return Latents(*(x.to(DEVICE) for x in (plain, turned, k_up, v_up, latents, pages, table)))


def latent_decoder() -> Decoder:
    """A DeepSeek-V2 of two small layers with random weights, on the CPU."""
    config = ModelConfig.from_hf(
        dict(
            model_type="deepseek_v2", vocab_size=97, hidden_size=64, intermediate_size=96, q_lora_rank=None,
            num_hidden_layers=2, num_attention_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
            v_head_dim=16, first_k_dense_replace=2, max_position_embeddings=256,
        )
    )  # fmt: skip
    decoder, rng = Decoder(config, torch.float32), torch.Generator().manual_seed(1)
    for view in decoder.checkpoint_views().values():
        view.copy_(torch.randn(view.shape, generator=rng) * 0.2)
    return decoder.prepare()


def traffic_rows(traffic: record_torch_traffic) -> list[tuple[str, str, str, str]]:
    """The operations of `naive_gather_then_attend`, what each is for, and the kB that it reads and writes."""
    rows = [
        (name, what, f"{read / 1e3:.0f}", f"{written / 1e3:.0f}")
        for (name, read, written), what in zip(traffic.ops, _STEPS_OF_NAIVE)
    ]
    return [*rows, ("all", "", f"{traffic.bytes_read / 1e3:.0f}", f"{traffic.bytes_written / 1e3:.0f}")]
