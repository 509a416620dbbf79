"""How much memory the KV cache gets, and how long a request may be. Built in chapter 06."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from minillm.device import available_memory
from minillm.engine.config import EngineConfig
from minillm.engine.graphs import LARGEST, DecodeGraphs, Recorder, bucket_sizes
from minillm.engine.parts import (
    build_attention,
    build_cache,
    retention_of,
    sliding_window,
)
from minillm.engine.pieces import PieceGraphs, piece_sizes
from minillm.kv_cache.manager import KVCacheManager
from minillm.kv_cache.paged import bytes_per_block
from minillm.kv_cache.quantized import KV_DTYPES
from minillm.model.attention import AttentionBackend, can
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_config, resolve_model
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.speculative.eagle_config import load_head_config, resolve_head

CPU_CACHE_BYTES = 4 * 2**30  # at most, where the user does not say; and at most a quarter of what is free


def block_bytes_of(model: Decoder, block_size: int, kv_cache_dtype: str = "auto", of: ModelConfig | None = None) -> int:
    """Bytes of a block of `model`'s cache, or of that of a model of another shape `of` beside it."""
    config = of or model.config
    dtype = KV_DTYPES.get(kv_cache_dtype, model.dtype)
    sizes = config.num_layers, config.num_kv_heads, config.head_dim
    return bytes_per_block(*sizes, block_size, dtype, config.kv_vectors)


def max_model_len_of(config: EngineConfig, model: Decoder) -> int:
    """What was asked for, or what the model was made for. Raises ValueError for more than that, unless only sinks and a
    window are kept: then no query is farther from a key than those, however long the text."""
    asked = config.max_model_len
    limit = model.config.max_position_embeddings
    if asked is not None and asked > limit and retention_of(config, model) is None:
        raise ValueError(
            f"max_model_len={asked} exceeds the model's max_position_embeddings={limit}; lower it, or keep less of the "
            f"text: kv_retention={{'sinks': 4, 'window': {max(1, limit - 4)}}}"
        )
    return asked or limit


def served_model_len(config: EngineConfig, kv_cache: KVCacheManager, model_len: int) -> int:
    """The longest request that the cache and the budget can serve. Raises ValueError if that is less than was asked."""
    budget = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and budget < model_len:
        raise ValueError(
            f"max_num_batched_tokens={budget} is less than max_model_len={model_len}, and a prompt may not be cut; "
            f"raise the one, lower the other, or set enable_chunked_prefill=True"
        )
    num_blocks, block_size = kv_cache.pool.num_blocks, kv_cache.block_size
    if kv_cache.blocks_needed(model_len, min(model_len, budget)) <= num_blocks:
        return model_len
    if config.max_model_len is not None:
        raise ValueError(
            f"max_model_len={model_len} needs {kv_cache.blocks_needed(model_len, min(model_len, budget))} blocks of "
            f"{block_size} tokens, the cache has {num_blocks}; lower max_model_len, or raise num_kv_blocks"
        )
    if (longest := num_blocks * block_size) < 2:
        raise ValueError(
            f"num_kv_blocks={num_blocks} of block_size={block_size} hold no prompt and an answer; raise either"
        )
    return longest


