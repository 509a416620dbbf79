"""What a draft model computes with: a runner and a cache of its own, beside the target's. Built in chapter 18."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from minillm.model.decoder import Decoder
from minillm.sampling.params import SamplingParams
from minillm.speculative.draft_model import DraftRow

if TYPE_CHECKING:
    from minillm.speculative.eagle_head import EagleHead


class DraftForward:
    """Forward passes of the draft model. Its runner's record of a request shares the drafter's list of tokens,
    and is told of its length and of new blocks."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.sent: dict[str, list[int]] = {}  # block tables that the runner knows

    def __call__(self, rows: list[DraftRow], token_ids: Tensor | None) -> Tensor:
        return self.runner.forward([self._told(row) for row in rows], token_ids)[0]

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
