"""CUDA graphs for decode steps: every launch of a forward pass recorded once, and replayed as one. Built in chapter 14.

A recorded graph repeats the same launches on the same addresses, so nothing about a step may change but the contents
of its inputs. They live in buffers that stay where they are; a batch of any size is filled up to the next recorded
size with rows that do nothing (slot -1, length 0, the null block), and whatever depends on a length (the grids, the
number of splits) is chosen for the longest.

    recorded sizes   1  2  4  8  16  32  48 ...          11 sequences -> the graph of 16, five rows of padding

A request with guesses to check (chapter 18) fills a row for each of its tokens: they share a block table, and each sees
the keys up to its own, for a layer writes all keys of a step before it reads any. So a step that checks guesses is a
decode step too, of more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minillm.model.attention import AttentionBackend
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder

if TYPE_CHECKING:
    from minillm.engine.scheduler import ScheduledRequest

STEP = 16  # beyond 8 rows: at most 15 of padding, which read no page
LARGEST = 512


def bucket_sizes(most_tokens: int) -> list[int]:
    """The sizes to record, in tokens, rising; the last one holds `most_tokens`, or is 512."""
    limit = min(most_tokens, LARGEST)
    sizes = [1, 2, 4, 8, *range(STEP, LARGEST + 1, STEP)]
    return [size for size in sizes if size < limit] + [min(size for size in sizes if size >= limit)]


class DecodeGraphs:
    """Forward passes of steps in which every request brings one token, or few: at most `tokens_each`.

    `sizes` count tokens; `max_model_len` is the longest sequence there will be. On a GPU each size is recorded at once;
    elsewhere a "replay" runs the same computation on the same fixed buffers, padding and all.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        block_size: int,
        max_model_len: int,
        sizes: Sequence[int],
        tokens_each: int = 1,
    ):
        self.model, self.attention, self.block_size, self.max_model_len = model, attention, block_size, max_model_len
        self.tokens_each = tokens_each
        self.sizes = sorted(sizes)
        self.columns = -(-max_model_len // block_size)  # blocks of the longest sequence
        self.on_gpu = model.device.type == "cuda"
        # One block of memory takes a step's whole input, so that one copy brings it over; its parts lie as Inputs says.
        self.memory = torch.zeros(self.sizes[-1] * (4 + self.columns), dtype=torch.int64, device=model.device)
        self.inputs = {size: Inputs(size, self.columns, self.memory, self.on_gpu) for size in self.sizes}
        self.batches = {size: self._batch(self.inputs[size]) for size in self.sizes}
        self.pool = None  # the graphs never run together, so they share the memory between their launches
        self.replays: dict[int, Callable[[], Tensor]] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            self.replays[size] = self._record(self.batches[size])

    def serves(self, rows: Sequence[ScheduledRequest]) -> bool:
        """Whether every row samples once and brings few tokens, and there are not too many."""
        if any(row.samples != 1 or row.num_tokens > self.tokens_each for row in rows):
            return False
        num_tokens = sum(row.num_tokens for row in rows)
        alone = num_tokens == len(rows)  # else a part of a prompt may be among them
        return num_tokens <= self.sizes[-1] and (alone or all(row.request.prompt_logprobs is None for row in rows))

    def fill(self, rows: Sequence[ScheduledRequest]) -> ForwardBatch:
        """Put a step into the buffers of the smallest size that holds it."""
        num_tokens = sum(row.num_tokens for row in rows)
        size = next(size for size in self.sizes if size >= num_tokens)
        self.inputs[size].fill(rows, self.block_size)
        return self.batches[size]

    def run(self, batch: ForwardBatch) -> Tensor:
        """Logits of a filled batch, [size, vocab_size] float32: the same tensor every time, so use it at once."""
        return self.replays[batch.num_tokens]()

    def _batch(self, inputs: Inputs) -> ForwardBatch:
        size, device = inputs.size, self.model.device
        return ForwardBatch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            query_start_loc=torch.arange(size + 1, device=device),
            seq_lens=inputs.seq_lens,
            block_table=inputs.block_table,
            slot_mapping=inputs.slot_mapping,
            max_query_len=1,
            logits_indices=torch.arange(size, device=device),
            max_seq_len=self.max_model_len,
            num_decodes=size,
        )

    def _record(self, batch: ForwardBatch) -> Callable[[], Tensor]:
        if not self.on_gpu:
            return lambda: self.model.forward(batch, self.attention)
        self.inputs[batch.num_tokens].clear()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and libraries set up at their first call, not in the graph
            self.model.forward(batch, self.attention)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = self.model.forward(batch, self.attention)
        self.pool = self.pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


