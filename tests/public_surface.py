"""Names, parameters and fields that code written for release 0.28 relies on.

Typed from the interface of that release, not taken from this package. Left out: parts
that are not built in, and what belongs to hits within a block (`retention_interval`,
`reachable_block_mask`, block copies).
"""


def _table(text: str) -> dict[str, tuple[str, ...]]:
    """Rows `key: word word …`; an indented line goes on with the row above."""
    rows: dict[str, tuple[str, ...]] = {}
    key = ""
    for line in text.strip("\n").splitlines():
        if not line.startswith(" "):
            key, _, line = line.partition(": ")
            key = key.removesuffix(":")
            rows[key] = ()
        rows[key] += tuple(line.split())
    return rows


# What each module offers.
NAMES = _table("""
vllm: SamplingParams
vllm.config: AttentionConfig CacheConfig DeviceConfig ECTransferConfig
    KVTransferConfig ModelConfig ParallelConfig SchedulerConfig SpeculativeConfig
    VllmConfig
vllm.config.attention: AttentionConfig
vllm.config.cache: CacheConfig
vllm.config.device: DeviceConfig
vllm.config.kv_events: KVEventsConfig
vllm.config.model: ModelConfig
vllm.config.parallel: ParallelConfig
vllm.config.scheduler: SchedulerConfig
vllm.config.vllm: VllmConfig
vllm.distributed.kv_events: AllBlocksCleared BlockRemoved BlockStored KVCacheEvent
    MEDIUM_GPU
vllm.distributed.kv_transfer.kv_connector.factory: KVConnectorFactory
vllm.distributed.kv_transfer.kv_connector.utils: KVOutputAggregator EngineTransferInfo
    TransferTopology get_current_attn_backend
vllm.distributed.kv_transfer.kv_connector.v1.base: KVConnectorBase_V1
    KVConnectorHandshakeMetadata KVConnectorMetadata KVConnectorRole
    KVConnectorTransferResults KVConnectorWorkerMetadata CopyBlocksOp SupportsHMA
    supports_hma
vllm.distributed.kv_transfer.kv_connector.v1.example_connector: ExampleConnector
vllm.distributed.kv_transfer.kv_connector.v1.metrics: KVConnectorLogging
    KVConnectorPromMetrics KVConnectorStats
vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler: NixlConnectorScheduler
vllm.lora.request: LoRARequest
vllm.model_executor.layers.attention.attention: Attention
vllm.model_executor.layers.attention.mla_attention: MLACommonMetadata
    MLACommonMetadataBuilder
vllm.model_executor.layers.quantization.turboquant.centroids: get_centroids
    solve_lloyd_max
vllm.model_executor.layers.quantization.turboquant.config: TQ_PRESETS TurboQuantConfig
    _get_full_attention_layer_indices
vllm.multimodal.inputs: MultiModalFeatureSpec MultiModalKwargsItem PlaceholderRange
vllm.platforms: current_platform
vllm.platforms.interface: DeviceCapability Platform
vllm.pooling_params: PoolingParams
vllm.sampling_params: RepetitionDetectionParams SamplingParams StructuredOutputsParams
vllm.utils.hashing: get_hash_fn_by_name sha256 sha256_cbor
vllm.utils.math_utils: cdiv
vllm.utils.mem_constants: GiB_bytes
vllm.utils.torch_utils: make_tensor_with_pad
vllm.v1.attention.backend: AttentionBackend AttentionCGSupport AttentionImpl
    AttentionMetadataBuilder AttentionType CommonAttentionMetadata
vllm.v1.attention.backends.cpu_attn: CPUAttentionBackendImpl
    CPUAttentionMetadataBuilder
vllm.v1.attention.backends.flashinfer: FlashInferBackend
vllm.v1.attention.backends.registry: AttentionBackendEnum MambaAttentionBackendEnum
    register_backend
vllm.v1.attention.backends.triton_attn: TritonAttentionBackend
vllm.v1.attention.backends.turboquant_attn: TurboQuantAttentionBackend
vllm.v1.attention.backends.utils: PAD_SLOT_ID PerLayerParameters
    get_dcp_local_seq_lens make_local_attention_virtual_batches
    reorder_batch_to_split_decodes_and_prefills set_kv_cache_layout
    split_decodes_and_prefills
vllm.v1.attention.selector: _cached_get_attn_backend get_attn_backend
    get_attn_spec_kind
vllm.v1.core.block_pool: BlockHashToBlockMap BlockPool
vllm.v1.core.kv_cache_coordinator: HybridKVCacheCoordinator KVCacheCoordinator
vllm.v1.core.kv_cache_manager: KVCacheBlocks KVCacheManager Request
vllm.v1.core.kv_cache_metrics: BlockMetricsState KVCacheMetricsCollector
vllm.v1.core.kv_cache_utils: BlockHash BlockHashListWithBlockSize BlockHashWithGroupId
    FreeKVCacheBlockQueue KVCacheBlock KVCacheBlockCopy _get_kv_cache_config_packed
    _get_kv_cache_groups_uniform_groups _get_packed_kv_cache_layout
    _use_packed_kv_cache_config estimate_max_model_len generate_block_hash_extra_keys
    generate_scheduler_kv_cache_config get_block_hash get_group_id
    get_kv_cache_capacity get_kv_cache_config_from_groups get_kv_cache_configs
    get_kv_cache_groups get_max_concurrency_for_kv_cache_config
    get_request_block_hasher group_and_unify_kv_cache_specs hash_block_tokens
    init_none_hash is_kv_cache_spec_uniform make_block_hash_with_group_id tensor_data
vllm.v1.core.sched.async_scheduler: AsyncScheduler
vllm.v1.core.sched.interface: SchedulerInterface
vllm.v1.core.sched.output: CachedRequestData NewRequestData SchedulerOutput
vllm.v1.core.sched.scheduler: Scheduler SchedulerOutput
vllm.v1.core.sched.utils: check_sequence_repetition check_stop
vllm.v1.core.single_type_kv_cache_manager: ChunkedLocalAttentionManager
    CrossAttentionManager FullAttentionManager MambaManager RSWAManager
    SingleTypeKVCacheManager SinkFullAttentionManager SlidingWindowManager
    register_all_kvcache_specs
vllm.v1.engine: FinishReason
vllm.v1.kv_cache_interface: AttentionSpec ChunkedLocalAttentionSpec CrossAttentionSpec
    FullAttentionSpec HiddenStateCacheSpec KVCacheConfig KVCacheGroupSpec KVCacheSpec
    KVCacheSpecKind KVCacheTensor KVQuantMode MLAAttentionSpec MambaSpec RSWASpec
    SinkFullAttentionSpec SlidingWindowMLASpec SlidingWindowSpec
    UniformTypeKVCacheSpecs get_kv_cache_spec_kind get_kv_cache_spec_sliding_window
vllm.v1.kv_cache_spec_registry: KVCacheSpecRegistry _REGISTRY_KVCACHESPEC_LIST
    register_kv_cache_spec
vllm.v1.metrics.stats: BaseCacheStats CachingMetrics PrefixCacheStats
vllm.v1.outputs: DraftTokenIds ECConnectorOutput KVConnectorOutput ModelRunnerOutput
    make_empty_encoder_model_runner_output
vllm.v1.pool.metadata: PoolingMetadata
vllm.v1.request: Request RequestStatus
vllm.v1.sample.logits_processor: LogitsProcessors
vllm.v1.sample.logits_processor.state: LogitsProcessors
vllm.v1.sample.metadata: SamplingMetadata
vllm.v1.serial_utils: PydanticMsgspecMixin
vllm.v1.structured_output: StructuredOutputGrammar StructuredOutputManager
vllm.v1.structured_output.backend_types: StructuredOutputGrammar
vllm.v1.utils: ConstantList CpuGpuBuffer tensor_data
vllm.v1.worker: utils
vllm.v1.worker.block_table: BlockTable MultiGroupBlockTable
vllm.v1.worker.gpu.attn_utils: _reshape_kv_cache
vllm.v1.worker.gpu_input_batch: CachedRequestState InputBatch
vllm.v1.worker.utils: AttentionGroup KVBlockZeroer
    add_kv_sharing_layers_to_kv_cache_groups
""")

