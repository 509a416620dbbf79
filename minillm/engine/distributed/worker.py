"""Worker: one rank of an LLM, whatever starts it. Built in chapter 20.

    connect -> load -> count_blocks -> build -> launch, launch ... -> free_cache -> build ...

Every method is called on all ranks in the same order, by `MultiprocExecutor` or by Ray: ranks wait for each other
inside of most of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minillm.device import resolve_device
from minillm.engine.build import build_adapters, build_runner
from minillm.engine.config import EngineConfig
from minillm.engine.distributed.adapters import ParallelAdapterCache
from minillm.engine.distributed.runner import ParallelRunner
from minillm.engine.drafting import build_speculation
from minillm.engine.lora_request import AdapterRef
from minillm.engine.parts import retention_of
from minillm.engine.pooling import hidden_states
from minillm.engine.sizing import block_bytes_of, fitting_blocks
from minillm.kv_cache.manager import KVCacheManager
from minillm.model.checkpoint import load_tokenizer, resolve_model
from minillm.model.config import ModelConfig
from minillm.model.errors import AdapterError
from minillm.parallel.communicator import Communicator, Traffic, init_process_group
from minillm.parallel.decoder import ParallelDecoder
from minillm.parallel.layout import Layout
from minillm.parallel.loading import load_shard
from minillm.sampling.grammar.compiler import GrammarCompiler
from minillm.speculative.adaptive import AdaptiveLength
from minillm.trace import Trace


@dataclass(frozen=True)
class WorkerSettings:
    """All that a worker needs to know at its start."""

    layout: Layout
    config: EngineConfig
    store: str  # a file, or "host:port": where the ranks find each other
    num_threads: int
    tokenizer: str | Path | None = None  # of another model
    is_dummy: bool = False  # random weights
    seconds: float = 1800.0  # a message between ranks takes longer only where one of them hangs


@dataclass(frozen=True)
class Shape:
    """What the engine must know of a model whose weights it does not have; it stands for a Decoder there."""

    config: ModelConfig  # of the whole model
    dtype: torch.dtype
    device: torch.device
    fingerprint: str
    rotated: bool = False  # see `minillm.model.rotation`


@dataclass(frozen=True)
class CachePlan:
    """The KV cache that every rank makes, each for its own heads and layers."""

    num_blocks: int
    num_host_blocks: int
    window: int | None


class Worker:
    """Holds a rank's part of the model, and computes its part of each step."""

    model: ParallelDecoder
    runner: ParallelRunner

    def __init__(self, settings: WorkerSettings):
        self.settings, self.layout, self.config = settings, settings.layout, settings.config
        if self.layout.pipeline_parallel_size > 1:  # what a stage receives is in no recorded step
            self.config = replace(self.config, enforce_eager=True)
        self.depth = max(2, self.layout.pipeline_parallel_size) - 1  # steps that may be launched and not waited for
        self.device = torch.device("cpu")
        torch.set_num_threads(settings.num_threads)

    def connect(self) -> None:
        """Find the other ranks."""
        self.device = resolve_device(self.config.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self.layout.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        elif sys.platform == "linux" and ":" not in self.settings.store:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        init_process_group(self.layout, self.device, self._store(), self.settings.seconds)
        self.communicator = Communicator(self.layout)

    def load(self) -> Shape:
        """Read this rank's part of the model; the shape of the whole."""
        path, config = resolve_model(self.config.model), self.config
        self.model = load_shard(
            path,
            self.communicator,
            config.dtype,
            self.device,
            config.quantization,
            config.cpu_offload_bytes // self.layout.world_size,
            config.max_model_len,
            self.settings.is_dummy,
        )
        return Shape(self.model.whole, self.model.dtype, self.device, self.model.fingerprint, self.model.rotated)

    def count_blocks(self) -> int:
        """How many blocks of the KV cache fit beside this rank's weights. Ranks on CPUs share the memory."""
        build_adapters(self.model, self.config)
        block_bytes = block_bytes_of(self.model, self.config.block_size, self.config.kv_cache_dtype)
        sharing = self.layout.world_size if self.device.type == "cpu" else 1
        return fitting_blocks(self.model, self.config, block_bytes * sharing)

    def build(self, plan: CachePlan) -> AdaptiveLength | None:
        """Make the KV cache, and what computes with it; how long drafts are to be, where that was measured."""
        config, policy = self.config, retention_of(self.config, self.model)
        manager = KVCacheManager(
            plan.num_blocks,
            config.block_size,
            window=plan.window,
            num_host_blocks=plan.num_host_blocks,
            sinks=0 if policy is None else policy.sinks,
        )
        trace, each = Trace(enabled=False), config.tokens_each
        self.runner = build_runner(self.model, manager, config, trace, tokens_each=each, kind=ParallelRunner)
        if config.enable_lora:
            sizes = (config.max_loras, config.max_lora_rank, config.num_cpu_loras)
            self.runner.adapters = ParallelAdapterCache(self.model, *sizes)
        self.runner.compile_grammar = self._compile
        shape = Shape(self.model.whole, self.model.dtype, self.device, "")
        speculation = build_speculation(shape, self.runner, manager, config, trace)
        self.communicator.take_traffic()
        return None if speculation is None else speculation.lengths

    def draft(self, asked: Sequence[tuple[str, int]]) -> list[list[int]]:
        return self.runner.draft(asked)

    def held(self) -> list[str]:
        """The requests that this rank has a record of. Raises RuntimeError where a draft model has lost a block."""
        held = list(self.runner.requests.states)
        if (manager := getattr(self.runner.drafter, "manager", None)) is not None:
            manager.check_integrity()
            held += manager.records
        return held

    def hidden_states(self, token_ids: Sequence[int], ref: AdapterRef | None) -> Tensor | None:
        """As `minillm.engine.pooling.hidden_states`, in host memory; of the leader."""
        slot = None if ref is None else self.runner.adapters.slot(ref)
        states = hidden_states(self.model, token_ids, slot)
        return states.cpu() if self.layout.rank == self.layout.leader else None

    def free_cache(self) -> None:
        """Give the memory of the KV cache back; `build` makes a new one."""
        del self.runner

    def take_traffic(self) -> Traffic:
        """What this rank has sent and received since the last call."""
        return self.communicator.take_traffic()

    def read_adapter(self, ref: AdapterRef, in_use: Sequence[str], waiting: Sequence[str]) -> None:
        """Read an adapter that the engine has just read. Raises AdapterError where its folder holds another by now."""
        if self.runner.adapters.read(ref.path, in_use, waiting) != ref.key:
            raise AdapterError(f"the adapter in {ref.path} has changed while it was read; ask again")

    def prepare_adapter(self, ref: AdapterRef, in_use: Sequence[str]) -> None:
        """Have an adapter on the host."""
        self.runner.adapters.prepare(ref, in_use)

    def change_adapters(self, method: str, key: str) -> None:
        """`drop`, `pin` or `unpin` one."""
        getattr(self.runner.adapters, method)(key)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What a function makes of this worker."""
        return function(self, *args, **named)

    def apply_model(self, function: Callable[[ParallelDecoder], Any]) -> Any:
        """What a function makes of this rank's part of the model."""
        return function(self.model)

    def _store(self) -> dist.Store:
        place, world_size = self.settings.store, self.layout.world_size
        if ":" not in place:
            return dist.FileStore(place, world_size)
        host, port = place.rsplit(":", 1)
        return dist.TCPStore(host, int(port), world_size, is_master=self.layout.rank == 0)

    def _compile(self, params: Any) -> Any:
        """The grammar of a request, ready for this model's vocabulary."""
        if not hasattr(self, "_compiler"):
            path = self.config.model if self.settings.tokenizer is None else self.settings.tokenizer
            tokenizer, whole = load_tokenizer(resolve_model(path)), self.model.whole
            self._compiler = GrammarCompiler(tokenizer, whole.vocab_size, frozenset(whole.eos_token_ids))
        return self._compiler.compile(params.structured_outputs)
