"""CUDA graphs for decode steps: every launch of a forward pass recorded once, and replayed as one. Built in chapter 14.

A recorded graph repeats the same launches on the same addresses, so nothing about a step may change but the contents
of its inputs. They live in buffers that stay where they are; a batch of any size is filled up to the next recorded
size with rows that do nothing (slot -1, length 0, the null block), and whatever depends on a length (the grids, the
number of splits) is chosen for the longest.

    recorded sizes   1  2  4  8  16  32  48 ...          11 sequences -> the graph of 16, five rows of padding

A request with draft tokens to verify (chapter 18) fills a row for each of its tokens: they share a block table,
and each sees the keys up to its own, for a layer writes all keys of a step before it reads any. So a step that verifies
drafts is a decode step too, of more rows.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minillm.model.attention import AttentionBackend
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder

if TYPE_CHECKING:
    from minillm.engine.input_batch import InputBatch
    from minillm.engine.step_inputs import StepInputs

STEP = 16  # beyond 8 rows: at most 15 of padding, which read no page
LARGEST = 512


def bucket_sizes(most_tokens: int) -> list[int]:
    """The sizes to record, in tokens, rising; the last one holds `most_tokens`, or is 512."""
    limit = min(most_tokens, LARGEST)
    sizes = [1, 2, 4, 8, *range(STEP, LARGEST + 1, STEP)]
    return [size for size in sizes if size < limit] + [min(size for size in sizes if size >= limit)]


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that everything on this device is recorded on:
    cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)


class Recorder:
    """Records functions as CUDA graphs. Graphs that never run at the same time share the memory of what lies between
    their kernels. On a CPU a replay calls the function again."""

    def __init__(self, device: torch.device):
        self.device, self.on_gpu = device, device.type == "cuda"
        self.pool = None

    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        """A function that repeats the launches of `run`, which must read and write the same addresses every time."""
        if not self.on_gpu:
            return run
        stream, current = capture_stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        # Kernels are compiled and libraries set up at their first call, not in the graph.
        with torch.cuda.stream(stream):
            run()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Older versions of torch collect garbage before each of hundreds of captures: there is little to look at then.
        gc.freeze()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=stream):
                run()
        finally:
            gc.unfreeze()
        self.pool = self.pool or graph.pool()
        return graph.replay


class DecodeGraphs:
    """Forward passes of steps in which every request has one token to process, or few: at most `tokens_each`.

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
        recorder: Recorder | None = None,
    ):
        self.model, self.attention, self.block_size, self.max_model_len = model, attention, block_size, max_model_len
        self.tokens_each = tokens_each
        self.sizes = sorted(sizes)
        self.recorder = recorder or Recorder(model.device)
        # All sizes read the same inputs and write the same logits: one step runs at a time.
        self.inputs = Inputs(self.sizes[-1], -(-max_model_len // block_size), model.device)
        self.logits = torch.empty(self.sizes[-1], model.config.vocab_size, device=model.device)  # float32
        self.batches = {size: self._batch(size) for size in self.sizes}
        self.replays: dict[int, Callable[[], object]] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            self._record(size)

    def serves(self, step: StepInputs) -> bool:
        """Whether every row samples once and has few tokens, and there are not too many."""
        if step.num_tokens > self.sizes[-1] or not step.all_sample:
            return False
        if step.all_decode:
            return True
        return max(step.counts) <= self.tokens_each and not step.any_scored  # a part of a prompt may be among them

    def fill(self, step: StepInputs, requests: InputBatch) -> ForwardBatch:
        """Put a step into the buffers of the smallest size that holds it."""
        size = next(size for size in self.sizes if size >= step.num_tokens)
        self.inputs.fill(step, requests, size)
        return self.batches[size]

    def run(self, batch: ForwardBatch) -> Tensor:
        """Logits of a filled batch, [size, vocab_size] float32: the next run overwrites them."""
        self.replays[batch.num_tokens]()
        return self.logits[: batch.num_tokens]

    def _batch(self, size: int) -> ForwardBatch:
        token_ids, positions, slot_mapping, seq_lens, query_index = self.inputs.numbers_of(size)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            query_start_loc=torch.arange(size + 1, device=self.model.device),
            seq_lens=seq_lens,
            block_table=self.inputs.table[:size],
            slot_mapping=slot_mapping,
            max_query_len=1,
            logits_indices=torch.arange(size, device=self.model.device),
            max_seq_len=self.max_model_len,
            num_decodes=size,
            query_index=query_index if self.tokens_each > 1 else None,
            tokens_each=self.tokens_each,
        )

    def _record(self, size: int) -> None:
        batch, logits = self.batches[size], self.logits[:size]
        self.inputs.pad(size)
        self.replays[size] = self.recorder.record(lambda: self.model.forward(batch, self.attention, out=logits))


class Inputs:
    """Where recorded steps read: five numbers of each of `size` rows, and the block tables.

    The numbers change in every step, and one copy brings them. The tables are on the device already,
    in the order of the slots (`InputBatch`); a step copies the rows it needs, as far as its longest sequence reads,
    without the host.
    """

    def __init__(self, most_tokens: int, columns: int, device: torch.device):
        self.device, self.on_gpu = device, device.type == "cuda"
        self.numbers = torch.zeros(5 * aligned(most_tokens), dtype=torch.int64, device=device)
        self.table = torch.zeros(most_tokens, columns, dtype=torch.int32, device=device)

    def numbers_of(self, size: int) -> tuple[Tensor, ...]:
        """token_ids, positions, slot_mapping, seq_lens and query_index (see `ForwardBatch`): [size] each."""
        return self.numbers[: 5 * aligned(size)].view(5, -1)[:, :size].unbind()

    def fill(self, step: StepInputs, requests: InputBatch, size: int) -> None:
        """Send a step of at most `size` tokens. The rest is padding:
        slot -1, length 0, and a table that is not read."""
        count = step.num_tokens
        alone = step.all_decode
        host = torch.zeros(5 * aligned(size), dtype=torch.int64, pin_memory=self.on_gpu)
        numbers = host.numpy().reshape(5, -1)
        numbers[0, :count], numbers[1, :count], numbers[2, :count] = step.token_ids, step.positions, step.slot_mapping
        numbers[2, count:] = -1
        numbers[3, :count] = step.positions + 1
        if not alone:
            numbers[4, :count] = step.positions - step.starts.repeat(step.counts)
        self.numbers[: len(host)].copy_(host, non_blocking=True)
        num_blocks = -(-int(step.seq_lens.max()) // requests.block_size)
        slots = step.slots if alone else step.slots.repeat(step.counts)
        self.table[:count, :num_blocks].copy_(requests.blocks.rows(slots, num_blocks)[1], non_blocking=True)

    def pad(self, size: int) -> None:
        """A step of nothing but padding."""
        numbers = self.numbers_of(size)
        for column in numbers:
            column.zero_()
        numbers[2].fill_(-1)


def aligned(size: int) -> int:
    """So many int64 numbers that the next ones begin at a multiple of 16 bytes."""
    return size + size % 2
