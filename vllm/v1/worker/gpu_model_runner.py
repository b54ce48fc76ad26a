"""Runs the model for one step after another; one class for every device.

Knows the model, the batch, the caches and the sampler. Refuses to know requests' text,
queues and how the KV cache was planned.
"""

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform
from vllm.utils.mem_utils import format_bytes
from vllm.v1.attention.backends.utils import (
    reorder_batch_to_split_decodes_and_prefills,
)
from vllm.v1.attention.ops.blocks import BlockCopier
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    KVConnectorOutput,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
)
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.decode_graphs import DecodeGraphs, graph_sizes, why_not_captured
from vllm.v1.worker.device import RunnerDevice
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.input_prep import InputPreparer, StepInputs
from vllm.v1.worker.kv_cache_init import (
    BoundLayer,
    bind_kv_caches,
    create_kv_caches,
)
from vllm.v1.worker.kv_connector import ConnectorSteps
from vllm.v1.worker.layer_specs import (
    check_what_was_asked,
    describe_formats,
    get_kv_cache_specs,
    get_layer_formats,
    resolve_layout,
    shared_layers,
)
from vllm.v1.worker.prompt_logprobs import PromptLogprobs
from vllm.v1.worker.request_states import RequestStates
from vllm.v1.worker.step_plan import PlannedOutput, StepPlan, make_step_plan
from vllm.v1.worker.utils import (
    AttentionGroup,
    KVBlockZeroer,
    add_kv_sharing_layers_to_kv_cache_groups,
    make_attention_groups,
    prepare_kernel_block_sizes,
)

logger = init_logger(__name__)


