"""How much memory the KV cache gets, and the cache built for a model. Built in chapter 06."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace

import torch

from minillm.device import available_memory, like_a_gpu
from minillm.engine.config import EngineConfig
from minillm.engine.graphs import DecodeGraphs, Recorder, bucket_sizes
from minillm.engine.pieces import PieceGraphs, piece_sizes
from minillm.kernels.language import MODE
from minillm.kernels.tuning import tune_attention
from minillm.kv_cache.disk import DiskStore
from minillm.kv_cache.manager import KVCacheManager
from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.paged import PagedKVCache, bytes_per_block
from minillm.kv_cache.quantized import KV_DTYPES
from minillm.kv_cache.retention import RetentionPolicy, SinkTurn
from minillm.kv_cache.torch_attention import TorchAttention
from minillm.kv_cache.transfer import BlockTransfer
from minillm.kv_cache.triton_attention import TritonAttention
from minillm.model.attention import AttentionBackend
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_config, resolve_model
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.speculative.config import SpeculativeConfig

CPU_CACHE_BYTES = 4 * 2**30  # at most, where the user does not say; and at most a quarter of what is free


def build_manager(model: Decoder, config: EngineConfig) -> KVCacheManager:
    """A manager over as many blocks as `config` asks for, or as fit.

    Raises ValueError when the memory does not hold `max_model_len` tokens, or when host memory is asked for less
    than a block of.
    """
    block_bytes = block_bytes_of(model, config.block_size, config.kv_cache_dtype)
    num_blocks = config.num_kv_blocks or _fitting_blocks(model, config, block_bytes)
    num_host_blocks = config.host_kv_bytes // block_bytes
    if config.host_kv_bytes and not num_host_blocks:
        raise ValueError(f"host_kv_bytes={config.host_kv_bytes} holds no block; a block has {block_bytes} bytes")
    policy = retention_of(config, model)
    return KVCacheManager(
        num_blocks,
        config.block_size,
        # A text with holes is nobody's prefix: retention keeps none of its blocks for others.
        config.enable_prefix_caching and policy is None,
        sliding_window(model) if policy is None else policy.window,
        num_host_blocks,
        identity=model.fingerprint
        if config.kv_cache_dtype == "auto"
        else f"{model.fingerprint} {config.kv_cache_dtype}",
        disk=build_disk(model, config, block_bytes),
        sinks=0 if policy is None else policy.sinks,
    )


def build_disk(model: Decoder, config: EngineConfig, block_bytes: int) -> DiskStore | None:
    """The folder that blocks go to from host memory, if there is one;
    it may hold blocks of other models and dtypes too."""
    if config.disk_kv_path is None:
        return None
    layout = f"{model.fingerprint} {config.kv_cache_dtype} {config.block_size} {block_bytes}"
    return DiskStore(config.disk_kv_path, config.disk_kv_bytes, block_bytes, layout)


def build_transfer(cache: PagedKVCache, manager: KVCacheManager) -> BlockTransfer | None:
    """Host memory and disk behind `cache`, where `manager` has any."""
    return BlockTransfer(cache, manager.host.num_blocks, manager.tiers.disk) if manager.host.num_blocks else None


def close_tiers(manager: KVCacheManager, transfer: BlockTransfer | None) -> None:
    """Let the disk have what memory holds of prefixes, and end its threads; when no request is left."""
    if transfer is None or transfer.disk is None:
        return
    try:
        transfer.move(manager.take_moves())
        transfer.spill(*manager.tiers.cold_blocks())
    finally:
        transfer.disk.close()


def build_cache(model: Decoder, manager: KVCacheManager, kv_cache_dtype: str = "auto") -> PagedKVCache:
    """The memory behind `manager`'s blocks on the device."""
    config = model.config
    return PagedKVCache(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        manager.pool.num_blocks,
        manager.block_size,
        model.dtype,
        model.device,
        kv_dtype=kv_cache_dtype,
    )


