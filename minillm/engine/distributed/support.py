"""What a parallel LLM serves, and what it refuses when it is made. Built in chapter 20.

Served: every dtype and attention backend, low-bit weights (int8, int4, fp8, fp4, mxfp4, nvfp4, GPTQ, AWQ; GGUF), a KV
cache in 8 or 4 bits, prefix caching, chunked prompts, every policy, preemption by recomputation and by swap, host
memory for prefixes, sliding windows and attention sinks, speculation with n-grams and draft models, adapters, grammars,
penalties, log-probabilities, several samples, beam search, embeddings, mixtures of experts with shared ones and with
groups, latent attention, gpt-oss with its sink logits. A draft model is whole on each rank, and so are the latents of a
stage: all heads read the same one.
"""

from __future__ import annotations

from pathlib import Path

from minillm.engine.config import EngineConfig
from minillm.model.checkpoint import stored_quantization
from minillm.quantization.config import resolve as resolve_quantization


def check_supported(config: EngineConfig, path: Path) -> None:
    """Raise NotImplementedError naming a setting that is not served in parallel, and the way out."""
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    named = f"tensor_parallel_size={tp}" if tp > 1 else f"pipeline_parallel_size={pp}"
    if config.disk_kv_path is not None:
        raise NotImplementedError(
            f"disk_kv_path={str(config.disk_kv_path)!r} with {named} is not served: parts of a block are on several "
            "ranks, and a file has a whole one; use host_kv_bytes, or several LLMs of one process each"
        )
    if config.speculative_config is not None and config.speculative_config.method == "eagle":
        raise NotImplementedError(
            f"speculative_config: method='eagle' with {named} is not served: a draft head reads hidden states and the "
            "output matrix of a whole model; use method='draft_model', or one process"
        )
    if tp > 1:
        _check_weights(config, path, named)


def _check_weights(config: EngineConfig, path: Path, named: str) -> None:
    asked = resolve_quantization(config.quantization)
    stored = stored_quantization(path) or {}
    activations = (asked.activations if asked is not None else None) or stored.get("activations")
    if activations is not None:
        raise NotImplementedError(
            f"{named} with activations rounded to {activations} is not served: their scale is the largest value of a "
            "token, of which each rank has a part; quantize the weights alone (int8, int4, fp8, gptq, awq), "
            "or use pipeline_parallel_size"
        )
    if asked is not None and asked.act_order:
        raise NotImplementedError(
            f"{named} with act_order=True is not served: the inputs of a group are on several ranks; "
            "use act_order=False, or pipeline_parallel_size"
        )
