"""The parts of an engine that a model decides: its cache, attention, recorded steps and tiers. Built in chapter 06."""

from __future__ import annotations

import warnings

from minillm.device import like_a_gpu
from minillm.engine.config import EngineConfig
from minillm.engine.graphs import DecodeGraphs, bucket_sizes
from minillm.engine.pieces import PieceGraphs, piece_sizes
from minillm.kernels.language import MODE
from minillm.kernels.tuning import tune_attention
from minillm.kv_cache.disk import DiskStore
from minillm.kv_cache.latent import LatentAttention, LatentKVCache
from minillm.kv_cache.manager import KVCacheManager
from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.native_latent import NativeLatentAttention
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.quantized import INT4
from minillm.kv_cache.retention import RetentionPolicy, SinkTurn
from minillm.kv_cache.sink_logits import with_sink_logits
from minillm.kv_cache.torch_attention import TorchAttention
from minillm.kv_cache.transfer import BlockTransfer
from minillm.kv_cache.triton_attention import TritonAttention
from minillm.kv_cache.triton_latent import TritonLatentAttention
from minillm.model.attention import AttentionBackend, can, sink_logits_of
from minillm.model.decoder import Decoder


def build_cache(model: Decoder, manager: KVCacheManager, kv_cache_dtype: str = "auto") -> PagedKVCache:
    """The memory behind `manager`'s blocks on the device."""
    config = model.config
    kind = PagedKVCache if config.mla is None else LatentKVCache
    return kind(
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
    cap = model.config.attention_softcap
    kernels = (MODE == "compiled" and cache.keys[0].is_cuda) or (MODE == "interpreted" and like_a_gpu("triton"))
    if model.config.mla is not None:
        return build_latent_attention(model, cache, backend, kernels)
    if cap is not None and backend in ("triton", "native"):
        raise ValueError(
            f"attention_backend={backend!r} caps no scores, this model's are capped at {cap}; "
            "use attention_backend='torch', or 'auto'"
        )
    windows = model.config.layer_windows if policy is None else (policy.window,) * model.config.num_layers
    sink_turn = SinkTurn(policy, model.rotary.frequencies) if policy and policy.sinks else None
    if cap is not None:
        return TorchAttention(cache, windows, model.config.num_heads, sink_turn, cap)
    reads = 16 <= model.config.head_dim <= 256 and why_not_triton(model, cache) is None
    if backend == "triton" and (why := why_not_triton(model, cache)) is not None:
        raise ValueError(f"attention_backend='triton' has no kernels for {why}; use attention_backend='auto'")
    if backend == "triton" or (backend == "auto" and kernels and reads):
        attention = TritonAttention(cache, windows, model.config.num_heads, sink_turn=sink_turn)
        if not model.config.is_plain:  # its layers are not what the fused kernels compute
            attention.fused_store = attention.graph_safe = False
        if cache.keys[0].is_cuda and attention.torch is None:  # prompts are ours too
            tune_attention(cache.keys[0], cache.values[0], model.config.num_heads, model.dtype)
        return with_sink_logits(attention, sink_logits_of(model))
    if backend == "native" or (backend == "auto" and NativeAttention.serves(cache)):
        return with_sink_logits(NativeAttention(cache, windows, sink_turn), sink_logits_of(model))
    return with_sink_logits(TorchAttention(cache, windows, model.config.num_heads, sink_turn), sink_logits_of(model))


def build_latent_attention(model: Decoder, cache: LatentKVCache, backend: str, kernels: bool) -> AttentionBackend:
    """`build_attention` for a model that keeps latents; `kernels` says whether "auto" means Triton's here."""
    config, rank = model.config, model.config.mla.kv_lora_rank
    shape = cache, config.layer_windows, config.num_heads
    if backend == "triton" or (backend == "auto" and kernels and TritonLatentAttention.why_not(cache, rank) is None):
        return TritonLatentAttention(*shape, rank)
    if backend == "native" or (backend == "auto" and NativeLatentAttention.why_not(cache, rank) is None):
        return NativeLatentAttention(*shape, rank)
    return LatentAttention(*shape)


def why_not_triton(model: Decoder, cache: PagedKVCache) -> str | None:
    """What Triton's attention has no kernels for, in words; None where it has."""
    if cache.dtype is INT4 and model.config.head_dim % 4:
        return f"kv_cache_dtype='int4' with head_dim={model.config.head_dim}, which is no multiple of 4"
    return None


def build_graphs(
    model: Decoder, attention: AttentionBackend, kv_cache: KVCacheManager, config: EngineConfig, tokens_each: int = 1
) -> DecodeGraphs | None:
    """The recorded decode steps, of at most `tokens_each` tokens a request, where the backend can be recorded and
    `enforce_eager` does not forbid it."""
    if config.enforce_eager or not can(attention, "graph_safe"):
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


def build_transfer(cache: PagedKVCache, manager: KVCacheManager) -> BlockTransfer | None:
    """Host memory and disk behind `cache`, where `manager` has any."""
    return BlockTransfer(cache, manager.host.num_blocks, manager.tiers.disk) if manager.host.num_blocks else None


def build_disk(model: Decoder, config: EngineConfig, block_bytes: int) -> DiskStore | None:
    """The folder that blocks go to from host memory, if there is one;
    it may hold blocks of other models and dtypes too."""
    if config.disk_kv_path is None:
        return None
    layout = f"{model.fingerprint} {config.kv_cache_dtype} {config.block_size} {block_bytes}"
    return DiskStore(config.disk_kv_path, config.disk_kv_bytes, block_bytes, layout)


def close_tiers(manager: KVCacheManager, transfer: BlockTransfer | None) -> None:
    """Let the disk have what memory holds of prefixes, and end its threads; when no request is left."""
    if transfer is None or transfer.disk is None:
        return
    try:
        transfer.move(manager.take_moves())
        transfer.spill(*manager.tiers.cold_blocks())
    finally:
        transfer.disk.close()


def retention_of(config: EngineConfig, model: Decoder) -> RetentionPolicy | None:
    """What is kept of a text, if not all. Raises ValueError for a model that was not made for it."""
    policy = config.kv_retention
    limit, windows = model.config.max_position_embeddings, set(model.config.layer_windows) - {None}
    if policy is None:
        return None
    if model.config.mla is not None:
        raise ValueError(
            f"kv_retention={config.kv_retention} is for models that keep keys and values, and model_type="
            f"{model.config.model_type!r} keeps latents; leave it out"
        )
    if windows:
        raise ValueError(
            f"kv_retention={config.kv_retention} is for models that attend to everything; "
            f"this one's layers have windows of their own ({', '.join(map(str, sorted(windows)))} tokens) and "
            "give back what leaves them; leave it out"
        )
    if policy.sinks and model.config.layer_ropes:
        raise ValueError(
            f"kv_retention={config.kv_retention} turns its sinks by one rotation; this model's layers have several; "
            "keep no sinks, or leave it out"
        )
    if policy.num_kept > limit:
        raise ValueError(
            f"kv_retention keeps {policy.sinks} sinks + a window of {policy.window} = {policy.num_kept} "
            f"tokens, more than the model's max_position_embeddings={limit}; lower the window"
        )
    return policy


def sliding_window(model: Decoder) -> int | None:
    """The largest window, if every layer has one: what no layer can see need not be kept."""
    windows = model.config.layer_windows
    return None if None in windows else max(windows)
