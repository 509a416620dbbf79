"""Keywords of vLLM's `LLM` and `EngineArgs` that the book does not build, each with what comes nearest.
Built in chapter 04."""

from __future__ import annotations

from minillm.sampling.checks import Absent

# Why -> the names, each with vLLM's default behind a colon where that is neither None nor False.
_GROUPS = {
    "the book serves text": """
        allowed_local_media_path: allowed_media_domains mm_processor_kwargs language_model_only limit_mm_per_prompt
        enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_cache_gb mm_processor_cache_type
        mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
        skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
        mm_device_do_normalize disable_chunked_mm_input enable_mm_processor_stats ec_transfer_config ec_manager_config
        task""",
    "give a checkpoint that is what you want to serve: no code of a model is run, and no configuration overridden": """
        trust_remote_code hf_overrides hf_config_path model_class_overrides model_impl:auto config_format:auto
        allow_deprecated_quantization code_revision tokenizer_mode:auto skip_tokenizer_init model_weights: hf_token""",
    "download the revision and give its folder as model": """
        revision tokenizer_revision download_dir""",
    "safetensors and GGUF are read as they lie; sleep(2) and wake_up() load the weights again": """
        safetensors_load_strategy:lazy safetensors_prefetch_num_threads safetensors_prefetch_block_size
        model_loader_extra_config ignore_patterns use_tqdm_on_load:True pt_load_map_location:cpu
        max_parallel_loading_workers weight_transfer_config""",
    "tensor_parallel_size= and pipeline_parallel_size= start the workers: on this machine, or on a Ray cluster": """
        master_addr:127.0.0.1 master_port:29501 nnodes:1 node_rank:0
        distributed_timeout_seconds cpu_distributed_timeout_seconds device_ids disable_custom_all_reduce
        worker_cls:auto worker_extension_cls: ray_workers_use_nsight numa_bind numa_bind_nodes numa_bind_cpus
        enable_shm_tensor_arena enable_fault_tolerance fault_tolerance_config enable_nccl_comm_suspend
        fully_sharded_loras enable_batch_sharded_sampling""",
    "make several LLMs, and give each its share of the prompts": """
        data_parallel_size:1 data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb
        data_parallel_backend:mp api_server_count""",
    "context parallelism is not built": """
        prefill_context_parallel_size:1 decode_context_parallel_size:1 dcp_comm_backend dcp_q_replicate
        dcp_kv_cache_interleave_size:1 cp_kv_cache_interleave_size enable_hc_sp""",
    "experts are spread evenly over the tensor-parallel ranks (enable_expert_parallel)": """
        enable_ep_weight_filter moe_backend:auto all2all_backend enable_elastic_ep
        elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
        dp_sync_interval disable_nccl_for_dp_synchronization eplb_config enable_eplb
        expert_placement_strategy:linear enable_return_routed_experts""",
    "adapters are those of a text decoder's layers, in the dtype of the model": """
        default_mm_loras lora_dtype:auto lora_target_modules enable_tower_connector_lora specialize_active_lora
        enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels""",
    "quantization= takes a name or a dictionary of minillm.quantization.config": """
        quantization_config quantization_param_path""",
    "attention_backend= chooses between torch, native and triton": """
        attention_config disable_sliding_window disable_cascade_attn kernel_config linear_backend:auto
        sparse_indexer_topk_backend enable_flashinfer_autotune ir_op_priority kv_sharing_fast_prefill""",
    "steps are recorded as CUDA graphs on a GPU; enforce_eager=True does without": """
        compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode
        max_seq_len_to_capture cuda_graph_sizes""",
    "there is one kind of KV cache for all layers; kv_cache_dtype and block_size shape it": """
        kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode
        enable_mamba_shared_prefix_checkpoint mamba_config mamba_backend mamba_ssu_algorithm
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds replayssm_buffer_len use_replayssm
        gdn_prefill_backend kda_prefill_backend kda_decode_backend disable_hybrid_kv_cache_manager
        swa_bounded_replay calculate_kv_scales engram_config""",
    "num_kv_blocks= or gpu_memory_utilization= sizes the KV cache": """
        kv_cache_memory_bytes enable_cumem_allocator""",
    "blocks are named by one hash, each as soon as it is full": """
        prefix_caching_hash_algo:sha256 prefix_cache_retention_interval prefix_match_unit""",
    "cpu_offload_gb= streams the last layers' weights": """
        offload_backend:auto cpu_offload_params offload_group_size:0 offload_num_in_group:1 offload_prefetch_step:1
        offload_params""",
    "kv_offloading_size= and disk_kv_path= keep blocks beyond the device": """
        kv_offloading_backend kv_transfer_config kv_events_config""",
    "max_num_seqs= and max_num_batched_tokens= bound a step, and every request waits its turn": """
        max_num_scheduled_tokens long_prefill_token_threshold:0 long_prefill_token_threshold_adaptive
        max_num_active_seqs max_num_queued_reqs max_num_queued_tokens max_num_partial_prefills:1
        max_long_partial_prefills:1 scheduler_reserve_full_isl:True prefill_schedule_interval watermark
        num_scheduler_steps:1 multi_step_stream_outputs""",
    "hand a scheduler of your own to minillm.engine.engine.Engine, and set llm.engine": """
        scheduler_cls""",
    "give functions to each request: SamplingParams(logits_processors=[...])": """
        logits_processors logits_processor_pattern""",
    "log-probabilities are of the raw logits, as many as are asked for": """
        logprobs_mode:raw_logprobs use_fp64_gumbel return_sampling_mask enable_trace_replay""",
    "regex and choice use the book's automaton, everything else uses llguidance": """
        structured_outputs_config guided_decoding_backend:auto reasoning_parser: reasoning_parser_plugin
        reasoning_config""",
    "the book builds no watermarks, no diffusion, no plugins and no prompt embeddings": """
        watermark_config diffusion_config io_processor_plugin additional_config aux_output_config
        enable_prompt_embeds""",
    "start_profile() and stop_profile() write a trace, get_metrics() counts, and each output has its metrics": """
        otlp_traces_endpoint collect_detailed_traces show_hidden_metrics_for_version
        per_request_spec_decode_metrics:none kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets
        cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details
        jit_monitor_mode:warn jit_monitor_verbose aggregate_engine_logging logging_config log_level log_config_file
        enable_log_requests""",
    "a server has names and limits, an LLM has none": """
        served_model_name tokens_only shutdown_timeout:0 fail_on_environ_validation renderer_num_workers:1
        stream_interval:1""",
    "sleep() and wake_up() need no preparation": """
        sleep_mode_offload_cudagraph sleep_preserve_parameter_names""",
}


