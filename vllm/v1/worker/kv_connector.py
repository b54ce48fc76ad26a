"""The worker's side of a KV connector: what happens around a forward pass.

Knows when a connector is called. Refuses to know what it moves: the connector is any
object with the methods of KVConnectorBase_V1.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm.forward_context import ForwardContext, get_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput


class ConnectorSteps:
    """Calls one connector, step by step.

    Layers wait for their load before they compute and offer their pages after it,
    through module hooks that exist only where there is a connector. A planned step
    computes all layers in one call: it waits for all loads before, and offers all pages
    after.
    """

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self._caches: dict[str, Any] = {}

    def register(
        self, kv_caches: Mapping[str, Any], forward_context: Mapping[str, Any]
    ) -> None:
        """Hands over the caches by layer (manager blocks) and installs the hooks."""
        self.connector.register_kv_caches(dict(kv_caches))
        for name in kv_caches:
            layer = forward_context[name]
            self._caches[name] = kv_caches[name]
            if isinstance(layer, nn.Module):
                self._install_hooks(name, layer, kv_caches[name])

    def _install_hooks(self, name: str, layer: nn.Module, cache: Any) -> None:
        def wait(module: nn.Module, args: Any) -> None:
            if self._is_active():
                self.connector.wait_for_layer_load(name)

        def save(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if self._is_active():
                self._save(name, cache)

        layer.register_forward_pre_hook(wait)
        layer.register_forward_hook(save)

    def _save(self, name: str, cache: Any) -> None:
        metadata = get_forward_context().attn_metadata or {}
        self.connector.save_kv_layer(name, cache, metadata.get(name))

    @contextmanager
    def around_layers(self) -> Iterator[None]:
        """What the hooks of all layers do, around a call that computes all of them."""
        active = self._is_active()
        if active:
            for name in self._caches:
                self.connector.wait_for_layer_load(name)
        yield
        if active:
            for name, cache in self._caches.items():
                self._save(name, cache)

    def _is_active(self) -> bool:
        """False in profile runs, where nothing is cached."""
        return bool(get_forward_context().attn_metadata) and (
            self.connector.has_connector_metadata()
        )

    def handle_preemptions(self, scheduled: SchedulerOutput) -> None:
        """Before blocks of preempted requests are used again."""
        if scheduled.preempted_req_ids and scheduled.kv_connector_metadata is not None:
            self.connector.handle_preemptions(scheduled.kv_connector_metadata)

    @contextmanager
    def around_forward(
        self, scheduled: SchedulerOutput, context: ForwardContext
    ) -> Iterator[KVConnectorOutput]:
        """Starts loads, yields an output, and fills it once all saves are done."""
        connector, output = self.connector, KVConnectorOutput()
        connector.bind_connector_metadata(scheduled.kv_connector_metadata)
        try:
            connector.start_load_kv(context)
            yield output
            if context.attn_metadata is not None:
                connector.finish_forward()
            connector.wait_for_save()
            self._fill(output, scheduled.finished_req_ids)
        finally:
            connector.clear_connector_metadata()

    def _fill(self, output: KVConnectorOutput, finished_req_ids: set[str]) -> None:
        connector = self.connector
        transfers = connector.get_transfer_results(finished_req_ids)
        output.finished_sending = transfers.finished_sending or None
        output.finished_recving = transfers.finished_recving or None
        output.failed_recving = transfers.failed_recving or None
        output.failure_reasons = transfers.failure_reasons
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()

    def without_forward(self, scheduled: SchedulerOutput) -> KVConnectorOutput | None:
        """A step that computes nothing: transfers go on. None when there is no news."""
        if scheduled.kv_connector_metadata is None:
            return None
        idle = ForwardContext(no_compile_layers={}, attn_metadata=None)
        with self.around_forward(scheduled, idle) as output:
            pass
        return None if output.is_empty() else output

    def shutdown(self) -> None:
        self.connector.shutdown()
