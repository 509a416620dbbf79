"""Layerwise handover: keys and values leave a prefill layer by layer, while later layers compute. Built in chapter 22.

    engine thread    layer 0 | layer 1 | layer 2 | ... | logits      a step of the prefill
    another thread           | layer 0 | layer 1 | ...               sends the blocks of this step, of that layer

Behind each layer its blocks are copied out of the cache, which is quick, and handed to `put`, which sends them beside
the next layers. A step whose layers cannot be seen one by one, such as a recorded one, hands over all of them at its
end. vLLM calls this `save_kv_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillm.engine.executor import InProcessExecutor, Launched
from minillm.engine.runner import ModelRunner
from minillm.engine.step import SchedulerOutput, StepResult
from minillm.kv_cache.paged import PagedKVCache, as_bytes
from minillm.model.decoder import Decoder
from minillm.rounding import ceil_div
from minillm.staging import Download, upload


class LayerBlocks(NamedTuple):
    """Some blocks of one layer, on their way to host memory."""

    layer: int
    first: int  # the place of the first of them in the request's block table
    count: int
    parts: Download  # uint8 or codes, each [count, ...], in the order of the cache's parts


class Departing:
    """A request whose blocks from number `first` on go to `put`, layer by layer; the destination has those before."""

    def __init__(self, first: int, put: Callable[[LayerBlocks], object]):
        self.first = self.next = first  # next: the first block that is not full, or has not gone
        self.put = put


class LayerwiseExecutor(InProcessExecutor):
    """An executor that hands over the blocks of `departing` requests behind each layer. `tables` has the block tables
    of all requests. All methods are called by the engine's thread."""

    runner: ModelRunner

    def __init__(self, runner: ModelRunner, tables: Mapping[str, Sequence[int]]):
        super().__init__(runner)
        self.tables = tables
        self.departing: dict[str, Departing] = {}  # by request id
        self._rows: list[tuple[Departing, int, Tensor]] = []  # of this step: first block, and blocks
        self._done = 0  # layers of this step that have been handed over
        self._sees_layers = False

    def depart(self, request_id: str, departing: Departing) -> None:
        """Hand over what the next steps compute of this request, until it is taken out of `departing`."""
        if not self._sees_layers:
            self._sees_layers = True
            for index, layer in enumerate(self.runner.model.layers):
                layer.register_forward_hook(lambda *_, done=index + 1: self._hand_over(done))
                layer.tap = partial(_tell_both, layer.tap, partial(self._hand_over, index + 1))  # fused steps
        self.departing[request_id] = departing

    def execute(self, output: SchedulerOutput) -> StepResult:
        return self.launch(output).wait()

    def launch(self, output: SchedulerOutput) -> Launched:
        if not self.departing:
            return super().launch(output)
        self._rows, self._done = self._departing_rows(output), 0
        try:
            launched = super().launch(output)
            self._hand_over(len(self.runner.model.layers))
        finally:
            self._rows = []
        return launched

    def _departing_rows(self, output: SchedulerOutput) -> list[tuple[Departing, int, Tensor]]:
        """The blocks that are to go in this step: those that it fills, and at the beginning those that a prefix cache
        had. A block that it begins goes again with the step that fills it."""
        found, size = [], self.runner.cache.block_size
        for row in output.rows:
            if (departing := self.departing.get(row.request_id)) is None:
                continue
            end = row.start + row.num_tokens
            first = max(departing.first, min(departing.next, row.start // size))  # back there after a preemption
            blocks = self.tables[row.request_id][first : ceil_div(end, size)]
            departing.next = end // size
            if blocks:
                found.append((departing, first, upload(blocks, device=self.runner.model.device)[0]))
        return found

    def _hand_over(self, num_layers: int) -> None:
        """The first `num_layers` layers of this step are computed."""
        if not self._rows:
            return
        for layer in range(self._done, num_layers):
            for departing, first, blocks in self._rows:
                parts = [as_bytes(part[layer]).index_select(0, blocks) for part in self.runner.cache.parts.values()]
                departing.put(LayerBlocks(layer, first, len(blocks), Download(*parts)))
        self._done = max(self._done, num_layers)


def _tell_both(earlier: Callable[[Tensor], object] | None, hand_over: Callable[[], None], hidden: Tensor) -> None:
    if earlier is not None:
        earlier(hidden)
    hand_over()


def pack(parts: Sequence[Tensor]) -> Tensor:
    """The parts of some blocks of one layer as bytes, uint8 [num_bytes]."""
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])


def write_layer(cache: PagedKVCache, layer: int, blocks: Sequence[int], data: Tensor) -> None:
    """Write what `pack` made of as many blocks of this layer into `blocks`. Raises ValueError for another number of
    bytes."""
    start, [index] = 0, upload(blocks, device=cache.keys[0].device)
    targets = [as_bytes(part[layer]) for part in cache.parts.values()]
    wanted = len(blocks) * sum(target[0].nbytes for target in targets)
    if data.numel() != wanted:
        raise ValueError(f"{data.numel()} bytes are not {len(blocks)} blocks of a layer, which would have {wanted}")
    for target in targets:
        size = len(blocks) * target[0].nbytes
        rows = data[start : start + size].clone().view(target.dtype)  # its own memory, so that it is aligned
        target.index_copy_(0, index, rows.view(len(blocks), *target.shape[1:]).to(target.device))
        start += size


def is_served(model: Any, window: int | None) -> bool:
    """Whether an engine's steps can hand over layers: of a model in this process, whose blocks all stay."""
    return isinstance(model, Decoder) and window is None