def fitting_blocks(model: Decoder, config: EngineConfig, block_bytes: int) -> int:
    """As many as the memory holds, but no more than `max_num_seqs` of the longest requests could fill."""
    max_model_len = config.max_model_len or model.config.max_position_embeddings
    policy = retention_of(config, model)
    window, sinks = (sliding_window(model), 0) if policy is None else (policy.window, policy.sinks)
    longest = KVCacheManager(1, config.block_size, window=window, sinks=sinks)
    blocks_of_longest = longest.blocks_needed(max_model_len, min(max_model_len, config.max_num_batched_tokens))
    if model.device.type == "cuda":
        num_bytes = _free_on_gpu(model, config)
        way_out = "raise gpu_memory_utilization"
    else:
        num_bytes = min(CPU_CACHE_BYTES, available_memory() // 4)
        way_out = "set num_kv_blocks yourself"
    spec = config.speculative_config
    if spec is not None and spec.method == "draft_model":  # as many blocks again, of a smaller model, and its weights
        draft = load_config(resolve_model(spec.model))
        block_bytes += block_bytes_of(model, config.block_size, config.kv_cache_dtype, draft)
        num_bytes = max(0, num_bytes - draft.num_parameters() * model.dtype.itemsize)
    elif spec is not None and spec.method == "eagle":
        head = load_head_config(resolve_head(spec.model), model.config)
        block_bytes += block_bytes_of(model, config.block_size, config.kv_cache_dtype, head.layer)
        block_bytes += head.feature_bytes(config.block_size, model.dtype.itemsize)
        rows = max(config.max_num_batched_tokens, LARGEST)
        num_bytes = max(0, num_bytes - head.fixed_bytes(rows, model.dtype.itemsize))
    fitting = num_bytes // block_bytes
    if fitting < 1 or (config.max_model_len and fitting < blocks_of_longest):
        raise ValueError(
            f"{num_bytes} bytes are left for the KV cache: {fitting} blocks of {block_bytes} bytes, but "
            f"max_model_len={max_model_len} needs {blocks_of_longest}; lower max_model_len, or {way_out}"
        )
    return int(min(fitting, config.max_num_seqs * blocks_of_longest))


def _free_on_gpu(model: Decoder, config: EngineConfig) -> int:
    """What `gpu_memory_utilization` leaves beside the weights, the largest step, which is run once to be measured, and
    the recorded steps, of which the largest is recorded: the others share its memory."""
    gc.collect()  # a model that was let go may still stand in a circle, and its memory with it
    torch.cuda.empty_cache()
    torch.cuda.synchronize(model.device)
    free, total = torch.cuda.mem_get_info(model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    longest = config.max_model_len or model.config.max_position_embeddings
    num_tokens = min(config.max_num_batched_tokens, longest)
    manager = KVCacheManager(-(-num_tokens // config.block_size), config.block_size, enable_prefix_caching=False)
    cache = build_cache(model, manager, config.kv_cache_dtype)
    own = torch.cuda.memory_allocated(model.device) - before
    attention = build_attention(model, cache, config.attention_backend, retention_of(config, model))
    slots = torch.arange(config.block_size, config.block_size + num_tokens, device=model.device)
    table = torch.arange(1, manager.pool.num_blocks + 1, device=model.device, dtype=torch.int32)[None]
    batch = replace(ForwardBatch.single([0] * num_tokens, device=model.device), slot_mapping=slots, block_table=table)
    model.forward(batch, attention)
    peak = torch.cuda.max_memory_allocated(model.device) - before - own
    drawn = min(config.max_num_seqs * config.tokens_each, config.max_num_batched_tokens)
    sampling = 3 * 4 * drawn * model.config.vocab_size  # float32 logits, and what the sampler makes of them
    torch.cuda.empty_cache()
    recorded = _recorded_bytes(model, attention, config, longest, drawn)
    del cache, attention
    torch.cuda.empty_cache()
    return max(0, int(free - peak - sampling - recorded - (1 - config.gpu_memory_utilization) * total))


def _recorded_bytes(model: Decoder, attention: AttentionBackend, config: EngineConfig, longest: int, drawn: int) -> int:
    """Bytes that the recorded steps will take. The largest are recorded and measured; every other graph is taken to add
    as much as the smallest does, since all share the memory between their kernels."""
    if config.enforce_eager or not can(attention, "graph_safe") or model.stream is not None:
        return 0
    recorder, kept, taken = Recorder(model.device), [], []
    sizes, pieces = bucket_sizes(drawn), piece_sizes(config.max_num_batched_tokens)
    for record in (
        lambda: DecodeGraphs(model, attention, config.block_size, longest, sizes[-1:], recorder=recorder),
        lambda: PieceGraphs(model, attention, pieces[-1:], recorder),
        lambda: DecodeGraphs(model, attention, config.block_size, longest, sizes[:1], recorder=recorder),
        lambda: PieceGraphs(model, attention, pieces[:1], recorder),
    ):
        before = torch.cuda.mem_get_info(model.device)[0]
        kept.append(record())
        torch.cuda.synchronize(model.device)
        taken.append(max(0, before - torch.cuda.mem_get_info(model.device)[0]))
    return taken[0] + taken[1] + (len(sizes) - 1) * taken[2] + (len(pieces) - 1) * taken[3]
