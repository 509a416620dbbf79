"""What a draft model computes with: a runner and a cache of its own, beside the target's. Built in chapter 18."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minillm.engine.config import EngineConfig
from minillm.engine.parts import (
    build_attention,
    build_cache,
    build_graphs,
    sliding_window,
)
from minillm.engine.runner import ModelRunner
from minillm.engine.step import NewRequest, ScheduledRequest
from minillm.engine.warmup import warm_up
from minillm.kv_cache.manager import KVCacheManager
from minillm.model.attention import can
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder
from minillm.sampling.params import SamplingParams
from minillm.speculative.draft_model import DraftRow

if TYPE_CHECKING:
    from minillm.speculative.eagle_head import EagleHead


class DraftForward:
    """Forward passes of the draft model. Its runner's record of a request shares the drafter's list of tokens,
    and is told of its length and of new blocks. Behind the first pass of a draft every row processes one token, the one
    that was just drafted: on a CPU `FurtherBatches` makes these batches, and the runner prepares nothing."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.sent: dict[str, list[int]] = {}  # block tables that the runner knows
        eager = runner.graphs is None and runner.model.device.type == "cpu"
        self.further = FurtherBatches(runner.requests.block_size) if eager else None

    def __call__(self, rows: list[DraftRow], token_ids: Tensor | None) -> Tensor:
        if token_ids is None or self.further is None:
            return self.runner.forward([self._told(row) for row in rows], token_ids)[0]
        return self.runner.model.forward(self.further.of(rows, token_ids), self.runner.attention)

    def forget(self, request_id: str) -> None:
        self.runner.requests.remove(request_id)
        self.sent.pop(request_id, None)

    def _told(self, row: DraftRow) -> ScheduledRequest:
        requests, state = self.runner.requests, row.request
        name, text = state.request_id, state.token_ids
        if name not in requests or requests[name].token_ids is not text:
            self.forget(name)
            requests.add(NewRequest(name, text, 0, SamplingParams(), 0, 0, frozenset())).token_ids = text
        slot = requests[name].slot
        requests.num_known[slot], requests.last_token[slot] = len(text), text[-1]
        sent = self.sent.setdefault(name, [])
        first = 0
        if sent == row.block_ids:
            first = len(sent)
        else:
            while first < min(len(sent), len(row.block_ids)) and sent[first] == row.block_ids[first]:
                first += 1
            sent[first:] = row.block_ids[first:]
        return ScheduledRequest(name, row.start, row.num_tokens, row.block_ids[first:], row.samples, first_block=first)


class FurtherBatches:
    """Batches of one token for each row, in host memory; the block tables are made when the rows are others."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.made_for: list[tuple[str, list[int]]] = []  # request id and block ids of each row of `tables`

    def of(self, rows: Sequence[DraftRow], token_ids: Tensor) -> ForwardBatch:
        """`token_ids` [len(rows)] at the rows' starts."""
        made_for = [(row.request.request_id, row.block_ids) for row in rows]
        if made_for != self.made_for:
            self.made_for = [(name, list(block_ids)) for name, block_ids in made_for]
            self.tables = np.zeros((len(rows), max(len(row.block_ids) for row in rows)), np.int32)
            for table, row in zip(self.tables, rows):
                table[: len(row.block_ids)] = row.block_ids
            self.numbers = np.arange(len(rows) + 1)
        starts, size = [row.start for row in rows], self.block_size
        seq_lens = np.asarray([start + 1 for start in starts])
        slots = [row.block_ids[start // size] * size + start % size for row, start in zip(rows, starts)]
        ends, count = torch.from_numpy(self.numbers), len(rows)
        return ForwardBatch(
            token_ids, torch.tensor(starts), ends, torch.from_numpy(seq_lens), torch.from_numpy(self.tables),
            torch.tensor(slots), 1, ends[:count], max(starts) + 1, count,
            on_host=(self.numbers, seq_lens, self.tables),
        )  # fmt: skip


def draft_runner_of(
    draft: Decoder | EagleHead, kv_cache: KVCacheManager, config: EngineConfig
) -> tuple[ModelRunner, KVCacheManager]:
    """A runner of `draft`, and the manager of its cache, which has as many blocks as the target's."""
    manager = KVCacheManager(
        kv_cache.pool.num_blocks, kv_cache.block_size, config.enable_prefix_caching, sliding_window(draft)
    )
    cache = build_cache(draft, manager, config.kv_cache_dtype)
    attention = build_attention(draft, cache, config.attention_backend)
    graphs = build_graphs(draft, attention, manager, config, tokens_each=2)
    runner = ModelRunner(draft, cache, attention, graphs=graphs)
    if draft.device.type == "cuda" and can(attention, "graph_safe"):
        warm_up(draft, attention, runner.sampler)
    return runner, manager
