"""Every kernel that steps with prompts and draws may need, launched once at the start. Built in chapter 14.

Triton compiles a variant of a kernel at its first launch, a second or two during which every request would wait. Recording
has launched what recorded steps need. What is left depends on few things: attention on the number of queries (a tile is no
larger than the longest piece of a prompt) and on the window of a layer, draws on whether anything is filtered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kv_cache.triton_attention import TritonAttention
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder
from minillm.sampling.params import SamplingParams
from minillm.sampling.sampler import Sampler, SamplingMetadata, SamplingRow
from minillm.staging import upload

QUERIES = (2, 8, 16, 32, 64, 128)  # of a sequence: every size of tile is among those that they lead to
DRAWS = (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9))


@torch.inference_mode()
def warm_up(model: Decoder, attention: TritonAttention, sampler: Sampler) -> None:
    """Launch them on zeros and on the null block; nothing is written to the cache."""
    config = model.config
    windows = {window: layer for layer, window in reversed([*enumerate(config.layer_windows)])}
    for count in QUERIES if attention.torch is None else ():
        batch = one_decode_and_a_prompt(count, attention.cache.block_size, model.device)
        queries = torch.zeros(1 + count, config.num_heads, config.head_dim, dtype=model.dtype, device=model.device)
        for layer in windows.values():
            attention.attend_stored(queries, layer, batch)
    logits = torch.zeros(1, config.vocab_size, device=model.device)
    for params in DRAWS:
        rows = [SamplingRow(params, 0, [0], [], frozenset())]
        sampler.choose(logits, SamplingMetadata(rows, config.vocab_size, model.device))


def one_decode_and_a_prompt(count: int, block_size: int, device: torch.device) -> ForwardBatch:
    """One row that decodes and a prompt of `count` tokens, whose pages are all the null block."""

    def tensor(values: list[int]) -> Tensor:
        return upload(values, device=device)[0]

    return ForwardBatch(
        token_ids=tensor([0] * (1 + count)),
        positions=tensor([0, *range(count)]),
        query_start_loc=tensor([0, 1, 1 + count]),
        seq_lens=tensor([1, count]),
        block_table=torch.zeros(2, -(-count // block_size), dtype=torch.int64, device=device),
        slot_mapping=tensor([-1] * (1 + count)),
        max_query_len=count,
        logits_indices=tensor([0, count]),
        max_seq_len=count,
        num_decodes=1,
    )