# Parameters in order, without self; class.method or function, by module.
PARAMETERS = {
    "vllm.utils.hashing": _table("""
get_hash_fn_by_name: hash_fn_name
sha256: input
sha256_cbor: input
"""),
    "vllm.v1.attention.selector": _table("""
_cached_get_attn_backend: backend attn_selector_config num_heads
get_attn_backend: head_size dtype kv_cache_dtype use_mla has_sink use_sparse
    use_mm_prefix use_per_head_quant_scales attn_type num_heads has_sliding_window
get_attn_spec_kind: use_mla has_sliding_window attn_type
"""),
    "vllm.v1.core.block_pool": _table("""
BlockHashToBlockMap:
BlockHashToBlockMap.get_one_block: key
BlockHashToBlockMap.insert: key block
BlockHashToBlockMap.pop: key block_id
BlockPool: num_gpu_blocks enable_caching hash_block_size enable_kv_cache_events
    metrics_collector
BlockPool._maybe_evict_cached_block: block
BlockPool.cache_full_blocks: request blocks num_cached_blocks num_full_blocks
    block_size kv_cache_group_id block_mask
BlockPool.evict_blocks: block_ids
BlockPool.free_blocks: ordered_blocks
BlockPool.get_cached_block: block_hash kv_cache_group_ids
BlockPool.get_new_blocks: num_blocks
BlockPool.get_num_free_blocks:
BlockPool.reset_prefix_cache:
BlockPool.take_events:
"""),
    "vllm.v1.core.kv_cache_coordinator": _table("""
HybridKVCacheCoordinator: kv_cache_config max_model_len max_in_flight_tokens use_eagle
    enable_caching enable_kv_cache_events dcp_world_size pcp_world_size
    scheduler_block_size hash_block_size metrics_collector num_prefill_lookahead
HybridKVCacheCoordinator.cache_blocks: request num_computed_tokens
HybridKVCacheCoordinator.find_longest_cache_hit: block_hashes max_cache_hit_length
HybridKVCacheCoordinator.find_longest_cache_hit_per_group: block_hashes
    max_cache_hit_length
KVCacheCoordinator: kv_cache_config max_model_len max_in_flight_tokens use_eagle
    enable_caching enable_kv_cache_events dcp_world_size pcp_world_size
    scheduler_block_size hash_block_size metrics_collector num_prefill_lookahead
KVCacheCoordinator.allocate_new_blocks: request_id num_tokens num_tokens_main_model
    num_encoder_tokens
KVCacheCoordinator.cache_blocks: request num_computed_tokens
KVCacheCoordinator.find_longest_cache_hit: block_hashes max_cache_hit_length
KVCacheCoordinator.free: request_id
KVCacheCoordinator.get_blocks: request_id
KVCacheCoordinator.get_num_blocks_to_allocate: request_id num_tokens
    new_computed_blocks num_encoder_tokens total_computed_tokens
    num_local_computed_tokens num_tokens_main_model apply_admission_cap
KVCacheCoordinator.new_step_starts:
KVCacheCoordinator.pop_blocks_for_free: request_id
KVCacheCoordinator.remove_skipped_blocks: request_id processed_computed_tokens
    num_prompt_tokens
"""),
    "vllm.v1.core.kv_cache_manager": _table("""
KVCacheBlocks.get_block_ids: allow_none
KVCacheManager: kv_cache_config max_model_len scheduler_block_size hash_block_size
    max_in_flight_tokens enable_caching use_eagle num_prefill_lookahead log_stats
    enable_kv_cache_events dcp_world_size pcp_world_size metrics_collector watermark
KVCacheManager.allocate_slots: request num_new_tokens num_new_computed_tokens
    new_computed_blocks num_lookahead_tokens num_external_computed_tokens
    delay_cache_blocks num_encoder_tokens full_sequence_must_fit reserved_blocks
    has_scheduled_reqs
KVCacheManager.cache_blocks: request num_computed_tokens
KVCacheManager.create_kv_cache_blocks: blocks
KVCacheManager.estimate_cached_tokens: request
KVCacheManager.evict_blocks: block_ids
KVCacheManager.free: request
KVCacheManager.get_block_ids: request_id
KVCacheManager.get_blocks: request_id
KVCacheManager.get_computed_blocks: request
KVCacheManager.new_step_starts:
KVCacheManager.pop_blocks_for_free: request
KVCacheManager.remove_skipped_blocks: request_id processed_computed_tokens
    num_prompt_tokens
KVCacheManager.reset_prefix_cache:
KVCacheManager.take_events:
KVCacheManager.take_new_block_ids:
KVCacheManager.truncate_computed_blocks: blocks num_computed_tokens
"""),
    "vllm.v1.core.kv_cache_metrics": _table("""
BlockMetricsState:
BlockMetricsState.get_idle_time_seconds:
BlockMetricsState.get_lifetime_seconds:
BlockMetricsState.get_reuse_gaps_seconds:
BlockMetricsState.record_access:
KVCacheMetricsCollector: sample_rate
KVCacheMetricsCollector.drain_events:
KVCacheMetricsCollector.on_block_accessed: block
KVCacheMetricsCollector.on_block_allocated: block
KVCacheMetricsCollector.on_block_evicted: block
KVCacheMetricsCollector.reset:
KVCacheMetricsCollector.should_sample_block:
"""),
    "vllm.v1.core.kv_cache_utils": _table("""
BlockHashListWithBlockSize: block_hashes hash_block_size target_block_size
FreeKVCacheBlockQueue: blocks
FreeKVCacheBlockQueue.append: block
FreeKVCacheBlockQueue.append_n: blocks
FreeKVCacheBlockQueue.get_all_free_blocks:
FreeKVCacheBlockQueue.popleft:
FreeKVCacheBlockQueue.popleft_n: n
FreeKVCacheBlockQueue.prepend_n: blocks
FreeKVCacheBlockQueue.remove: block
KVCacheBlock.reset_hash:
KVCacheBlock.set_block_hash: block_hash num_tokens
_get_kv_cache_config_packed: vllm_config kv_cache_groups available_memory
_get_kv_cache_groups_uniform_groups: grouped_specs
_get_packed_kv_cache_layout: kv_cache_groups
_use_packed_kv_cache_config: vllm_config kv_cache_groups
estimate_max_model_len: vllm_config kv_cache_spec available_memory
generate_block_hash_extra_keys: request start_token_idx end_token_idx start_mm_idx
generate_scheduler_kv_cache_config: kv_cache_configs
get_block_hash: key
get_group_id: key
get_kv_cache_capacity: vllm_config kv_cache_config
get_kv_cache_config_from_groups: vllm_config kv_cache_groups available_memory
get_kv_cache_configs: vllm_config kv_cache_specs available_memory
get_kv_cache_groups: vllm_config kv_cache_spec
get_max_concurrency_for_kv_cache_config: vllm_config kv_cache_config
get_request_block_hasher: hash_block_size caching_hash_fn
group_and_unify_kv_cache_specs: kv_cache_spec
hash_block_tokens: hash_function parent_block_hash curr_block_token_ids extra_keys
init_none_hash: hash_fn
is_kv_cache_spec_uniform: kv_cache_spec
make_block_hash_with_group_id: block_hash group_id
"""),
    "vllm.v1.core.sched.interface": _table("""
SchedulerInterface: vllm_config kv_cache_config structured_output_manager block_size
    hash_block_size mm_registry include_finished_set log_stats
SchedulerInterface.add_request: request
SchedulerInterface.finish_requests: request_ids finished_status
SchedulerInterface.get_num_unfinished_requests:
SchedulerInterface.has_finished_requests:
SchedulerInterface.has_requests:
SchedulerInterface.make_stats:
SchedulerInterface.reset_prefix_cache: reset_running_requests reset_connector
SchedulerInterface.schedule: throttle_prefills
SchedulerInterface.update_draft_token_ids: draft_token_ids
SchedulerInterface.update_from_output: scheduler_output model_runner_output
"""),
    "vllm.v1.core.sched.output": _table("""
CachedRequestData.anon_repr:
CachedRequestData.make_empty:
NewRequestData.anon_repr:
SchedulerOutput.make_empty:
"""),
    "vllm.v1.core.sched.scheduler": _table("""
Scheduler: vllm_config kv_cache_config structured_output_manager block_size
    hash_block_size mm_registry include_finished_set log_stats
Scheduler._preempt_request: request timestamp drop_stale_output
Scheduler.add_request: request
Scheduler.finish_requests: request_ids finished_status
Scheduler.get_num_unfinished_requests:
Scheduler.has_finished_requests:
Scheduler.has_requests:
Scheduler.make_stats: spec_decoding_stats kv_connector_stats cudagraph_stats
    perf_stats
Scheduler.reset_connector_cache:
Scheduler.reset_prefix_cache: reset_running_requests reset_connector
Scheduler.schedule: throttle_prefills
Scheduler.update_draft_token_ids: draft_token_ids
Scheduler.update_from_output: scheduler_output model_runner_output
"""),
    "vllm.v1.core.sched.utils": _table("""
check_sequence_repetition: token_ids params
check_stop: request max_model_len
"""),
    "vllm.v1.core.single_type_kv_cache_manager": _table("""
ChunkedLocalAttentionManager: kv_cache_spec **kwargs
ChunkedLocalAttentionManager.find_longest_cache_hit: block_hashes max_length
    kv_cache_group_ids block_pool kv_cache_spec drop_eagle_block alignment_tokens
    dcp_world_size pcp_world_size
CrossAttentionManager.add_local_computed_blocks: request_id new_computed_blocks
    num_local_computed_tokens num_external_computed_tokens
CrossAttentionManager.cache_blocks: request num_tokens
CrossAttentionManager.find_longest_cache_hit: block_hashes max_length
    kv_cache_group_ids block_pool kv_cache_spec drop_eagle_block alignment_tokens
    dcp_world_size pcp_world_size
FullAttentionManager.cache_blocks: request num_tokens
FullAttentionManager.find_longest_cache_hit: block_hashes max_length
    kv_cache_group_ids block_pool kv_cache_spec drop_eagle_block alignment_tokens
    dcp_world_size pcp_world_size
MambaManager: kv_cache_spec block_pool **kwargs
MambaManager.allocate_new_blocks: request_id num_tokens num_tokens_main_model
MambaManager.cache_blocks: request num_tokens
MambaManager.find_longest_cache_hit: block_hashes max_length kv_cache_group_ids
    block_pool kv_cache_spec drop_eagle_block alignment_tokens dcp_world_size
    pcp_world_size
MambaManager.get_num_blocks_to_allocate: request_id num_tokens new_computed_blocks
    total_computed_tokens num_local_computed_tokens num_tokens_main_model
    apply_admission_cap
MambaManager.new_step_starts:
MambaManager.pop_blocks_for_free: request_id
MambaManager.remove_skipped_blocks: request_id processed_computed_tokens
    num_prompt_tokens
RSWAManager: kv_cache_spec **kwargs
RSWAManager.remove_skipped_blocks: request_id processed_computed_tokens
    num_prompt_tokens
SingleTypeKVCacheManager: kv_cache_spec block_pool enable_caching kv_cache_group_id
    scheduler_block_size dcp_world_size pcp_world_size needs_kv_cache_zeroing
    max_admission_blocks_per_request
SingleTypeKVCacheManager.add_local_computed_blocks: request_id new_computed_blocks
    num_local_computed_tokens num_external_computed_tokens
SingleTypeKVCacheManager.allocate_new_blocks: request_id num_tokens
    num_tokens_main_model
SingleTypeKVCacheManager.cache_blocks: request num_tokens
SingleTypeKVCacheManager.find_longest_cache_hit: block_hashes max_length
    kv_cache_group_ids block_pool kv_cache_spec drop_eagle_block alignment_tokens
    dcp_world_size pcp_world_size
SingleTypeKVCacheManager.free: request_id
SingleTypeKVCacheManager.get_num_blocks_to_allocate: request_id num_tokens
    new_computed_blocks total_computed_tokens num_local_computed_tokens
    num_tokens_main_model apply_admission_cap
SingleTypeKVCacheManager.new_step_starts:
SingleTypeKVCacheManager.pop_blocks_for_free: request_id
SingleTypeKVCacheManager.remove_skipped_blocks: request_id processed_computed_tokens
    num_prompt_tokens
SingleTypeKVCacheManager.take_new_block_ids:
SinkFullAttentionManager: kv_cache_spec block_pool enable_caching kv_cache_group_id
    scheduler_block_size dcp_world_size pcp_world_size
SlidingWindowManager: kv_cache_spec **kwargs
SlidingWindowManager.find_longest_cache_hit: block_hashes max_length
    kv_cache_group_ids block_pool kv_cache_spec drop_eagle_block alignment_tokens
    dcp_world_size pcp_world_size
register_all_kvcache_specs: vllm_config
"""),
    "vllm.v1.kv_cache_interface": _table("""
AttentionSpec.max_num_blocks_per_req: vllm_config max_len
ChunkedLocalAttentionSpec.max_admission_blocks_per_request: max_in_flight_tokens
    max_model_len
FullAttentionSpec.merge: specs
KVCacheSpec.max_num_blocks_per_req: vllm_config max_len
KVCacheSpec.merge: specs
MLAAttentionSpec.merge: specs
MambaSpec.max_num_blocks_per_req: vllm_config max_len
RSWASpec.merge: specs
SinkFullAttentionSpec.merge: specs
SlidingWindowMLASpec.merge: specs
SlidingWindowSpec.max_admission_blocks_per_request: max_in_flight_tokens max_model_len
UniformTypeKVCacheSpecs.from_specs: kv_cache_specs
UniformTypeKVCacheSpecs.is_uniform_type: kv_cache_specs
UniformTypeKVCacheSpecs.max_num_blocks_per_req: vllm_config max_len
get_kv_cache_spec_kind: kv_cache_spec
get_kv_cache_spec_sliding_window: kv_cache_spec
"""),
    "vllm.v1.kv_cache_spec_registry": _table("""
register_kv_cache_spec: manager_class uniform_type_base_spec
"""),
    "vllm.v1.request": _table("""
Request: request_id prompt_token_ids sampling_params pooling_params client_index
    arrival_time prompt_embeds prompt_is_token_ids mm_features lora_request cache_salt
    priority trace_headers block_hasher resumable session_id reasoning_ended
    reasoning_parser_kwargs abort_immediately
Request.append_output_token_ids: token_ids
Request.get_num_encoder_embeds: input_id
Request.is_finished:
Request.take_events:
Request.update_block_hashes:
RequestStatus.is_finished: status
"""),
    "vllm.v1.worker.gpu.attn_utils": _table("""
_reshape_kv_cache: attn_groups kv_cache_raw_tensors cache_dtype kernel_block_sizes
    shared_kv_cache_layers kv_cache_config
"""),
    "vllm.v1.worker.block_table": _table("""
BlockTable: block_size max_num_reqs max_num_blocks_per_req max_num_batched_tokens
    pin_memory device kernel_block_size cp_kv_cache_interleave_size slot_mapping_mode
BlockTable.clear:
MultiGroupBlockTable: max_num_reqs max_num_batched_tokens pin_memory device
    block_sizes kernel_block_sizes max_num_blocks cp_kv_cache_interleave_size
    slot_mapping_modes
MultiGroupBlockTable.clear:
"""),
    "vllm.v1.worker.gpu_input_batch": _table("""
InputBatch: max_num_reqs max_model_len max_num_batched_tokens device vocab_size
    block_sizes kernel_block_sizes max_num_blocks_per_req logitsprocs
    logitsprocs_need_output_token_ids num_spec_tokens is_pooling_model
    cp_kv_cache_interleave_size reasoning_config use_replayssm slot_mapping_modes
InputBatch._make_sampling_metadata:
InputBatch.add_request: request
InputBatch.condense:
InputBatch.refresh_metadata:
InputBatch.remove_request: req_id
InputBatch.swap_states: i1 i2
"""),
    "vllm.v1.worker.utils": _table("""
KVBlockZeroer: device attn_groups_iter kernel_block_sizes cache_dtype
    static_forward_context runner_only_attn_layers
KVBlockZeroer.warmup: num_kv_blocks
KVBlockZeroer.zero_block_ids: block_ids
add_kv_sharing_layers_to_kv_cache_groups: shared_kv_cache_layers kv_cache_groups
    runner_only_attn_layers
"""),
}

