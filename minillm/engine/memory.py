"""How much memory the KV cache gets, and the cache built for a model. Built in chapter 06."""

from __future__ import annotations

from dataclasses import replace

import torch

from minillm.device import available_memory
from minillm.engine.config import EngineConfig
from minillm.engine.graphs import DecodeGraphs, bucket_sizes
from minillm.kernels import native
from minillm.kernels.language import MODE
from minillm.kv_cache.manager import KVCacheManager
from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.paged import PagedKVCache, bytes_per_block
from minillm.kv_cache.torch_attention import TorchAttention
from minillm.kv_cache.triton_attention import TritonAttention
from minillm.model.attention import AttentionBackend
from minillm.model.batch import ForwardBatch
from minillm.model.decoder import Decoder

CPU_CACHE_BYTES = 4 * 2**30  # at most, where the user does not say; and at most a quarter of what is free


def build_manager(model: Decoder, config: EngineConfig) -> KVCacheManager:
    """A manager over as many blocks as `config` asks for, or as fit.

    Raises ValueError when the memory does not hold `max_model_len` tokens, or when host memory is asked for less
    than a block of.
    """
    block_bytes = block_bytes_of(model, config.block_size)
    num_blocks = config.num_kv_blocks or _fitting_blocks(model, config, block_bytes)
    num_host_blocks = config.host_kv_bytes // block_bytes
    if config.host_kv_bytes and not num_host_blocks:
        raise ValueError(f"host_kv_bytes={config.host_kv_bytes} holds no block; a block has {block_bytes} bytes")
    return KVCacheManager(
        num_blocks,
        config.block_size,
        config.enable_prefix_caching,
        sliding_window(model),
        num_host_blocks,
        identity=model.fingerprint,
    )


def build_cache(model: Decoder, manager: KVCacheManager) -> PagedKVCache:
    """The memory behind `manager`'s blocks."""
    config = model.config
    return PagedKVCache(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        manager.pool.num_blocks,
        manager.block_size,
        model.dtype,
        model.device,
        manager.host.num_blocks,
    )


def build_attention(model: Decoder, cache: PagedKVCache, backend: str = "auto") -> AttentionBackend:
    """The backend named `backend` over `cache`; "auto" is our Triton kernels on a GPU, our C kernels on a CPU where there
    is a compiler, and torch elsewhere."""
    windows = model.config.layer_windows
    compiled = MODE == "compiled" and cache.keys[0].is_cuda and 16 <= model.config.head_dim <= 256
    if backend == "triton" or (backend == "auto" and compiled):
        return TritonAttention(cache, windows, model.config.num_heads)
    if backend == "native" or (backend == "auto" and native.serves(cache.keys[0])):
        return NativeAttention(cache, windows)
    return TorchAttention(cache, windows, model.config.num_heads)


def build_graphs(
    model: Decoder, attention: AttentionBackend, kv_cache: KVCacheManager, config: EngineConfig
) -> DecodeGraphs | None:
    """The recorded decode steps, where the backend can be recorded and `enforce_eager` does not forbid it."""
    if config.enforce_eager or not isinstance(attention, TritonAttention):
        return None
    held = kv_cache.pool.num_blocks * kv_cache.block_size
    longest = min(config.max_model_len or model.config.max_position_embeddings, held)
    return DecodeGraphs(model, attention, kv_cache.block_size, longest, bucket_sizes(config.max_num_seqs))


def block_bytes_of(model: Decoder, block_size: int) -> int:
    config = model.config
    return bytes_per_block(config.num_layers, config.num_kv_heads, config.head_dim, block_size, model.dtype)


def sliding_window(model: Decoder) -> int | None:
    """The largest window, if every layer has one: what no layer can see need not be kept."""
    windows = model.config.layer_windows
    return None if None in windows else max(windows)


def max_model_len_of(config: EngineConfig, model: Decoder) -> int:
    """What was asked for, or what the model was made for. Raises ValueError for more than that."""
    asked = config.max_model_len
    limit = model.config.max_position_embeddings
    if asked is not None and asked > limit:
        raise ValueError(f"max_model_len={asked} exceeds the model's max_position_embeddings={limit}")
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
        raise ValueError(f"num_kv_blocks={num_blocks} of block_size={block_size} hold no prompt and an answer; raise either")
    return longest


def _fitting_blocks(model: Decoder, config: EngineConfig, block_bytes: int) -> int:
    """As many as the memory holds, but no more than `max_num_seqs` of the longest requests could fill."""
    max_model_len = config.max_model_len or model.config.max_position_embeddings
    blocks_of_longest = -(-max_model_len // config.block_size)
    if model.device.type == "cuda":
        num_bytes = _free_on_gpu(model, config)
        way_out = "raise gpu_memory_utilization"
    else:
        num_bytes = min(CPU_CACHE_BYTES, available_memory() // 4)
        way_out = "set num_kv_blocks yourself"
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
    torch.cuda.synchronize(model.device)
    free, total = torch.cuda.mem_get_info(model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    longest = config.max_model_len or model.config.max_position_embeddings
    num_tokens = min(config.max_num_batched_tokens, longest)
    manager = KVCacheManager(-(-num_tokens // config.block_size), config.block_size, enable_prefix_caching=False)
    cache = build_cache(model, manager)
    own = torch.cuda.memory_allocated(model.device) - before
    attention = build_attention(model, cache, config.attention_backend)
    slots = torch.arange(config.block_size, config.block_size + num_tokens, device=model.device)
    table = torch.arange(1, manager.pool.num_blocks + 1, device=model.device)[None]
    batch = replace(ForwardBatch.single([0] * num_tokens, device=model.device), slot_mapping=slots, block_table=table)
    model.forward(batch, attention)
    peak = torch.cuda.max_memory_allocated(model.device) - before - own
    sampling = 3 * 4 * config.max_num_seqs * model.config.vocab_size  # float32 logits, and what the sampler makes of them
    recorded = 0
    if not config.enforce_eager and isinstance(attention, TritonAttention):
        torch.cuda.empty_cache()
        available = torch.cuda.mem_get_info(model.device)[0]
        graphs = DecodeGraphs(model, attention, config.block_size, longest, bucket_sizes(config.max_num_seqs)[-1:])
        torch.cuda.synchronize(model.device)
        recorded = max(0, available - torch.cuda.mem_get_info(model.device)[0])
        del graphs
    del cache, attention
    torch.cuda.empty_cache()
    return max(0, int(free - peak - sampling - recorded - (1 - config.gpu_memory_utilization) * total))