class GPUModelRunner:
    """Life: `load_model`, `get_kv_cache_spec`, `initialize_kv_cache`, then
    `execute_model` for every step. CPU and GPU differ in `device` only."""

    model: nn.Module
    kv_cache_config: KVCacheConfig
    input_batch: InputBatch

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.scheduler_config = vllm_config.scheduler_config
        self.device = device
        self.pin_memory = current_platform.is_pin_memory_available()
        self.max_model_len = self.model_config.max_model_len
        self.max_num_reqs = self.scheduler_config.max_num_seqs
        self.max_num_tokens = self.scheduler_config.max_num_batched_tokens
        self.vocab_size = self.model_config.get_vocab_size()
        self.sampler = Sampler(self.model_config.logprobs_mode)
        self.prompt_logprobs = PromptLogprobs(self._compute_logits, self.vocab_size)
        self.states = RequestStates(
            device, self.prompt_logprobs.add, self.prompt_logprobs.discard
        )
        self.attn_groups: list[list[AttentionGroup]] = []
        self.reorder_threshold: int | None = None
        self.kv_caches: dict[str, Any] = {}
        self.connector: ConnectorSteps | None = None
        self.graphs: DecodeGraphs | None = None
        self.copier: BlockCopier | None = None
        self.plan: StepPlan | None = None
        self.keeps_logits = False  # for who looks at those of every step

    @property
    def requests(self) -> dict[str, Any]:
        """Unfinished requests by id."""
        return self.states.requests

    # --- start-up ---------------------------------------------------------------------

    def load_model(self) -> None:
        """Builds the model and reads its weights. Layers register themselves.

        ValueError, before any weight is read, when the memory that was asked for does
        not hold one request.
        """
        with set_current_vllm_config(self.vllm_config):
            self.model = get_model(
                vllm_config=self.vllm_config, on_built=self._settle_block_size
            )

    def _settle_block_size(self) -> None:
        current_platform.update_block_size_for_backend(self.vllm_config)
        check_what_was_asked(self.vllm_config)

    def get_model(self) -> nn.Module:
        return self.model

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The packed spec of every layer with a cache of its own, by layer name."""
        return get_kv_cache_specs(self.vllm_config)

    def get_layer_formats(self) -> dict[str, str]:
        """The format id of every attention layer."""
        return get_layer_formats(self.vllm_config)

    @torch.inference_mode()
    def profile_run(self, num_tokens: int | None = None) -> None:
        """Runs the model on `num_tokens` tokens (as many as a step may have) without a
        cache, and the sampler's input on one row for each request that fits."""
        num_tokens = min(num_tokens or self.max_num_tokens, self.max_num_tokens)
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        positions = torch.arange(num_tokens, device=self.device) % self.max_model_len
        with set_forward_context(None, self.vllm_config):
            hidden = self.model(ids, positions)
        self._compute_logits(hidden[: min(num_tokens, self.max_num_reqs)])

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the plan, binds every layer to its pages and makes the batch.

        Records in the plan, where they are missing, the layers' formats and the layout.
        """
        started = time.monotonic()
        self.kv_cache_config = kv_cache_config
        layers = self.vllm_config.compilation_config.static_forward_context
        specs = kv_cache_config.layer_specs()
        layout = resolve_layout(
            self.vllm_config, specs, kv_cache_config.kv_cache_layout
        )
        kv_cache_config.kv_cache_layout = layout.name
        formats = {n: f for n, f in self.get_layer_formats().items() if n in specs}
        kv_cache_config.layer_formats = kv_cache_config.layer_formats or formats

        own_groups = make_attention_groups(kv_cache_config, layers)
        kernel_sizes = prepare_kernel_block_sizes(kv_cache_config, own_groups)
        bound = {
            name: BoundLayer(
                backend=group.backend,
                kernel_block_size=kernel_sizes[group.kv_cache_group_id],
                cache_dtype=getattr(layers[name], "kv_cache_dtype", "auto"),
            )
            for groups in own_groups
            for group in groups
            for name in group.layer_names
        }
        views, self.kv_caches = create_kv_caches(
            kv_cache_config, layout, bound, self.device
        )
        sharing = shared_layers(self.vllm_config)
        bind_kv_caches(views, layers, sharing)
        self._make_groups(kv_cache_config, kernel_sizes, sharing)
        self._make_batch(kv_cache_config, kernel_sizes)
        self._make_plan()
        self._say_caches(layout.name, kernel_sizes, time.monotonic() - started)

    def _make_groups(
        self,
        config: KVCacheConfig,
        kernel_sizes: list[int],
        sharing: dict[str, str],
    ) -> None:
        """Groups of layers that compute alike, with builders and sharing layers."""
        layers = self.vllm_config.compilation_config.static_forward_context
        runner_only: set[str] = set()
        with_sharing = replace(
            config,
            kv_cache_groups=[
                replace(g, layer_names=list(g.layer_names))
                for g in config.kv_cache_groups
            ],
        )
        add_kv_sharing_layers_to_kv_cache_groups(
            sharing, with_sharing.kv_cache_groups, runner_only
        )
        self.attn_groups = make_attention_groups(with_sharing, layers)
        flat = [group for groups in self.attn_groups for group in groups]
        for group in flat:
            group.create_metadata_builders(
                self.vllm_config, self.device, kernel_sizes[group.kv_cache_group_id]
            )
        thresholds = [g.get_metadata_builder().reorder_batch_threshold for g in flat]
        # Backends that want decodes first, and up to how many queries are a decode.
        self.reorder_threshold = min(
            (t for t in thresholds if t is not None), default=None
        )
        self.zeroer = KVBlockZeroer(
            self.device,
            flat,
            kernel_sizes,
            self.vllm_config.cache_config.cache_dtype,
            layers,
            runner_only,
        )

    def _make_batch(self, config: KVCacheConfig, kernel_sizes: list[int]) -> None:
        max_len = self.max_model_len
        self.input_batch = InputBatch(
            max_num_reqs=self.max_num_reqs,
            max_model_len=max_len,
            max_num_batched_tokens=self.max_num_tokens,
            device=self.device,
            vocab_size=self.vocab_size,
            block_sizes=[g.kv_cache_spec.block_size for g in config.kv_cache_groups],
            kernel_block_sizes=kernel_sizes,
            max_num_blocks_per_req=[
                g.kv_cache_spec.max_num_blocks_per_req(self.vllm_config, max_len)
                for g in config.kv_cache_groups
            ],
            logitsprocs=build_logitsprocs(
                self.vllm_config,
                self.device,
                self.pin_memory,
                custom_logitsprocs=self.model_config.logits_processors or (),
            ),
            pin_memory=self.pin_memory,
        )
        self.inputs = InputPreparer(
            self.max_num_reqs,
            self.max_num_tokens,
            self.device,
            self.pin_memory,
            self.attn_groups,
        )

    def _make_plan(self) -> None:
        self.plan = make_step_plan(
            self.model,
            self.model_config.dtype,
            self.device,
            self.max_num_tokens,
            self.max_num_reqs,
            self.attn_groups,
            enforce_eager=self.model_config.enforce_eager,
        )

    def _say_caches(self, layout: str, kernel_sizes: list[int], seconds: float) -> None:
        config = self.kv_cache_config
        skipped = bool(self.vllm_config.cache_config.kv_cache_dtype_skip_layers)
        logger.debug(
            "KV cache pages: %s; layout %s, %s in %.2f s",
            describe_formats(config.layer_formats, skipped),
            layout,
            format_bytes(sum(tensor.size for tensor in config.kv_cache_tensors)),
            seconds,
        )
        for group_id, groups in enumerate(self.attn_groups):
            backends = Counter(
                group.backend.get_name() for group in groups for _ in group.layer_names
            )
            if not backends:
                continue
            logger.debug(
                "Attention of KV cache group %d: %s; kernel blocks of %d tokens",
                group_id,
                ", ".join(f"{name} x{count}" for name, count in backends.items()),
                kernel_sizes[group_id],
            )

    def graph_sizes(self, device: RunnerDevice) -> list[int]:
        """Batches of decodes that may be captured on this device."""
        if not device.captures_graphs or self.model_config.enforce_eager:
            return []
        asked = self.vllm_config.compilation_config.cudagraph_capture_sizes
        return graph_sizes(self.max_num_reqs, asked)

    def capture_graphs(self, device: RunnerDevice) -> None:
        """Captures decode steps where device, configuration and backends allow it."""
        reason = why_not_captured(device, self.vllm_config, self.attn_groups)
        if reason:
            logger.info("Decode steps are not captured: %s", reason)
            return
        graphs = DecodeGraphs(
            device=device,
            vllm_config=self.vllm_config,
            model=self.model,
            inputs=self.inputs,
            block_tables=self.input_batch.block_table.block_tables,
            attn_groups=self.attn_groups,
            sizes=self.graph_sizes(device),
        )
        if graphs.capture():
            self.graphs = graphs

    def set_kv_connector(self, connector: Any) -> None:
        """Takes a connector (see KVConnectorBase_V1) and gives it the caches."""
        self.connector = ConnectorSteps(connector)
        layers = self.vllm_config.compilation_config.static_forward_context
        self.connector.register(self.kv_caches, layers)

    def get_kv_connector_handshake_metadata(self) -> Any:
        """What the connector tells peers; None without one, or when it is silent."""
        if self.connector is None:
            return None
        return self.connector.connector.get_handshake_metadata()

    def update_max_model_len(self, max_model_len: int) -> None:
        """The longest sequence, decided after the model was loaded."""
        self.model_config.max_model_len = max_model_len
        self.max_model_len = max_model_len

    # --- a step -----------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the scheduled tokens and samples for every request whose tokens are
        all computed after them."""
        scheduled = scheduler_output
        if self.connector is not None:
            self.connector.handle_preemptions(scheduled)
        self.states.apply(scheduled, self.input_batch)
        if self.reorder_threshold is not None:
            reorder_batch_to_split_decodes_and_prefills(
                self.input_batch, scheduled, self.reorder_threshold
            )
        self.input_batch.refresh_metadata()
        self._prepare_blocks(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return self._output_without_forward(scheduled)
        step = self.inputs.prepare(self.input_batch, scheduled)
        hidden, planned, transfers = self._forward(scheduled, step)
        prompt_logprobs = self.prompt_logprobs.collect(
            hidden, step, self.input_batch, self.requests
        )
        return self._sample(hidden, planned, step, prompt_logprobs, transfers)

    def _prepare_blocks(self, scheduled: SchedulerOutput) -> None:
        if scheduled.new_block_ids_to_zero:
            self.zeroer.zero_block_ids(scheduled.new_block_ids_to_zero)
        if scheduled.kv_cache_block_copies:
            if self.copier is None:
                self.copier = BlockCopier(self._cache_tensors())
            self.copier.copy(scheduled.kv_cache_block_copies)

    def _cache_tensors(self) -> list[torch.Tensor]:
        """Every cache once: layers of other groups may lie over the same bytes."""
        found: dict[int, torch.Tensor] = {}
        for cache in self.kv_caches.values():
            for tensor in cache if isinstance(cache, list) else [cache]:
                found.setdefault(tensor.data_ptr(), tensor)
        return list(found.values())

    def _output_without_forward(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        if self.connector is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        transfers = self.connector.without_forward(scheduled)
        if transfers is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        return replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=transfers)

    def _forward(
        self, scheduled: SchedulerOutput, step: StepInputs
    ) -> tuple[torch.Tensor | None, PlannedOutput | None, KVConnectorOutput | None]:
        """Hidden states [T, d] of the step where they are needed, what a plan made of
        every request's last token, and what a connector did meanwhile."""
        with set_forward_context(
            step.attn_metadata, self.vllm_config, slot_mapping=step.slot_mapping
        ) as context:
            around: Any = nullcontext()
            if self.connector is not None:
                around = self.connector.around_forward(scheduled, context)
            with around as transfers:
                hidden, planned = self._run_model(step)
        return hidden, planned, transfers

    def _run_model(
        self, step: StepInputs
    ) -> tuple[torch.Tensor | None, PlannedOutput | None]:
        """Captured or planned where that is possible, else eager. Only a plan goes on
        to logits, or to tokens where nothing else is needed."""
        hidden = None if self.graphs is None else self.graphs.run(step)
        if hidden is not None:
            return hidden, None
        if self.plan is None:
            return self.model(step.input_ids, step.positions), None
        with self.connector.around_layers() if self.connector else nullcontext():
            planned = self._run_plan(self.plan, step)
        return planned.hidden, planned

    def _run_plan(self, plan: StepPlan, step: StepInputs) -> PlannedOutput:
        """Nothing is computed that nobody asks for."""
        metadata = self.input_batch.sampling_metadata
        wanted = step.last_tokens
        if not step.samples.any():
            wanted = wanted[:0]
        return plan.run(
            step,
            wanted,
            only_tokens=not (self.keeps_logits or metadata.needs_logits()),
            every_token=self.prompt_logprobs.pending,
        )

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)

    def _sample(
        self,
        hidden: torch.Tensor | None,
        planned: PlannedOutput | None,
        step: StepInputs,
        prompt_logprobs: dict[str, LogprobsTensors | None],
        transfers: KVConnectorOutput | None,
    ) -> ModelRunnerOutput:
        batch = self.input_batch
        output = ModelRunnerOutput(
            req_ids=batch.req_ids.copy(),
            req_id_to_index=batch.req_id_to_index.copy(),
            sampled_token_ids=[[] for _ in range(step.num_reqs)],
            prompt_logprobs_dict=prompt_logprobs,
            kv_connector_output=transfers,
        )
        rows = np.flatnonzero(step.samples)
        if rows.size == 0:
            return output
        if planned is None:
            assert hidden is not None  # an eager step has them all
            last = torch.from_numpy(step.last_tokens).to(self.device)
            sampled = self._run_sampler(self._compute_logits(hidden[last]), None, step)
        else:
            sampled = self._run_sampler(planned.logits, planned.likeliest, step)
        tokens = sampled.sampled_token_ids.squeeze(-1).cpu().numpy()[rows]
        batch.append_sampled(rows, tokens)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            output.sampled_token_ids[row].append(token)
            self.requests[output.req_ids[row]].output_token_ids.append(token)
        if sampled.logprobs_tensors is not None:
            output.logprobs = sampled.logprobs_tensors.tolists()
        return output

    def _run_sampler(
        self,
        logits: torch.Tensor | None,
        greedy: torch.Tensor | None,
        step: StepInputs,
    ) -> SamplerOutput:
        """Samples every row. Rows whose prompt is not finished are thrown away, and do
        not advance their requests' generators."""
        metadata = self.input_batch.sampling_metadata
        if metadata.generators and not step.samples.all():
            samples = step.samples
            kept = {r: g for r, g in metadata.generators.items() if samples[r]}
            metadata = replace(metadata, generators=kept)
        return self.sampler(logits, metadata, greedy)

    def shutdown(self) -> None:
        """Ends transfers, and lets go of weights, pages and buffers at once: a config
        that outlives the engine, and cycles of objects, would keep them."""
        if self.connector is not None:
            self.connector.shutdown()
        self.vllm_config.compilation_config.static_forward_context.clear()
        self.kv_caches = {}
        self.attn_groups = []
        self.graphs = self.copier = None
        if self.plan is not None:
            self.plan.close()
        self.plan = None
        for name in ("model", "zeroer", "input_batch", "inputs"):
            self.__dict__.pop(name, None)
