"""Attention of a prompt on the CPU alone. Built in chapter 14."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from minillm.book.rungs import best_of
from minillm.kernels import native
from minillm.kernels.native_structs import Pages, Sequences

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16  # SmolLM2-135M


class Prompt:
    """One layer's attention of a prompt of `length` random tokens, over pages that lie in any order."""

    def __init__(self, length: int):
        generator = torch.Generator().manual_seed(length)
        blocks, positions = -(-length // BLOCK_SIZE), torch.arange(length)
        self.q, self.k, self.v = (
            torch.randn(length, heads, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.keys = torch.zeros(blocks, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        self.values = torch.zeros(blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        table = torch.randperm(blocks, generator=generator)
        slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        starts, lengths = torch.tensor([0, length]), torch.tensor([length])
        self.sequences = Sequences.of(starts, lengths, table[None], slots, length)

    @property
    def operations(self) -> int:
        """Of the two products, for the keys that the queries see."""
        length = len(self.q)
        return 4 * HEADS * HEAD_DIM * length * (length + 1) // 2

    def attend(self) -> Tensor:
        """[length, HEADS, HEAD_DIM]."""
        return native.paged_attention(self.q, self.k, self.v, Pages.of(self.keys, self.values), self.sequences)


def rates(lengths: tuple[int, ...], repeats: int = 5) -> dict[int, float]:
    """Operations a second of one core in the products of attention, softmax included, for prompts of these lengths."""
    prompts = {length: Prompt(length) for length in lengths}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        spent = best_of({length: partial(Prompt.attend, prompt) for length, prompt in prompts.items()}, repeats=repeats)
    finally:
        torch.set_num_threads(threads)
    return {length: prompt.operations / spent[length] for length, prompt in prompts.items()}
