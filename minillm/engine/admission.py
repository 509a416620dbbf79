"""Admission: a request that could never be served is refused at once, with the numbers. Built in chapter 05."""

from __future__ import annotations

from minillm.engine.request import Request
from minillm.kv_cache.protocol import KVCache


def check_servable(
    request: Request, kv_cache: KVCache, max_num_batched_tokens: int, enable_chunked_prefill: bool
) -> None:
    """Raise ValueError for a request that no empty cache holds, or whose prompt no step takes whole where it must."""
    most = request.num_prompt_tokens + request.max_tokens
    needed = kv_cache.blocks_needed(most, min(most, max_num_batched_tokens))
    if needed > (available := kv_cache.pool.num_blocks):
        raise ValueError(
            f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens and "
            f"max_tokens={request.max_tokens} need {needed} blocks, the cache has {available}; "
            "raise num_kv_blocks, or ask for fewer tokens"
        )
    if not enable_chunked_prefill and most > max_num_batched_tokens:
        raise ValueError(
            f"request {request.request_id}: up to {most} tokens exceed max_num_batched_tokens="
            f"{max_num_batched_tokens}, and a prompt may not be cut; set enable_chunked_prefill=True"
        )