def build_attention(
    model: Decoder, cache: PagedKVCache, backend: str = "auto", policy: RetentionPolicy | None = None
) -> AttentionBackend:
    """The backend named `backend` over `cache`; "auto" is our Triton kernels on a GPU, our C kernels on a CPU where
    there is a compiler, and torch elsewhere."""
    windows = model.config.layer_windows if policy is None else (policy.window,) * model.config.num_layers
    sink_turn = SinkTurn(policy, model.rotary.frequencies) if policy and policy.sinks else None
    kernels = (MODE == "compiled" and cache.keys[0].is_cuda) or (MODE == "interpreted" and like_a_gpu("triton"))
    if backend == "triton" or (backend == "auto" and kernels and 16 <= model.config.head_dim <= 256):
        attention = TritonAttention(cache, windows, model.config.num_heads, sink_turn=sink_turn)
        if cache.keys[0].is_cuda and attention.torch is None:  # prompts are ours too
            tune_attention(cache.keys[0], cache.values[0], model.config.num_heads, model.dtype)
        return attention
    if backend == "native" or (backend == "auto" and NativeAttention.serves(cache)):
        return NativeAttention(cache, windows, sink_turn)
    return TorchAttention(cache, windows, model.config.num_heads, sink_turn)


def build_graphs(
    model: Decoder, attention: AttentionBackend, kv_cache: KVCacheManager, config: EngineConfig, tokens_each: int = 1
) -> DecodeGraphs | None:
    """The recorded decode steps, of at most `tokens_each` tokens a request, where the backend can be recorded and
    `enforce_eager` does not forbid it."""
    if config.enforce_eager or not isinstance(attention, TritonAttention):
        return None
    if model.stream is not None:
        warnings.warn(
            "steps are not recorded (CUDA graphs) with cpu_offload_bytes: enforce_eager=True says so beforehand",
            stacklevel=2,
        )
        return None
    longest = config.max_model_len or model.config.max_position_embeddings
    if kv_cache.window is None:  # else a text grows longer than what is kept of it
        longest = min(longest, kv_cache.pool.num_blocks * kv_cache.block_size)
    sizes = bucket_sizes(min(config.max_num_seqs * tokens_each, config.max_num_batched_tokens))
    return DecodeGraphs(model, attention, kv_cache.block_size, longest, sizes, tokens_each)


def build_pieces(model: Decoder, graphs: DecodeGraphs | None, config: EngineConfig) -> PieceGraphs | None:
    """The recorded pieces of steps with prompts, on a GPU that records decode steps.
    On a CPU they would only compute padding."""
    if graphs is None or not graphs.recorder.on_gpu:
        return None
    return PieceGraphs(model, graphs.attention, piece_sizes(config.max_num_batched_tokens), graphs.recorder)


def block_bytes_of(model: Decoder, block_size: int, kv_cache_dtype: str = "auto", of: ModelConfig | None = None) -> int:
    """Bytes of a block of `model`'s cache, or of that of a model of another shape `of` beside it."""
    config = of or model.config
    dtype = KV_DTYPES.get(kv_cache_dtype, model.dtype)
    return bytes_per_block(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)


def sliding_window(model: Decoder) -> int | None:
    """The largest window, if every layer has one: what no layer can see need not be kept."""
    windows = model.config.layer_windows
    return None if None in windows else max(windows)


def retention_of(config: EngineConfig, model: Decoder) -> RetentionPolicy | None:
    """What is kept of a text, if not all. Raises ValueError for a model that was not made for it."""
    policy = RetentionPolicy.of(config.kv_retention)
    limit, windows = model.config.max_position_embeddings, set(model.config.layer_windows) - {None}
    if policy is None:
        return None
    if windows:
        raise ValueError(
            f"kv_retention={config.kv_retention} is for models that attend to everything; "
            f"this one's layers have windows of their own ({', '.join(map(str, sorted(windows)))} tokens) and "
            "give back what leaves them; leave it out"
        )
    if policy.num_kept > limit:
        raise ValueError(
            f"kv_retention keeps {policy.sinks} sinks + a window of {policy.window} = {policy.num_kept} "
            f"tokens, more than the model's max_position_embeddings={limit}; lower the window"
        )
    return policy


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


def _fitting_blocks(model: Decoder, config: EngineConfig, block_bytes: int) -> int:
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
    spec = SpeculativeConfig.of(config.speculative_config)
    if spec is not None and spec.method == "draft_model":  # as many blocks again, of a smaller model, and its weights
        draft = load_config(resolve_model(spec.model))
        block_bytes += block_bytes_of(model, config.block_size, config.kv_cache_dtype, draft)
        num_bytes = max(0, num_bytes - draft.num_parameters() * model.dtype.itemsize)
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
    table = torch.arange(1, manager.pool.num_blocks + 1, device=model.device)[None]
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
    if config.enforce_eager or not isinstance(attention, TritonAttention) or model.stream is not None:
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
