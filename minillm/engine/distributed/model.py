"""RemoteModel: a model whose parts are in worker processes. Built in chapter 20.

`LLM(tensor_parallel_size=2)` has one in the place of a Decoder: it starts the workers, lets each load its part, and
asks them how many blocks of the KV cache fit. The smallest answer holds for all, since a block id means the same on
each rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minillm.device import resolve_device
from minillm.engine.config import EngineConfig
from minillm.engine.distributed.adapters import RemoteAdapters
from minillm.engine.distributed.executor import Workers
from minillm.engine.distributed.group import WorkerGroup
from minillm.engine.distributed.ray_workers import RayWorkers
from minillm.engine.distributed.support import check_supported
from minillm.engine.distributed.worker import CachePlan, Shape, WorkerSettings
from minillm.engine.lora_request import AdapterRef
from minillm.engine.vllm_names import ModelOptions
from minillm.kv_cache.manager import KVCacheManager
from minillm.model.checkpoint import resolve_model
from minillm.model.config import ModelConfig
from minillm.parallel.layout import Layout
from minillm.parallel.loading import check_model
from minillm.speculative.adaptive import AdaptiveLength


class RemoteModel:
    """The workers of an LLM, with the model loaded. `shape` is what the engine knows of it.

    Raises ValueError and NotImplementedError for settings that cannot be served in parallel, before any process is
    started (`minillm.engine.distributed.support`), and what `load_model` raises.
    """

    def __init__(self, config: EngineConfig, options: ModelOptions):
        sizes = (config.tensor_parallel_size, config.pipeline_parallel_size)
        path, is_dummy = resolve_model(config.model), options.load_format == "dummy"
        check_model(path, *sizes, config.max_model_len, is_dummy, config.enable_expert_parallel)
        check_supported(config, path)
        device = resolve_device(config.device)
        on_gpu, is_here = device.type == "cuda", config.distributed_executor_backend == "mp"
        if on_gpu and is_here and (count := torch.cuda.device_count()) < sizes[0] * sizes[1]:
            raise ValueError(
                f"tensor_parallel_size={sizes[0]} x pipeline_parallel_size={sizes[1]} needs a GPU for each rank, "
                f"torch sees {count}; lower one of them, or use device='cpu'"
            )
        num_threads = threads_of_each(sizes[0] * sizes[1])
        tokenizer = None if options.tokenizer is None else str(options.tokenizer)

        def settings_of(layout: Layout, store: str) -> WorkerSettings:
            layout = replace(layout, expert_parallel=config.enable_expert_parallel)
            return WorkerSettings(layout, config, store, num_threads, tokenizer, is_dummy)

        self.workers = start_workers(config, sizes, settings_of, on_gpu)
        try:
            self.workers.call("connect")
            shapes: list[Shape] = self.workers.call("load")
        except BaseException:
            self.workers.close()
            raise
        fingerprint = " ".join(one.fingerprint for one in shapes)
        self.shape = replace(shapes[self.workers.leader], device=device, fingerprint=fingerprint)

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        return self.shape.config

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    @property
    def device(self) -> torch.device:
        return self.shape.device

    @property
    def rotated(self) -> bool:
        return self.shape.rotated

    def plan(self, config: EngineConfig) -> EngineConfig:
        """`config` with the number of KV blocks that every rank has room for; what workers do is left out of it."""
        num_blocks = config.num_kv_blocks or min(self.workers.call("count_blocks"))
        return replace(config, num_kv_blocks=num_blocks, enable_lora=False)

    def build(self, kv_cache: KVCacheManager, config: EngineConfig) -> AdaptiveLength | None:
        """Let the workers make the KV cache that `kv_cache` manages."""
        window = None if kv_cache.window is None else kv_cache.window.num_tokens
        plan = CachePlan(kv_cache.pool.num_blocks, kv_cache.host.num_blocks, window)
        return self.workers.call("build", plan)[self.workers.leader]

    def hidden_states(self, token_ids: Sequence[int], adapter: AdapterRef | None) -> Tensor:
        """As `minillm.engine.pooling.hidden_states`."""
        return self.workers.call("hidden_states", token_ids, adapter)[self.workers.leader]

    def adapters(self, config: EngineConfig) -> RemoteAdapters | None:
        if not config.enable_lora:
            return None
        sizes = (config.max_lora_rank, config.num_cpu_loras)
        return RemoteAdapters(self.config, self.dtype, *sizes, self.workers.call)

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        self.workers.close()


def start_workers(
    config: EngineConfig, sizes: tuple[int, int], settings_of: Callable[[Layout, str], WorkerSettings], on_gpu: bool
) -> Workers:
    """As many as `sizes` say, by the way that `distributed_executor_backend` names."""
    if config.distributed_executor_backend == "ray":
        return RayWorkers(sizes, settings_of, on_gpu)
    return WorkerGroup(sizes, settings_of, preload=not on_gpu)


def threads_of_each(num_workers: int) -> int:
    """CPU threads of a worker: what OMP_NUM_THREADS says, or its share of this process's."""
    if asked := os.environ.get("OMP_NUM_THREADS", "").split(",")[0]:
        return max(1, int(asked)) if asked.isdigit() else 1
    return max(1, torch.get_num_threads() // num_workers)
