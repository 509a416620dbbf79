"""The guide: for each idea of the book, where it is in minillm, in vLLM and in SGLang, and what differs.
Built in chapter 25."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One idea. `ours`, `vllm` and `sglang` are references, `path::Name`; without the idea it is empty."""

    chapter: int
    idea: str
    ours: str
    vllm: str
    sglang: str
    differs: str


_W, _S = "vllm/v1/worker/gpu/", "vllm/v1/core/"
_L, _SRT = "vllm/model_executor/layers/", "python/sglang/srt/"
_OPS = "python/sglang/kernels/ops/"
SCHEDULER = _S + "sched/scheduler.py"  # read line by line in `scheduler`

# fmt: off
ROWS = [
    Row(1, "sampling one batch of rows", "sampling/sampler.py::Sampler.sample",
        _W + "sample/sampler.py::Sampler.sample", _SRT + "layers/sampler.py::Sampler.forward",
        "The same order: penalties, temperature, filters, draw. vLLM runs each of them as a Triton kernel over "
        "all rows; SGLang calls FlashInfer's rejection samplers, which need no sort."),
    Row(1, "noise keyed by seed, position and token", "sampling/noise.py::gumbel_noise",
        _W + "sample/gumbel.py::gumbel_noised_argmax", _SRT + "layers/sampler.py::multinomial_with_seed",
        "The same trick in all three: a hash in place of a generator's state, so a row draws the same whatever "
        "its batch. vLLM takes care that the tail that decides the winner has fine resolution in float32."),
    Row(2, "the attention block", "model/decoder_layer.py::SelfAttention.forward",
        "vllm/model_executor/models/llama.py::LlamaAttention.forward",
        _SRT + "models/llama.py::LlamaAttention.forward",
        "The same lines. vLLM's attention finds its batch in a global context; SGLang and we pass it as an "
        "argument."),
    Row(2, "rotary positions", "model/layers.py::Rotary.forward", _L + "rotary_embedding/base.py::RotaryEmbedding",
        _SRT + "layers/rotary_embedding/base.py::RotaryEmbedding",
        "Both tabulate every position up to the longest text once; we compute the angles of a step's tokens in "
        "the step."),
    Row(3, "bytes of a token", "model/config.py::ModelConfig.kv_bytes_per_token",
        "vllm/v1/kv_cache_interface.py::AttentionSpec.real_page_size_bytes",
        _SRT + "mem_cache/memory_pool.py::MHATokenToKVPool",
        "The formula of chapter 03. vLLM asks each layer for its own, since layers may keep windows, states or "
        "latents."),
    Row(4, "one ragged batch", "model/batch.py::ForwardBatch", _W + "input_batch.py::InputBatch",
        _SRT + "model_executor/forward_batch_info.py::ForwardBatch",
        "`query_start_loc` and `seq_lens` in vLLM and here; `extend_start_loc` and `extend_seq_lens` in SGLang, "
        "whose `ForwardMode` says whether a batch has prompts, decoding rows or both."),
    Row(5, "the rule that schedules everything", "engine/scheduler.py::Scheduler.schedule",
        _S + "sched/scheduler.py::Scheduler.schedule",
        _SRT + "managers/scheduler.py::Scheduler.get_next_batch_to_run",
        "vLLM and we: running requests first, then waiting ones, inside one budget. SGLang tries to make a batch "
        "of prompts first and decodes when there is none."),
    Row(5, "a request and its states", "engine/request.py::Request", "vllm/v1/request.py::Request",
        _SRT + "managers/schedule_batch.py::Req",
        "Ours has four states. vLLM adds waiting for a grammar, for remote keys and values and for more input, "
        "and six ways of being finished."),
    Row(5, "when a request ends", "engine/request.py::Request.append", _S + "sched/utils.py::check_stop",
        _SRT + "managers/schedule_batch.py::Req.update_finish_state",
        "Stop token, then length; stop strings are found where text is made. vLLM can also end a request that "
        "repeats itself."),
    Row(6, "the pool of blocks", "kv_cache/block_pool.py::BlockPool", _S + "block_pool.py::BlockPool",
        _SRT + "mem_cache/allocator/paged.py::PagedTokenToKVPoolAllocator",
        "Ids, reference counts, a null block and one queue of free blocks; empty blocks are reused before cached "
        "ones. SGLang hands out token slots or pages and counts references in its tree."),
    Row(6, "slots for a step", "kv_cache/manager.py::KVCacheManager.allocate_slots",
        _S + "kv_cache_manager.py::KVCacheManager.allocate_slots",
        _SRT + "mem_cache/allocation.py::alloc_for_extend",
        "vLLM's has a group for each kind of layer, room for draft tokens, and a watermark that keeps blocks free "
        "when it admits. Ours takes the last block."),
    Row(6, "preemption", "engine/scheduler.py::Scheduler.preempt",
        _S + "sched/scheduler.py::Scheduler._preempt_request",
        _SRT + "managers/schedule_batch.py::ScheduleBatch.retract_decode",
        "Free the blocks, set the computed tokens to 0, back to the front of the queue. Only ours can also swap; "
        "vLLM has to mark tokens of steps in flight as stale."),
    Row(7, "a hash chain over full blocks", "kv_cache/prefix.py::hash_block",
        _S + "kv_cache_utils.py::hash_block_tokens", _SRT + "mem_cache/radix_cache.py::RadixKey",
        "Parent's hash, tokens, and what else the keys depend on (adapter, image, salt). SGLang keeps the tokens "
        "themselves, on the edges of a tree."),
    Row(7, "the longest cached prefix", "kv_cache/manager.py::KVCacheManager.get_computed_blocks",
        _S + "kv_cache_manager.py::KVCacheManager.get_computed_blocks",
        _SRT + "mem_cache/radix_cache.py::RadixCache.match_prefix",
        "All three leave the last token to be computed, because its logits are wanted. With several groups of "
        "layers vLLM looks for the longest prefix that all of them hold."),
    Row(7, "who is evicted", "kv_cache/block_pool.py::BlockPool.free", _S + "block_pool.py::BlockPool.free_blocks",
        _SRT + "mem_cache/radix_cache.py::RadixCache.evict",
        "Least recently used, tails before heads. A queue does it in vLLM and here; SGLang takes leaves of the "
        "tree by a strategy that can be chosen."),
    Row(8, "a budget of tokens for each step", "engine/scheduler.py::Scheduler._num_new_tokens",
        _S + "sched/scheduler.py::Scheduler.max_num_scheduled_tokens",
        _SRT + "managers/schedule_policy.py::PrefillAdder",
        "The same budget. vLLM may cap a single prompt below it; SGLang takes off what decoding rows need and "
        "rounds chunks down to pages."),
    Row(9, "the waiting queue", "engine/policies.py::ByKey", _S + "sched/request_queue.py::PriorityRequestQueue",
        _SRT + "managers/schedule_policy.py::SchedulePolicy",
        "vLLM has first come, first served and priorities. SGLang has longest prefix, longest output and others. "
        "Neither shares fairly between users."),
    Row(10, "residual and norm in one kernel", "kernels/norm.py::add_rms_norm",
        _L + "layernorm.py::RMSNorm.forward_cuda", _SRT + "layers/layernorm.py::RMSNorm.forward_cuda",
        "The same fusion, in CUDA. vLLM can also leave it to its compiler, which fuses quantization into it."),
    Row(11, "a matrix product in tiles", "kernels/matmul.py::matmul_kernel",
        "vllm/model_executor/determinism/batch_invariant.py::matmul_kernel_persistent",
        _SRT + "batch_invariant_ops/batch_invariant_ops.py::matmul_kernel_persistent",
        "All three leave dense products to the vendor's library. Theirs take over where a row may not depend on "
        "its batch: one program for each SM walks over tiles, and no split-K."),
    Row(12, "online softmax over tiles", "kernels/flash_attention.py::flash_attention_kernel",
        "vllm/v1/attention/ops/triton_unified_attention.py::kernel_unified_attention",
        _OPS + "attention/extend_attention.py::_fwd_kernel",
        "The same loop. vLLM packs all query heads of a group into a tile, and one kernel serves prefill and "
        "decode."),
    Row(13, "split keys, then merge", "kernels/paged_decode.py::paged_decode_kernel",
        "vllm/v1/attention/ops/triton_unified_attention.py::reduce_segments",
        _OPS + "attention/decode_attention.py::_fwd_kernel_stage2",
        "The merge of chapter 13. vLLM splits where the grid would be too small; SGLang's kernel chooses a number "
        "of splits for each sequence."),
    Row(13, "token to slot", "kernels/rotary.py::rotate_and_store",
        _W + "block_table.py::BlockTables.compute_slot_mappings", _SRT + "mem_cache/memory_pool.py::ReqToTokenPool",
        "vLLM computes slots on the GPU from the block table, and stores with a kernel of its own; ours stores "
        "where it rotates. SGLang's table holds a slot for each token."),
    Row(14, "recorded steps", "engine/graphs.py::DecodeGraphs", _W + "cudagraph_utils.py::CudaGraphManager",
        _SRT + "model_executor/runner/decode_cuda_graph_runner.py::DecodeCudaGraphRunner",
        "Buckets of padded rows, recorded once. vLLM also records pieces between attention calls, which serve "
        "steps with prompts."),
    Row(14, "schedule the next step while one runs", "engine/scheduler.py::Scheduler.advance",
        _S + "sched/async_scheduler.py::AsyncScheduler._update_after_schedule",
        _SRT + "managers/scheduler.py::Scheduler.event_loop_overlap",
        "vLLM's `num_output_placeholders` is our `num_in_flight`. SGLang has two event loops, one below the "
        "other."),
    Row(15, "weights in 4 bits", "kernels/quantized_matmul.py::few_rows_kernel",
        _L + "quantization/awq_triton.py::awq_gemm_kernel",
        _OPS + "quantization/awq_triton.py::awq_dequantize_kernel",
        "Unpack in registers, scale, multiply. On NVIDIA both prefer Marlin, in CUDA; this kernel is the readable "
        "one."),
    Row(16, "activations in 8 bits, a scale for each token", "quantization/activations.py::quantize_activations",
        _L + "quantization/utils/int8_utils.py::per_token_quant_int8",
        _OPS + "quantization/int8_kernel.py::per_token_quant_int8",
        "A program for each row: largest magnitude over 127. Calibration (GPTQ, AWQ, SmoothQuant) is no part of "
        "either server; other tools write the checkpoints."),
    Row(17, "windows give blocks back", "kv_cache/window.py::Window.outside",
        _S + "single_type_kv_cache_manager.py::SlidingWindowManager",
        _SRT + "mem_cache/allocator/swa.py::SWATokenToKVPoolAllocator",
        "In all three, blocks that no query reaches any more are freed. vLLM keeps a manager for each kind of "
        "layer, so a hybrid model frees in some layers only."),
    Row(17, "a tier in host memory", "kv_cache/tiers.py::Tiers",
        "vllm/v1/kv_offload/cpu/manager.py::CPUOffloadingManager",
        _SRT + "managers/cache_controller.py::HiCacheController",
        "Blocks by their hash. vLLM can wait until a block is asked for a second time before it keeps it; "
        "SGLang's tree knows on which tier each node is."),
    Row(17, "keys and values in 8 bits", "kv_cache/quantized.py::quantize_vectors",
        "vllm/v1/kv_cache_interface.py::KVQuantMode", _SRT + "layers/quantization/kv_cache.py::BaseKVCacheMethod",
        "Ours is vLLM's `INT8_PER_TOKEN_HEAD`: a scale for each token and head. SGLang's fp8 has a scale for each "
        "layer."),
    Row(18, "accept, or draw from the rest", "speculative/rejection.py::accept",
        "vllm/v1/sample/rejection_sampler.py::rejection_random_sample_kernel",
        _SRT + "speculative/eagle_info.py::EagleVerifyInput",
        "The rule of chapter 18. SGLang verifies a tree of draft tokens in one kernel; vLLM's kernel walks one "
        "chain for each request."),
    Row(18, "a draft from the text itself", "speculative/ngram.py::NgramIndex",
        "vllm/v1/spec_decode/ngram_proposer.py::NgramProposer.propose",
        _SRT + "speculative/ngram_worker.py::NGRAMWorker",
        "vLLM searches the reversed text with the prefix function of Knuth, Morris and Pratt; ours keeps an "
        "index. SGLang keeps one for all requests."),
    Row(19, "illegal tokens masked", "sampling/grammar/mask.py",
        "vllm/v1/structured_output/__init__.py::StructuredOutputManager.grammar_bitmask",
        _SRT + "constrained/xgrammar_backend.py::XGrammarGrammar",
        "Both let a library (xgrammar by default) fill a bit for each token. vLLM fills masks while the GPU "
        "computes the logits: look at `EngineCore.step`."),
    Row(20, "rows of a matrix on many devices", "parallel/layers.py::RowParallelLinear",
        _L + "linear.py::RowParallelLinear", _SRT + "layers/linear.py::RowParallelLinear",
        "Bias on one rank, then an all-reduce. vLLM and SGLang choose among several all-reduce kernels by size."),
    Row(21, "rows sorted by expert", "kernels/grouped_matmul.py::sort_by_expert",
        _L + "fused_moe/moe_align_block_size.py::moe_align_block_size",
        _SRT + "layers/moe/moe_runner/triton_utils/moe_align_block_size.py::moe_align_block_size",
        "They pad each expert's rows to whole tiles and store the expert of each tile; our kernel finds it by "
        "counting."),
    Row(21, "one grouped product", "kernels/grouped_matmul.py::grouped_matmul_kernel",
        _L + "fused_moe/fused_moe.py::fused_moe_kernel", _OPS + "moe/fused_moe_triton_kernels.py::fused_moe_kernel",
        "The same kernel with more formats. Tuned tile sizes are stored in a folder of JSON files, by shape and "
        "GPU."),
    Row(21, "copies of hot experts", "parallel/placement.py::place_experts",
        "vllm/distributed/eplb/policy/default.py::DefaultEplbPolicy",
        _SRT + "eplb/eplb_algorithms/deepseek.py::rebalance_experts",
        "Replicate, then pack, after DeepSeek. vLLM also tries to move as few weights as possible."),
    Row(22, "which replica takes a request", "engine/routing.py::PrefixAware",
        "vllm/v1/engine/core_client.py::DPLBAsyncMPClient",
        _SRT + "managers/data_parallel_controller.py::DataParallelController",
        "vLLM's own balancer compares queue lengths of data-parallel engines; SGLang's, too. Routers that know "
        "prefixes are programs of their own in both projects."),
    Row(22, "keys and values handed over", "kv_cache/connector.py::KVConnector",
        "vllm/distributed/kv_transfer/kv_connector/v1/base.py::KVConnectorBase_V1",
        _SRT + "disaggregation/prefill.py::PrefillBootstrapQueue",
        "vLLM has one interface with a half in the scheduler and a half in the worker; SGLang has event loops for "
        "prefill and for decode replicas."),
    Row(23, "from an event loop to an engine", "engine/async_llm.py::AsyncLLM.generate",
        "vllm/v1/engine/async_llm.py::AsyncLLM.generate",
        _SRT + "managers/tokenizer_manager.py::TokenizerManager.generate_request",
        "Theirs is a process and not a thread: messages are serialised, and Python's lock of one does not stop "
        "the other."),
    Row(23, "one client leaves", "engine/stream.py::Stream.abort",
        "vllm/entrypoints/serve/utils/api_utils.py::with_cancellation",
        _SRT + "managers/tokenizer_manager.py::TokenizerManager.abort_request",
        "The waiting task is cancelled, the request is aborted, and its blocks are free again."),
    Row(23, "many adapters in a batch", "kernels/lora.py::shrink_kernel",
        "vllm/lora/ops/triton_ops/lora_shrink_op.py::_lora_shrink_kernel",
        _OPS + "lora/dense/sgemm_lora_a.py::_sgemm_lora_a_kernel",
        "Tokens sorted by adapter, then a grouped product; the same shape as experts."),
    Row(24, "an open loop", "bench/load/arrivals.py::arrival_times", "vllm/benchmarks/serve.py::get_request",
        "python/sglang/benchmark/serving.py::get_request",
        "Gamma gaps with a burstiness in vLLM, exponential ones in SGLang. Both can hold back requests behind a "
        "semaphore, which closes the loop again."),
    Row(24, "goodput", "engine/metrics.py::goodput", "vllm/benchmarks/serve.py::calculate_metrics",
        "python/sglang/benchmark/goodput.py::calculate_goodput",
        "Requests a second that met every target, in all three."),
    Row(25, "an image, encoded once", "", _S + "encoder_cache_manager.py::EncoderCacheManager",
        _SRT + "mem_cache/multimodal_cache.py::MultiModalStaticCache",
        "A cache by content hash, with a budget of its own. minillm reads text only; the toy of this chapter is "
        "all that it has."),
    Row(25, "an image is known by its content", "", "vllm/multimodal/hasher.py::MultiModalHasher",
        _SRT + "managers/schedule_batch.py::MultimodalDataItem.set_pad_value",
        "vLLM adds the hash to the hashes of the blocks that the image fills; SGLang puts a number made of it in the "
        "place of the tokens."),
    Row(25, "an encoder budget in the step", "", _S + "sched/scheduler.py::Scheduler._try_schedule_encoder_inputs",
        _SRT + "managers/mm_utils.py::embed_mm_inputs",
        "vLLM cuts the chunk just before an image that it cannot encode; SGLang embeds the images of a prefill "
        "batch, and may leave the encoder to other replicas."),
]
# fmt: on