# Fields and members in order, by module.
FIELDS = {
    "vllm.config.cache": _table("""
CacheConfig: DEFAULT_BLOCK_SIZE block_size user_specified_block_size
    user_specified_mamba_block_size prefix_match_unit gpu_memory_utilization
    cache_dtype is_attention_free num_gpu_blocks_override sliding_window
    enable_prefix_caching prefix_caching_hash_algo kv_cache_dtype_skip_layers
    mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_dtype
    mamba_ssm_cache_dtype mamba_cache_mode replayssm_buffer_len use_replayssm
    num_gpu_blocks num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency
    kv_sharing_fast_prefill kv_cache_memory_bytes kv_offloading_size
    kv_offloading_backend _block_size_resolved
"""),
    "vllm.config.kv_events": _table("""
KVEventsConfig: enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps
    hwm max_queue_size topic
"""),
    "vllm.distributed.kv_events": _table("""
BlockRemoved: block_hashes medium group_idx locality
BlockStored: block_hashes parent_block_hash token_ids block_size lora_id medium
    lora_name extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window
    locality
"""),
    "vllm.lora.request": _table("""
LoRARequest: lora_name lora_int_id lora_path base_model_name tensorizer_config_dict
    load_inplace is_3d_lora_weight
"""),
    "vllm.multimodal.inputs": _table("""
MultiModalFeatureSpec: data modality identifier mm_position mm_hash
PlaceholderRange: offset length is_embed
"""),
    "vllm.sampling_params": _table("""
RepetitionDetectionParams: max_pattern_size min_pattern_size min_count
SamplingParams: n presence_penalty frequency_penalty repetition_penalty temperature
    top_p top_k min_p seed stop stop_token_ids ignore_eos max_tokens min_tokens
    logprobs prompt_logprobs logprob_token_ids flat_logprobs detokenize
    skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
    output_kind stream_interval skip_clone output_text_buffer_length _eos_token_id
    _all_stop_token_ids structured_outputs logit_bias allowed_token_ids extra_args
    routed_experts_prompt_start bad_words _bad_words_token_ids
    skip_reading_prefix_cache thinking_token_budget repetition_detection
StructuredOutputsParams: json regex choice grammar json_object disable_any_whitespace
    disable_additional_properties whitespace_pattern structural_tag _backend
    _backend_was_auto
"""),
    "vllm.v1.core.kv_cache_manager": _table("""
KVCacheBlocks: blocks
"""),
    "vllm.v1.core.kv_cache_utils": _table("""
KVCacheBlock: block_id ref_cnt _block_hash _block_hash_num_tokens prev_free_block
    next_free_block is_null
KVCacheBlockCopy: src_block_id dst_block_id
"""),
    "vllm.v1.core.sched.output": _table("""
CachedRequestData: req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids
    num_computed_tokens num_output_tokens
NewRequestData: req_id prompt_token_ids mm_features sampling_params pooling_params
    block_ids num_computed_tokens lora_request prompt_embeds prompt_is_token_ids
    prefill_token_ids
SchedulerOutput: scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens
    total_num_scheduled_tokens scheduled_spec_decode_tokens scheduled_encoder_inputs
    num_common_prefix_blocks finished_req_ids free_encoder_mm_hashes
    scheduled_encoder_input_stats preempted_req_ids has_structured_output_requests
    pending_structured_output_tokens num_invalid_spec_tokens kv_connector_metadata
    ec_connector_metadata ec_manager_metadata new_block_ids_to_zero
    kv_cache_block_copies partial_tail_offloads num_spec_tokens_to_schedule
"""),
    "vllm.v1.engine": _table("""
FinishReason: STOP LENGTH ABORT ERROR REPETITION
"""),
    "vllm.v1.kv_cache_interface": _table("""
AttentionSpec: num_kv_heads head_size dtype head_size_v kv_quant_mode page_size_padded
    indexes_kv_by_block_stride num_head_slots state_content_bytes
ChunkedLocalAttentionSpec: attention_chunk_size
FullAttentionSpec: sliding_window attention_chunk_size non_causal
KVCacheConfig: num_blocks kv_cache_tensors kv_cache_groups
KVCacheGroupSpec: layer_names kv_cache_spec is_eagle_group
KVCacheSpec: block_size
KVCacheSpecKind: FULL_ATTENTION MLA_ATTENTION SLIDING_WINDOW SLIDING_WINDOW_MLA MAMBA
    CHUNKED_LOCAL_ATTENTION SINK_FULL_ATTENTION ENCODER_ONLY_ATTENTION CROSS_ATTENTION
    UNKNOWN
KVCacheTensor: size shared_by offset block_stride
KVQuantMode: NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD
    INT4_PER_TOKEN_HEAD NVFP4 TURBOQUANT_K8V4 TURBOQUANT_4BIT_NC TURBOQUANT_K3V4_NC
    TURBOQUANT_3BIT_NC
MLAAttentionSpec: cache_dtype_str alignment compress_ratio model_version
    non_causal_multi_token_decode head_size_v
MambaSpec: shapes dtypes page_size_padded mamba_type mamba_cache_mode
    num_speculative_blocks
RSWASpec: rswa_window
SinkFullAttentionSpec: sink_len
SlidingWindowMLASpec: cache_dtype_str alignment compress_ratio model_version
    head_size_v
SlidingWindowSpec: sliding_window extra_retained_tokens
UniformTypeKVCacheSpecs: kv_cache_specs
"""),
    "vllm.v1.metrics.stats": _table("""
BaseCacheStats: reset requests queries hits
PrefixCacheStats: preempted_requests preempted_queries preempted_hits
"""),
    "vllm.v1.outputs": _table("""
DraftTokenIds: req_ids draft_token_ids
ECConnectorOutput: finished_sending finished_recving ec_connector_worker_meta
KVConnectorOutput: finished_sending finished_recving kv_connector_stats
    kv_cache_events kv_connector_worker_meta invalid_block_ids expected_finished_count
ModelRunnerOutput: req_ids req_id_to_index sampled_token_ids logprobs
    prompt_logprobs_dict pooler_output kv_connector_output ec_connector_output
    num_nans_in_logits cudagraph_stats routed_experts sampling_masks
"""),
    "vllm.v1.pool.metadata": _table("""
PoolingMetadata: prompt_lens prompt_token_ids prompt_token_ids_cpu pooling_params
    pooling_states pooling_cursor
"""),
    "vllm.v1.request": _table("""
RequestStatus: WAITING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR WAITING_FOR_REMOTE_KVS
    WAITING_FOR_STREAMING_REQ RUNNING PREEMPTED FINISHED_STOPPED
    FINISHED_LENGTH_CAPPED FINISHED_ABORTED FINISHED_IGNORED FINISHED_ERROR
    FINISHED_REPETITION
"""),
    "vllm.v1.sample.metadata": _table("""
SamplingMetadata: temperature all_greedy all_random top_p top_k generators
    max_num_logprobs no_penalties prompt_token_ids frequency_penalties
    presence_penalties repetition_penalties output_token_ids allowed_token_ids_mask
    bad_words_token_ids logitsprocs logprob_token_ids spec_token_ids
    thinking_budget_state_holder
"""),
    "vllm.v1.worker.gpu_input_batch": _table("""
CachedRequestState: req_id prompt_token_ids mm_features sampling_params generator
    block_ids num_computed_tokens output_token_ids mrope_positions
    mrope_position_delta xdrope_positions lora_request prompt_embeds
    in_progress_prompt_logprobs_cpu prompt_is_token_ids prev_num_draft_len
    pooling_params pooling_states
"""),
    "vllm.v1.worker.utils": _table("""
AttentionGroup: backend layer_names kv_cache_spec kv_cache_group_id metadata_builders
"""),
}
