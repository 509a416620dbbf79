"""Wiring: the parts that an engine is made of, where they are not handed in. Built in chapter 05."""

from __future__ import annotations

from minillm.engine.config import EngineConfig
from minillm.engine.eagle import build_tap
from minillm.engine.lora_cache import AdapterCache
from minillm.engine.lora_gate import AdapterGate
from minillm.engine.parts import (
    build_attention,
    build_cache,
    build_disk,
    build_graphs,
    build_pieces,
    build_transfer,
    retention_of,
    sliding_window,
)
from minillm.engine.policies import cached_tokens_of, make_policy
from minillm.engine.preemptive import PreemptiveScheduler
from minillm.engine.runner import ModelRunner
from minillm.engine.scheduler import KVCache, Scheduler
from minillm.engine.sizing import block_bytes_of, fitting_blocks
from minillm.engine.warmup import warm_up
from minillm.kv_cache.manager import KVCacheManager
from minillm.model.attention import can
from minillm.model.decoder import Decoder
from minillm.model.routing import trace_routing
from minillm.sampling.sampler import Sampler
from minillm.speculative.drafter import Drafter
from minillm.speculative.rejection import RejectionSampler
from minillm.trace import Trace


def build_scheduler(kv_cache: KVCache, config: EngineConfig, trace: Trace) -> Scheduler:
    """A scheduler over `kv_cache`, with the policy and the limits of `config`."""
    kind = PreemptiveScheduler if config.scheduling_policy == "preemptive_priority" else Scheduler
    return kind(
        kv_cache,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        make_policy(config.scheduling_policy, cached_tokens_of(kv_cache)),
        config.enable_chunked_prefill,
        config.preemption_mode,
        trace,
        AdapterGate(config.max_loras, config.max_num_seqs) if config.enable_lora else None,
    )


def build_runner(
    model: Decoder,
    kv_cache: KVCacheManager,
    config: EngineConfig,
    trace: Trace,
    sampler: Sampler | None = None,
    drafter: Drafter | None = None,
    tokens_each: int = 1,
    kind: type[ModelRunner] = ModelRunner,
) -> ModelRunner:
    """A runner with the memory behind `kv_cache`. It records steps of at most `tokens_each` tokens a request."""
    build_tap(model, config)
    cache = build_cache(model, kv_cache, config.kv_cache_dtype)
    attention = build_attention(model, cache, config.attention_backend, retention_of(config, model))
    graphs = build_graphs(model, attention, kv_cache, config, tokens_each)
    sampler = sampler or (RejectionSampler() if drafter is not None or config.speculative_config else Sampler())
    transfer, pieces = build_transfer(cache, kv_cache), build_pieces(model, graphs, config)
    adapters = build_adapters(model, config)
    trace_routing(model, trace)
    runner = kind(model, cache, attention, sampler, trace, graphs, transfer, pieces, drafter, adapters)
    if model.device.type == "cuda" and can(attention, "graph_safe"):
        warm_up(model, attention, runner.sampler)
    return runner


def build_adapters(model: Decoder, config: EngineConfig) -> AdapterCache | None:
    """Where adapters wait and run, if `enable_lora` asks for them. The model's batch slots are made once."""
    if not config.enable_lora:
        return None
    return AdapterCache(model, config.max_loras, config.max_lora_rank, config.num_cpu_loras)


def build_manager(model: Decoder, config: EngineConfig) -> KVCacheManager:
    """A manager over as many blocks as `config` asks for, or as fit.

    Raises ValueError when the memory does not hold `max_model_len` tokens, or when host memory is asked for less
    than a block of.
    """
    build_adapters(model, config)  # before the free memory is measured
    block_bytes = block_bytes_of(model, config.block_size, config.kv_cache_dtype)
    num_blocks = config.num_kv_blocks or fitting_blocks(model, config, block_bytes)
    num_host_blocks = config.host_kv_bytes // block_bytes
    if config.host_kv_bytes and not num_host_blocks:
        raise ValueError(f"host_kv_bytes={config.host_kv_bytes} holds no block; a block has {block_bytes} bytes")
    policy = retention_of(config, model)
    return KVCacheManager(
        num_blocks,
        config.block_size,
        # A text with holes is no prefix of another: retention keeps none of its blocks for other requests.
        config.enable_prefix_caching and policy is None,
        sliding_window(model) if policy is None else policy.window,
        num_host_blocks,
        identity=model.fingerprint
        if config.kv_cache_dtype == "auto"
        else f"{model.fingerprint} {config.kv_cache_dtype}",
        disk=build_disk(model, config, block_bytes),
        sinks=0 if policy is None else policy.sinks,
    )
