"""Fields of release 0.28 that no part of this engine stands behind.

They may be given, so that code written for that release runs; it is said once that they
have no effect. Any other unknown field is refused.
"""

_NAMES = {
    "AttentionConfig": """
        flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size
        flex_attn_q_block_size indexer_kv_dtype minimax_m3_msa_decode_backend
        use_fp4_indexer_cache
    """,
    "ModelConfig": """
        allow_deprecated_quantization allowed_local_media_path allowed_media_domains
        code_revision config_format enable_cumem_allocator enable_mm_embeds
        enable_prompt_embeds enable_return_routed_experts enable_sleep_mode hf_token
        interleave_mm_strings io_processor_plugin language_model_only
        limit_mm_per_prompt media_io_kwargs mm_device_do_normalize
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
        mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb
        mm_processor_cache_gb mm_processor_cache_type mm_processor_device
        mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc
        model_class_overrides multimodal_config pooler_config quantization_config
        renderer_num_workers return_sampling_mask skip_mm_profiling sleep_mode_backend
        spec_target_max_model_len use_fp64_gumbel video_pruning_method
        video_pruning_rate
    """,
    "ParallelConfig": """
        _api_process_count _api_process_rank _coord_store_port
        _data_parallel_master_port_list all2all_backend assigned_physical_gpu_ids
        cpu_distributed_timeout_seconds data_parallel_external_lb
        data_parallel_hybrid_lb dbo_decode_token_threshold dcp_comm_backend
        disable_nccl_for_dp_synchronization enable_dbo enable_elastic_ep
        enable_ep_weight_filter enable_eplb enable_fault_tolerance eplb_config
        expert_placement_strategy fault_tolerance_config is_moe_model numa_bind
        numa_bind_cpus numa_bind_nodes placement_group ray_runtime_env
        ray_workers_use_nsight sd_worker_cls ubatch_size
    """,
    "VllmConfig": """
        diffusion_config ec_manager_config kernel_config mamba_config offload_config
        optimization_level performance_mode profiler_config reasoning_config
        shutdown_timeout weight_transfer_config
    """,
}

#: Names of such fields by config class.
ACCEPTED: dict[str, frozenset[str]] = {
    owner: frozenset(names.split()) for owner, names in _NAMES.items()
}
