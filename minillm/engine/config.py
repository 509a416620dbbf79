"""EngineConfig: everything an LLM is made with, checked before anything is loaded. Built in chapter 04."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from minillm.kv_cache.retention import RetentionPolicy
from minillm.model.lora_config import HIGHEST_RANK
from minillm.quantization.config import QuantizationConfig, resolve as resolve_quantization
from minillm.sampling.params import MAX_SEED, check_float, check_int
from minillm.speculative.config import SpeculativeConfig

CHOICES = {
    "scheduling_policy": ("fcfs", "priority", "preemptive_priority", "sjf", "fair", "lpm"),
    "attention_backend": ("auto", "torch", "native", "triton"),
    "kv_cache_dtype": ("auto", "int8", "fp8", "int4"),
    "preemption_mode": ("recompute", "swap"),
    "generation_config": ("auto", "vllm"),
    "distributed_executor_backend": ("mp", "ray"),
}
FLAGS = ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "enable_lora", "enable_expert_parallel")


@dataclass(frozen=True)
class EngineConfig:
    """The arguments of `LLM`, with the same names.

    Raises TypeError or ValueError naming the field, the value and what is allowed.
    """

    model: str | Path
    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    attention_backend: str = "auto"
    preemption_mode: str = "recompute"
    quantization: str | dict[str, Any] | QuantizationConfig | None = None
    kv_cache_dtype: str = "auto"
    kv_retention: dict[str, int] | RetentionPolicy | None = None
    speculative_config: dict[str, Any] | SpeculativeConfig | None = None
    host_kv_bytes: int = 0
    disk_kv_path: str | Path | None = None
    disk_kv_bytes: int = 0
    cpu_offload_bytes: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str = "mp"
    enable_expert_parallel: bool = False
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    seed: int = 0
    generation_config: str = "auto"
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None

    def __post_init__(self):
        for one in fields(self):
            if getattr(self, one.name) is None and one.default is not MISSING:  # None means the default
                object.__setattr__(self, one.name, one.default)
        if not isinstance(self.model, (str, Path)):
            raise TypeError(f"model={self.model!r} is not allowed; allowed: a bundled name, a folder or a hub id")
        check_int("max_model_len", self.max_model_len, 2, none_means="what the model was made for")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            check_int(name, getattr(self, name), 1)
        check_int("num_kv_blocks", self.num_kv_blocks, 1, none_means="as many as fit in memory")
        check_float("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1)
        for name in ("host_kv_bytes", "disk_kv_bytes", "cpu_offload_bytes"):
            check_int(name, getattr(self, name), 0)
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_int("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        check_int("seed", self.seed, 0, MAX_SEED)
        if self.gpu_memory_utilization == 0:
            raise ValueError("gpu_memory_utilization=0 leaves the cache no memory; allowed: over 0, up to 1")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} is not allowed; allowed: True or False")
        if self.async_scheduling is not None and not isinstance(self.async_scheduling, bool):
            raise TypeError(
                f"async_scheduling={self.async_scheduling!r} is not allowed; allowed: "
                "True, False, or None for the device's choice"
            )
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; allowed: {', '.join(allowed)}")
        resolve_quantization(self.quantization)
        # What was given as a dictionary is parsed here, once.
        object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        object.__setattr__(self, "kv_retention", RetentionPolicy.of(self.kv_retention))
        spec, policy = self.speculative_config, self.kv_retention
        if policy is not None and self.disk_kv_path is not None:
            raise ValueError("disk_kv_path keeps prefixes, and a cache with kv_retention has none to keep; drop either")
        if policy is not None and spec is not None and spec.method != "ngram":
            kind = "model" if spec.method == "draft_model" else "head"
            raise ValueError(
                f"a draft {kind} keeps all of its text, kv_retention does not: use method='ngram', or drop either"
            )
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "enable_expert_parallel=True spreads experts over tensor-parallel ranks, and tensor_parallel_size=1; "
                "raise it, or leave enable_expert_parallel out"
            )
        if self.preemption_mode == "swap" and not self.host_kv_bytes:
            raise ValueError(
                "preemption_mode='swap' has nowhere to move blocks to: host_kv_bytes=0; "
                "give host memory in bytes, or use preemption_mode='recompute'"
            )
        self._check_disk()
        self._check_lora()
        keeps_prefixes = self.enable_prefix_caching and policy is None
        if self.host_kv_bytes and self.preemption_mode == "recompute" and not keeps_prefixes:
            why = "kv_retention keeps no prefixes" if policy is not None else "enable_prefix_caching=False"
            raise ValueError(
                f"host_kv_bytes={self.host_kv_bytes} would hold nothing: {why}, "
                f"and preemption_mode='recompute' moves no blocks; leave it out, or use preemption_mode='swap'"
            )
        if self.cpu_offload_bytes and self.quantization is not None:
            raise ValueError(
                f"cpu_offload_bytes={self.cpu_offload_bytes} streams plain weights, "
                f"quantization={self.quantization!r} makes them smaller; leave one of the two out"
            )

    @property
    def tokens_each(self) -> int:
        """The most tokens of a decoding request in one step: its last one, and the draft tokens behind it."""
        return 1 if self.speculative_config is None else 1 + self.speculative_config.num_speculative_tokens

    @property
    def world_size(self) -> int:
        """How many workers compute a step together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_cpu_loras(self) -> int:
        """Adapters that host memory holds."""
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def _check_lora(self) -> None:
        check_int("max_loras", self.max_loras, 1, 1024)
        check_int("max_lora_rank", self.max_lora_rank, 1, HIGHEST_RANK)
        check_int("max_cpu_loras", self.max_cpu_loras, 1, none_means="four times max_loras")
        if self.num_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}, and the adapters of a "
                "step lie in host memory too; raise it, or lower max_loras"
            )

    def _check_disk(self) -> None:
        if self.disk_kv_path is None:
            if self.disk_kv_bytes:
                raise ValueError(f"disk_kv_bytes={self.disk_kv_bytes} has no place to be: give disk_kv_path=FOLDER")
            return
        if not isinstance(self.disk_kv_path, (str, Path)):
            raise TypeError(f"disk_kv_path={self.disk_kv_path!r} is not allowed; allowed: a folder, or None")
        for name, why in (
            ("disk_kv_bytes", "the folder may hold nothing"),
            ("host_kv_bytes", "blocks go to disk through host memory"),
        ):
            if not getattr(self, name):
                raise ValueError(f"disk_kv_path={str(self.disk_kv_path)!r} needs {name} in bytes, it is 0: {why}")
        if not self.enable_prefix_caching:
            raise ValueError(
                f"disk_kv_path={str(self.disk_kv_path)!r} keeps prefixes, but enable_prefix_caching=False; drop either"
            )
