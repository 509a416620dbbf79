"""The adapters that an LLM knows: loaded, listed, removed and pinned while it serves. Built in chapter 23.

    LoRARequest("pirate", 1, folder)  ->  Adapters.resolve  ->  AdapterRef(hash of the content, folder)  ->  Request

A folder is read in the caller's thread, so that a broken one raises there and no step ever waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minillm.engine.config import EngineConfig
from minillm.engine.engine import Engine
from minillm.engine.lock import FairLock, locked
from minillm.engine.lora_cache import AdapterCache
from minillm.engine.lora_request import AdapterRef, LoRARequest, each_lora_request
from minillm.engine.request import Request

if TYPE_CHECKING:
    from minillm.engine.llm import LLM

Resolved = tuple[LoRARequest, AdapterRef]


class Adapters:
    """Which number stands for which adapter. Outlives the caches of an engine that is put to sleep."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.known: dict[int, Resolved] = {}
        self._guard = threading.Lock()  # of `known`; never held while a folder is read

    @property
    def cache(self) -> AdapterCache:
        """That of the engine as it is now. Raises ValueError for an LLM without adapters."""
        if not self.llm.config.enable_lora:
            raise ValueError("this LLM serves no adapters; make it with enable_lora=True")
        self.llm.engine.check_open()
        cache = getattr(self.llm.engine.runner, "adapters", None)
        if cache is None:
            raise ValueError("the engine that this LLM was given serves no adapters")
        return cache

    def each(self, given: Any, num_prompts: int) -> list[Resolved | None]:
        """`lora_request` for every prompt, each adapter read if need be. Raises AdapterError for a folder that holds
        none for this model, TypeError and ValueError for what is no LoRARequest."""
        asked = each_lora_request(given, num_prompts)
        found = {id(one): self.resolve(one) for one in {id(one): one for one in asked}.values() if one is not None}
        return [found.get(id(one)) for one in asked]

    def resolve(self, request: LoRARequest) -> Resolved:
        cache, path, scheduler = self.cache, str(request.lora_path), self.llm.engine.scheduler
        known = self.known.get(request.lora_int_id)
        if known is not None and known[1].path == path and not request.load_inplace and known[1].key in cache:
            return request, known[1]
        ref = AdapterRef(cache.read(path, self._of(scheduler.running), self._of(scheduler.requests.values())), path)
        with self._guard:
            before = self.known.get(request.lora_int_id)
            self.known[request.lora_int_id] = (request, ref)
        if before is not None and before[1].key != ref.key:
            if before[1].key in cache.pinned:
                self._pin(ref.key)
            self._let_go(cache, before[1].key)
        return request, ref

    def add(self, request: LoRARequest) -> bool:
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request={request!r} is not allowed; allowed: a LoRARequest")
        known = self.known.get(request.lora_int_id)
        _, ref = self.resolve(request)
        return known is None or known[1] != ref

    def remove(self, lora_id: int) -> bool:
        cache = self.cache  # raises before anything has changed
        with self._guard:
            known = self.known.pop(lora_id, None)
        if known is not None:
            self._let_go(cache, known[1].key)
        return known is not None

    def list(self) -> set[int]:
        """Those on the host: others are read again when they are asked for."""
        keys = set(self.cache.keys())
        return {lora_id for lora_id, (_, ref) in dict(self.known).items() if ref.key in keys}

    def pin(self, lora_id: int) -> bool:
        """Raises ValueError for a number that stands for nothing, or where no batch slot would be left."""
        cache = self.cache
        if (known := self.known.get(lora_id)) is None:
            raise ValueError(f"lora_id={lora_id!r} stands for no adapter; add_lora() first")
        key, most = known[1].key, self.llm.config.max_loras - 1
        if key not in cache.pinned and len(cache.pinned) >= most:
            raise ValueError(f"max_loras={most + 1} lets {most} adapters be pinned: the others need a batch slot")
        cache.prepare(known[1], self._of(self.llm.engine.scheduler.running))
        self._pin(key)
        return True

    def _pin(self, key: str) -> None:
        self.cache.pin(key)
        self.llm.engine.scheduler.gate.pinned.add(key)

    def _let_go(self, cache: AdapterCache, key: str) -> None:
        """A number stands for this content no more: the host drops it, unless another number or a request has it."""
        if any(ref.key == key for _, ref in dict(self.known).values()):
            return
        scheduler = self.llm.engine.scheduler
        scheduler.gate.pinned.discard(key)
        if key in self._of(scheduler.requests.values()):
            cache.unpin(key)
        else:
            cache.drop(key)

    @staticmethod
    def _of(requests: Iterable[Request]) -> set[str]:
        """Their adapters. A copy first: the engine's thread may change what is given."""
        return {request.adapter.key for request in tuple(requests) if request.adapter is not None}


class Adapting:
    """The methods of an `LLM` that are about adapters."""

    engine: Engine
    config: EngineConfig
    lock: FairLock
    adapters: Adapters

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter before the first request needs it; whether anything was new. Raises AdapterError for a folder
        that holds none for this model."""
        return self.adapters.add(lora_request)

    @locked
    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; whether there was one. Requests under way are served with it to their end."""
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers of the adapters in host memory."""
        return self.adapters.list()

    @locked
    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in host memory, and in a batch slot once it has one. Raises ValueError where that would leave
        no batch slot to others."""
        return self.adapters.pin(lora_id)