def _parsed() -> dict[str, Absent]:
    found = {}
    for why, names in _GROUPS.items():
        for entry in names.split():
            name, colon, default = entry.partition(":")
            found[name] = Absent(why, _value(default) if colon else None)
    return found


def _value(text: str) -> str | int | bool:
    return int(text) if text.isdigit() else {"True": True}.get(text, text)


KEYWORDS = _parsed()
POOLER = {
    "tok_pooling_type": Absent("token_embed gives the vector of every token", "ALL"),
    "dimensions": Absent("give them with each text: PoolingParams(dimensions=...)"),
    "enable_chunked_processing": Absent("a long text is computed in chunks, up to max_model_len", False),
    "max_embed_len": Absent("max_model_len bounds the texts"),
}
PROFILER = {
    name: Absent("start_profile() and stop_profile() record the engine's steps, and nothing else", default)
    for name, default in {
        "torch_profiler_with_stack": True, "torch_profiler_with_flops": False, "torch_profiler_use_gzip": True,
        "torch_profiler_dump_cuda_time_total": True, "torch_profiler_record_shapes": False,
        "torch_profiler_with_memory": False, "ignore_frontend": False,
    }.items()
} | dict.fromkeys(
    ("delay_iterations", "max_iterations", "warmup_iterations", "active_iterations", "wait_iterations"),
    Absent("step yourself between start_profile() and stop_profile()", 0),
)  # fmt: skip
