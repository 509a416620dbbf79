"""Every kernel that steps with prompts and draws may need, launched once at the start. Built in chapter 14.

Triton compiles a variant of a kernel at its first launch, a second or two during which every request would wait. What a
step needs depends on few things: attention on the number of queries (a tile is no larger than the longest piece of a
prompt), quantized products on the number of tokens, draws on whether anything is filtered. So a few steps launch them
all, also where none are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from minillm.kv_cache.triton_attention import TritonAttention
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder
from minillm.rounding import ceil_div
from minillm.sampling.metadata import SamplingMetadata, SamplingRow
from minillm.sampling.params import SamplingParams
from minillm.sampling.sampler import Sampler
from minillm.staging import upload

QUERIES = (2, 8, 16, 32, 64, 128)  # of a sequence: every size of tile is among those that they lead to
DRAWS = (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9))


@torch.inference_mode()
def warm_up(model: Decoder, attention: TritonAttention, sampler: Sampler) -> None:
    """Launch them on zeros and on the null block; nothing is written to the cache."""
    for lengths in [(1,), *((1, count) for count in QUERIES)]:
        model.forward(batch_of(lengths, attention.cache.block_size, model.device), attention)
    if model.lora is not None:
        model.lora.warm_up(model)
    logits = torch.zeros(1, model.config.vocab_size, device=model.device)
    for params in DRAWS:
        rows = [SamplingRow(params, 0, [0], [], frozenset())]
        sampler.choose(logits, SamplingMetadata(rows, model.config.vocab_size, model.device))


def batch_of(lengths: Sequence[int], block_size: int, device: torch.device) -> ForwardBatch:
    """A step of prompts of these lengths, rising, whose pages are all the null block; nothing is stored."""
    starts = [0, *accumulate(lengths)]
    token_ids, positions, query_start_loc, seq_lens, slot_mapping, logits_indices = upload(
        [0] * starts[-1],
        [position for length in lengths for position in range(length)],
        starts,
        lengths,
        [-1] * starts[-1],
        [end - 1 for end in starts[1:]],
        device=device,
    )
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=torch.zeros(len(lengths), ceil_div(max(lengths), block_size), dtype=torch.int32, device=device),
        slot_mapping=slot_mapping,
        max_query_len=max(lengths),
        logits_indices=logits_indices,
        max_seq_len=max(lengths),
        num_decodes=sum(length == 1 for length in lengths),
    )