# What one request passes through, in order: our file, vLLM's, and what it does there. The figure of the chapter.
PATH = [
    ("ask", "engine/llm.py::LLM.generate", "vllm/entrypoints/llm.py::LLM.generate"),
    ("check and tokenize", "engine/inputs.py::InputProcessor", "vllm/v1/engine/input_processor.py::InputProcessor"),
    ("step", "engine/engine.py::Engine.step", "vllm/v1/engine/core.py::EngineCore.step"),
    ("schedule", "engine/scheduler.py::Scheduler.schedule", _S + "sched/scheduler.py::Scheduler.schedule"),
    ("blocks", "kv_cache/manager.py::KVCacheManager", _S + "kv_cache_manager.py::KVCacheManager"),
    ("batch", "engine/runner.py::ModelRunner.build_batch", _W + "model_runner.py::GPUModelRunner.prepare_inputs"),
    ("layers", "model/decoder_layer.py::DecoderLayer.forward",
     "vllm/model_executor/models/llama.py::LlamaDecoderLayer.forward"),
    ("attend", "kernels/paged_decode.py::paged_decode_kernel",
     "vllm/v1/attention/ops/triton_unified_attention.py::kernel_unified_attention"),
    ("sample", "sampling/sampler.py::Sampler.sample", _W + "sample/sampler.py::Sampler.sample"),
    ("take the token", "engine/scheduler.py::Scheduler.update",
     _S + "sched/scheduler.py::Scheduler.update_from_output"),
    ("text", "engine/output_processor.py::OutputProcessor", "vllm/v1/engine/output_processor.py::OutputProcessor"),
]  # fmt: skip


def cited(project: str) -> Iterator[str]:
    """Every reference to "vllm" or "sglang" in the guide, and in the reading of vLLM's scheduler."""
    yield from (reference for row in ROWS if (reference := getattr(row, project)))
    if project == "vllm":
        yield from (reference for _, _, reference in PATH)
        yield SCHEDULER


def ours() -> Iterator[str]:
    """Every reference to a file of minillm, without the package's name."""
    yield from (row.ours for row in ROWS if row.ours)
    yield from (reference for _, reference, _ in PATH)