class Inputs:
    """Where a recorded step of `size` rows reads: token ids, positions, slots, lengths, then the block table."""

    def __init__(self, size: int, columns: int, memory: Tensor, pinned: bool):
        self.size, self.columns = size, columns
        self.on_device = memory[: size * (4 + columns)]
        parts = self.on_device[: 4 * size].view(4, size)
        self.token_ids, self.positions, self.slot_mapping, self.seq_lens = parts.unbind()
        self.block_table = self.on_device[4 * size :].view(size, columns)
        # Two copies in host memory, in turns: the last step's may still be on its way when the next one is written.
        self.hosts = [HostInputs(size, columns, pinned) for _ in range(2)]

    def fill(self, rows: Sequence[ScheduledRequest], block_size: int) -> None:
        self.hosts.reverse()
        self.hosts[0].fill(rows, block_size)
        self.on_device.copy_(self.hosts[0].tensor, non_blocking=True)

    def clear(self) -> None:
        self.on_device.copy_(HostInputs(self.size, self.columns, pinned=False).tensor)


class HostInputs:
    """The same in host memory. What a step shares with the one before is not written again: a row's table grows by a
    block every block_size steps."""

    def __init__(self, size: int, columns: int, pinned: bool):
        self.tensor = torch.zeros(size * (4 + columns), dtype=torch.int64, pin_memory=pinned)
        array = self.tensor.numpy()
        self.numbers, self.table = array[: 4 * size].reshape(4, size), array[4 * size :].reshape(size, columns)
        self.numbers[2] = -1  # slots of padding
        self.tables: list[list[int]] = [[] for _ in range(size)]  # what each row of `table` shows

    def fill(self, rows: Sequence[ScheduledRequest], block_size: int) -> None:
        tokens = [token_id for row in rows for token_id in tokens_of(row)]
        positions = [position for row in rows for position in range(row.start, row.start + row.num_tokens)]
        tables = [row.block_ids for row in rows for _ in range(row.num_tokens)]
        count = len(tokens)
        self.numbers[0, :count] = tokens
        self.numbers[1, :count] = positions
        self.numbers[2, :count] = [
            table[position // block_size] * block_size + position % block_size for table, position in zip(tables, positions)
        ]
        self.numbers[3, :count] = positions
        self.numbers[3, :count] += 1
        self.numbers[:, count:] = [[0], [0], [-1], [0]]
        for index, table in enumerate(tables):
            if self.tables[index] != table:
                self.tables[index] = table.copy()
                self.table[index, : len(table)] = table


def tokens_of(row: ScheduledRequest) -> Sequence[int]:
    """The tokens to compute, guesses last; 0 for one that is being sampled this moment and only the GPU knows."""
    token_ids, start = row.request.token_ids, row.start
    if row.num_tokens == 1:
        return (token_ids[start],) if start < len(token_ids) else (0,)
    return (*token_ids[start : start + row.num_tokens - len(row.draft)], *row.draft)


def logits_wanted(rows: Sequence[ScheduledRequest]) -> list[int]:
    """Of a step's tokens those whose logits are drawn from: the last one of each row that samples, and all its guesses.
    Behind a right guess another token is drawn."""
    if all(row.num_tokens == 1 for row in rows):
        return [at for at, row in enumerate(rows) if row.samples]
    ends = accumulate(row.num_tokens for row in rows)
    return [at for row, end in zip(rows, ends) if row.samples for at in range(end - 1 - len(row.draft), end)]
