"""Adapters between ranks: each rank has its part of one, and the engine knows all of it. Built in chapter 20.

Of q, k, v, gate and up a rank has some outputs: A is whole, B is cut by rows. Of o and down it has some inputs: A is
cut by columns, B is whole, and the sum over the ranks adds the adapters' products up with the base products.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import torch

from minillm.engine.lora_cache import AdapterCache
from minillm.engine.lora_request import AdapterRef
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.lora_adapter import Adapter, Shapes, read_adapter, shapes_of
from minillm.parallel.decoder import ParallelDecoder
from minillm.parallel.layout import cut_of


class ParallelAdapterCache(AdapterCache):
    """The adapters of one rank, on its host and in its batch slots."""

    model: ParallelDecoder

    @cached_property
    def whole_shapes(self) -> Shapes:
        return whole_shapes(self.model.whole)

    def _read(self, path: str) -> Adapter:
        whole, parts = self.model.whole, {}
        adapter = read_adapter(path, whole, self.whole_shapes, self.slots.max_rank, self.model.dtype)
        for name, (a, b) in adapter.matrices.items():
            if (cut := cut_of(name, whole, self.model.layout)) is None:
                continue
            a, b = (cut.of(a), b) if cut.dim else (a, cut.of(b))
            parts[cut.name] = (a.contiguous(), b.contiguous())
        return Adapter(adapter.key, parts)


class RemoteAdapters(AdapterCache):
    """What the engine knows of the adapters that its workers have: it reads each folder too, so that a broken one
    raises in the caller's thread, and lets the workers read it at once: it may be gone, or another one, when a request
    needs it. `call` reaches all workers."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        max_rank: int,
        max_cpu_loras: int,
        call: Callable[..., list[Any]],
    ):
        self.config, self.dtype, self.max_rank, self.max_cpu_loras, self.call = (
            config, dtype, max_rank, max_cpu_loras, call,
        )  # fmt: skip
        self.shapes = whole_shapes(config)
        self.on_host: OrderedDict[str, Adapter] = OrderedDict()
        self.pinned: set[str] = set()
        self.num_read = 0
        self._lock = threading.RLock()

    def _read(self, path: str) -> Adapter:
        return read_adapter(path, self.config, self.shapes, self.max_rank, self.dtype)

    def read(self, path: str, in_use: Collection[str] = (), waiting: Collection[str] = ()) -> str:
        """As `AdapterCache.read`, in this process and in the workers."""
        key = super().read(path, in_use, waiting)
        self.call("read_adapter", AdapterRef(key, path), list(in_use), list(waiting))
        return key

    def prepare(self, ref: AdapterRef, in_use: Collection[str] = ()) -> Adapter:
        """As `AdapterCache.prepare`, likewise."""
        adapter = super().prepare(ref, in_use)
        self.call("prepare_adapter", ref, list(in_use))
        return adapter

    def drop(self, key: str) -> None:
        super().drop(key)
        self.call("change_adapters", "drop", key)

    def pin(self, key: str) -> None:
        super().pin(key)
        self.call("change_adapters", "pin", key)

    def unpin(self, key: str) -> None:
        super().unpin(key)
        self.call("change_adapters", "unpin", key)


def whole_shapes(config: ModelConfig) -> Shapes:
    """Of the matrices of the whole model, which no rank has."""
    return shapes_of(Decoder(config, torch.float32, "meta"))
