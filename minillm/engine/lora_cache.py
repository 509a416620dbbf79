"""AdapterCache: a runner's adapters, on the host and in batch slots of the device. Built in chapter 23.

    folder  --read-->  host: at most max_cpu_loras  --put-->  device: max_loras batch slots
                       least recently used first out          the same, but never one of the step

Both are kept by the hash of an adapter's content (`minillm.model.lora_adapter`). What a step needs and the host has
dropped is read again from its folder; where other content stands there now, that is an error.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np

from minillm.engine.lora_request import AdapterRef
from minillm.engine.step_inputs import RequestState
from minillm.model.decoder import Decoder
from minillm.model.errors import AdapterError
from minillm.model.lora_adapter import Adapter, read_adapter
from minillm.model.lora_slots import LoraSlots


class AdapterCache:
    """The adapters of one model. `slot` and `row_slots` belong to the thread that steps, the rest to all."""

    def __init__(self, model: Decoder, max_loras: int, max_rank: int, max_cpu_loras: int):
        if model.lora is None or (model.lora.max_loras, model.lora.max_rank) != (max_loras, max_rank):
            model.lora = LoraSlots(model, max_loras, max_rank)
        self.model, self.max_cpu_loras = model, max_cpu_loras
        self.on_host: OrderedDict[str, Adapter] = OrderedDict()  # the least recently used first
        self.pinned: set[str] = set()  # never dropped, on the host or the device
        self.num_read = 0  # folders
        self._lock = threading.RLock()  # of what is on the host
        self._plain: Sequence[RequestState] = ()  # those of the last step without adapters

    @property
    def slots(self) -> LoraSlots:
        """The model's; another engine with the same model may have made larger ones."""
        return self.model.lora

    @property
    def on_device(self) -> OrderedDict[str, int]:
        """Key -> batch slot, the least recently used first."""
        return self.slots.held

    def read(self, path: str, in_use: Collection[str] = (), waiting: Collection[str] = ()) -> str:
        """Read a folder and keep its adapter on the host; returns its key. No adapter `in_use` is dropped for it, and
        those that requests wait for go last. Raises AdapterError."""
        adapter = self._read(path)
        with self._lock:
            self.num_read += 1
            self.on_host[adapter.key] = adapter
            self.on_host.move_to_end(adapter.key)
            self._shrink({adapter.key, *in_use}, waiting)
        return adapter.key

    def prepare(self, ref: AdapterRef, in_use: Collection[str] = ()) -> Adapter:
        """The adapter, read again if the host has dropped it. Raises AdapterError where its folder holds another."""
        with self._lock:
            if (adapter := self.on_host.get(ref.key)) is not None:
                self.on_host.move_to_end(ref.key)
                self._shrink({ref.key, *in_use})
                return adapter
        if self.read(ref.path, {ref.key, *in_use}) != ref.key:
            raise AdapterError(f"the adapter in {ref.path} has changed since its request was made; ask again")
        return self.prepare(ref, in_use)

    def __contains__(self, key: str) -> bool:
        """Whether the host has it."""
        return key in self.on_host

    def keys(self) -> list[str]:
        """Of the adapters on the host, the least recently used first."""
        with self._lock:
            return list(self.on_host)

    def drop(self, key: str) -> None:
        """Let an adapter go from the host; a batch slot that has it keeps it until the slot is needed."""
        with self._lock:
            self.on_host.pop(key, None)
            self.pinned.discard(key)

    def pin(self, key: str) -> None:
        with self._lock:
            self.pinned.add(key)

    def unpin(self, key: str) -> None:
        with self._lock:
            self.pinned.discard(key)

    def slot(self, ref: AdapterRef, in_step: Collection[str] = ()) -> int:
        """Its batch slot; where it has none, that of the least recently used adapter that is not `in_step`."""
        if (slot := self.on_device.get(ref.key)) is None:
            adapter = self.prepare(ref, in_step)
            slot = self.slots.free_slot()
            slot = self._evict(in_step) if slot is None else slot
            self.slots.put(slot, adapter)
        self.on_device.move_to_end(ref.key)
        return slot

    def row_slots(self, states: Sequence[RequestState]) -> np.ndarray | None:
        """The batch slot of each row's adapter, int32 [num_rows], -1 for none; None if no row has one."""
        if states is self._plain:
            return None
        refs = {state.adapter.key: state.adapter for state in states if state.adapter is not None}
        if not refs:
            self._plain = states
            return None
        slots = {key: self.slot(ref, refs) for key, ref in refs.items()}
        return np.asarray([-1 if state.adapter is None else slots[state.adapter.key] for state in states], np.int32)

    def _read(self, path: str) -> Adapter:
        return read_adapter(path, self.model.config, self.slots.shapes, self.slots.max_rank, self.model.dtype)

    def _evict(self, in_step: Collection[str]) -> int:
        for key in self.on_device:
            if key not in in_step and key not in self.pinned:
                return self.on_device.pop(key)
        raise RuntimeError(f"a step has more adapters than max_loras={self.slots.max_loras}")

    def _shrink(self, in_use: Collection[str], waiting: Collection[str] = ()) -> None:
        """Drop the least recently used until they are no more than allowed: one more, where all of those are in use."""
        for spared in (waiting, ()):
            for key in list(self.on_host):
                if len(self.on_host) <= self.max_cpu_loras:
                    return
                if key not in in_use and key not in self.pinned and key not in spared:
                    del self.on_host[key]
