"""Several connectors as one: all save, and the first that has a prompt loads it.

`kv_connector_extra_config`: `connectors`, a list of kv_transfer_config objects.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_parts import (
    MultiConnectorHandshake,
    MultiConnectorMetadata,
    MultiConnectorNews,
    MultiConnectorPromMetrics,
    MultiConnectorStats,
    child_configs,
    child_name,
)
from vllm.forward_context import ForwardContext
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput


class MultiConnector(KVConnectorBase_V1, SupportsHMA):
    """Asks its children in their order. A child that did not provide a hit is told of
    no external tokens, so it stores nothing that has not come yet."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        configs = self.child_configs(self._kv_transfer_config)
        self._names = [child_name(i, config) for i, config in enumerate(configs)]
        self._children: list[KVConnectorBase_V1] = []
        for config in configs:
            child_config = copy(vllm_config)
            child_config.kv_transfer_config = config
            self._children.append(
                KVConnectorFactory.create_connector(child_config, role, kv_cache_config)
            )
        self._chosen: dict[str, int] = {}
        self._num_sends: dict[str, int] = {}
        self._sends_left: Counter[str] = Counter()

    @classmethod
    def child_configs(cls, transfer: KVTransferConfig | None) -> list[KVTransferConfig]:
        """The children's configurations. ValueError when there are none."""
        return child_configs(transfer)

    @classmethod
    def check_config(
        cls, transfer: KVTransferConfig, block_bytes: int | None = None
    ) -> None:
        for child in cls.child_configs(transfer):
            KVConnectorFactory.check_config(child, block_bytes)

    @classmethod
    def check_plan(
        cls, vllm_config: VllmConfig, transfer: KVTransferConfig, plan: KVCacheConfig
    ) -> None:
        for child in cls.child_configs(transfer):
            KVConnectorFactory.check_plan(vllm_config, child, plan)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """What the children agree on. ValueError when they want different orders."""
        wishes: dict[str, str] = {}
        for config in cls.child_configs(vllm_config.kv_transfer_config):
            child_config = copy(vllm_config)
            child_config.kv_transfer_config = config
            found = KVConnectorFactory.get_connector_class(config)
            wish = found.get_required_kvcache_layout(child_config)
            if wish is not None:
                wishes[wish] = str(config.kv_connector)
        if len(wishes) > 1:
            raise ValueError(
                f"the connectors of MultiConnector want different KV layouts: {wishes}"
            )
        return next(iter(wishes), None)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True if a child says so."""
        return any(
            KVConnectorFactory.get_connector_class(
                config
            ).requires_piecewise_for_cudagraph(config.kv_connector_extra_config)
            for config in (
                KVTransferConfig(**({"kv_role": "kv_both"} | child))
                for child in extra_config.get("connectors", ())
            )
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.requires_kv_delivery for child in self._children)

    # --- scheduler side ---------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        for child in self._children:
            child.bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        for child in self._children:
            child.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        for child in self._children:
            child.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = (0, False)
        self._chosen.pop(request.request_id, None)
        for index, child in enumerate(self._children):
            found, load_async = child.get_num_new_matched_tokens(
                request, num_computed_tokens
            )
            if found is None:
                return None, False  # it may have the longest hit: wait for its answer
            if found and not answer[0]:
                answer = (found, load_async)
                self._chosen[request.request_id] = index
        return answer

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        chosen = self._chosen.get(request.request_id, -1)
        for index, child in enumerate(self._children):
            if num_external_tokens and index == chosen:
                child.update_state_after_alloc(request, blocks, num_external_tokens)
            else:
                child.update_state_after_alloc(request, blocks, 0)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> MultiConnectorMetadata:
        num_sends, self._num_sends = self._num_sends, {}
        return MultiConnectorMetadata(
            [child.build_connector_meta(scheduler_output) for child in self._children],
            num_sends,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        news = connector_output.kv_connector_worker_meta
        each: list[Any] = [None] * len(self._children)
        if isinstance(news, MultiConnectorNews):
            each = news.children
        events = connector_output.kv_cache_events or [None] * len(self._children)
        for child, own, seen in zip(self._children, each, events, strict=True):
            child.update_connector_output(
                replace(
                    connector_output,
                    kv_connector_worker_meta=own,
                    kv_cache_events=seen,
                )
            )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._chosen.pop(request.request_id, None)
        num_sends, params = 0, dict[str, Any]()
        for child in self._children:
            answer: Any = child
            if supports_hma(child):
                delay, told = answer.request_finished_all_groups(request, block_ids)
            else:
                delay, told = child.request_finished(request, block_ids[0])
            num_sends += bool(delay)
            params.update(told or {})
        if num_sends > 1:
            self._num_sends[request.request_id] = num_sends
        return num_sends > 0, params or None

    def take_events(self) -> Iterable[Any]:
        return [event for child in self._children for event in child.take_events()]

    def has_pending_block_frees(self) -> bool:
        return any(child.has_pending_block_frees() for child in self._children)

    def has_pending_push_work(self) -> bool:
        return any(child.has_pending_push_work() for child in self._children)

    def register_finished_partial_tail(self, *args: Any, **kwargs: Any) -> None:
        for child in self._children:
            child.register_finished_partial_tail(*args, **kwargs)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], Any]
    ) -> None:
        for index, child in enumerate(self._children):
            own = {rank: told.children[index] for rank, told in metadata.items()}
            told = {rank: one for rank, one in own.items() if one is not None}
            if told:
                child.set_xfer_handshake_metadata_pp_aware(told)

    def _chosen_child(self, request: Any) -> KVConnectorBase_V1 | None:
        """The child that loads a request."""
        index = self._chosen.get(request.request_id)
        return None if index is None else self._children[index]

    def get_loaded_kv_cache_group_ids(self, request: Any) -> set[int] | None:
        child = self._chosen_child(request)
        return child and child.get_loaded_kv_cache_group_ids(request)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[str, int] | None:
        child = self._chosen_child(request)
        return child and child.get_external_cache_hit_sources(
            request, num_external_tokens
        )

    def get_finished_count(self) -> int | None:
        counts = {child.get_finished_count() for child in self._children} - {None}
        if len(counts) > 1:
            raise ValueError(
                f"the connectors of MultiConnector expect {sorted(counts)} reports of "  # type: ignore[type-var]
                "one transfer: they cannot be used together"
            )
        return counts.pop() if counts else None

    def reset_cache(self) -> bool | None:
        answers = [child.reset_cache() for child in self._children]
        return all(answer is not False for answer in answers)

    # --- worker side ------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if not isinstance(connector_metadata, MultiConnectorMetadata):
            raise TypeError(
                f"orders of another connector: {type(connector_metadata).__name__}"
            )
        self._sends_left.update(connector_metadata.num_sends)
        for child, own in zip(self._children, connector_metadata.children, strict=True):
            child.bind_connector_metadata(own)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        for child in self._children:
            child.clear_connector_metadata()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for child in self._children:
            child.register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        for child in self._children:
            child.set_host_xfer_buffer_ops(copy_operation)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for child in self._children:
            child.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for child in self._children:
            child.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        for child in self._children:
            child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        for child in self._children:
            child.wait_for_save()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, MultiConnectorMetadata):
            for child, own in zip(
                self._children, kv_connector_metadata.children, strict=True
            ):
                child.handle_preemptions(own)

    def finish_forward(self) -> None:
        for child in self._children:
            child.finish_forward()

    def reset_capture_state(self) -> None:
        for child in self._children:
            child.reset_capture_state()

    def get_mem_pool_context(self) -> AbstractContextManager[Any]:
        contexts = ExitStack()
        for child in self._children:
            contexts.enter_context(child.get_mem_pool_context())
        return contexts

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for child in self._children:
            own = child.get_transfer_results(finished_req_ids)
            results.finished_recving |= own.finished_recving
            results.failed_recving |= own.failed_recving
            results.failure_reasons |= own.failure_reasons
            for req_id in own.finished_sending:
                self._sends_left[req_id] -= 1
                if self._sends_left[req_id] <= 0:
                    del self._sends_left[req_id]
                    results.finished_sending.add(req_id)
        return results

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        over = results.finished_recving | results.failed_recving
        return results.finished_sending or None, over or None

    def get_handshake_metadata(self) -> MultiConnectorHandshake | None:
        told = [child.get_handshake_metadata() for child in self._children]
        return MultiConnectorHandshake(told) if any(told) else None

    def get_kv_connector_kv_cache_events(self) -> list[Any] | None:
        events = [c.get_kv_connector_kv_cache_events() for c in self._children]
        return events if any(events) else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set[int]().union(
            *(child.get_block_ids_with_load_errors() for child in self._children)
        )

    def build_connector_worker_meta(self) -> MultiConnectorNews | None:
        news = [child.build_connector_worker_meta() for child in self._children]
        if all(one is None for one in news):
            return None
        return MultiConnectorNews(news)

    # --- both sides -------------------------------------------------------------------

    def get_kv_connector_stats(self) -> MultiConnectorStats | None:
        stats = MultiConnectorStats()
        for name, child in zip(self._names, self._children, strict=True):
            own = child.get_kv_connector_stats()
            if own is not None and not own.is_empty():
                stats.data[name] = own.to_dict()
        return stats if stats.data else None

    def shutdown(self) -> None:
        for child in self._children:
            child.shutdown()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> MultiConnectorStats:
        return MultiConnectorStats(
            {name: dict(numbers) for name, numbers in (data or {}).items()}
        )

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> MultiConnectorPromMetrics:
        return MultiConnectorPromMetrics(*args, **kwargs)
