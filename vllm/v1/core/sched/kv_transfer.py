"""The scheduler's side of a KV connector: external hits, loads under way, late frees.

Knows which requests wait for transfers. Knows nothing of bytes. Without a connector
every answer is "nothing".
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import ConnectorPrefixCacheStats
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request


class SchedulerConnector(Protocol):
    """What a connector answers on the scheduler's side."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]: ...

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any: ...

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]: ...

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None: ...

    def take_events(self) -> Iterable[Any]: ...

    def reset_cache(self) -> bool | None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ExternalHit:
    """Tokens right after the local hit that a connector can load; `load_async` when the
    request has to wait for them outside of any step."""

    num_tokens: int = 0
    load_async: bool = False


NO_EXTERNAL_HIT = ExternalHit()


class KVTransfer:
    """Asks the connector and remembers what it owes.

    `finished_recving` and `failed_recving` name requests whose load is over and not yet
    acted upon; `awaited` counts, for finished requests, the transfers that still use
    their blocks. Blocks loaded within a step are cached only when its output says that
    nothing failed: until then `is_loading_in_step` is true of their request.
    """

    def __init__(
        self, connector: SchedulerConnector | None, kv_cache_manager: KVCacheManager
    ) -> None:
        self.connector = connector
        self.kv_cache_manager = kv_cache_manager
        self.finished_recving: set[str] = set()
        self.failed_recving: set[str] = set()
        self.awaited: Counter[str] = Counter()
        self.stats = ConnectorPrefixCacheStats()
        # For each step under way, oldest first, the blocks being filled by request.
        self._steps: deque[dict[str, set[int]]] = deque()
        self._this_step: dict[str, set[int]] = {}
        self._num_loads: Counter[str] = Counter()
        self._tell("bind_gpu_block_pool", kv_cache_manager.block_pool)
        self._tell("bind_kv_cache_manager", kv_cache_manager)

    def _tell(self, hook: str, argument: Any) -> None:
        """Calls a hook that connectors may leave out."""
        method = getattr(self.connector, hook, None)
        if method is not None:
            method(argument)

    def on_new_request(self, request: Request) -> None:
        self._tell("on_new_request", request)

    def find(self, request: Request, num_local_tokens: int) -> ExternalHit | None:
        """What can be loaded beyond the local hit; None when the connector wants to be
        asked again later. A request whose load failed once is not loaded again, and one
        that wants every token computed is never."""
        if self.connector is None or request.skip_external_cache:
            return NO_EXTERNAL_HIT
        if request.skip_reading_prefix_cache:
            return NO_EXTERNAL_HIT
        num_tokens, load_async = self.connector.get_num_new_matched_tokens(
            request, num_local_tokens
        )
        if num_tokens is None:
            return None
        # The last token is computed here in any case. A load outside of a step may
        # bring it along, where a request can go back by a token.
        may_bring_all = load_async and self.kv_cache_manager.coordinator.can_step_back
        room = request.num_tokens - num_local_tokens - (not may_bring_all)
        num_tokens = min(num_tokens, room)
        saved = min(num_tokens, request.num_tokens - 1 - num_local_tokens)
        if saved <= 0:
            return NO_EXTERNAL_HIT
        return ExternalHit(num_tokens=num_tokens, load_async=load_async)

    def allocated(self, request: Request, num_local: int, hit: ExternalHit) -> None:
        """Tells the connector that an admitted request has its blocks."""
        if self.connector is None:
            return
        num_external = hit.num_tokens
        blocks = self.kv_cache_manager.get_blocks(request.request_id)
        self.connector.update_state_after_alloc(request, blocks, num_external)
        if num_external and not hit.load_async:
            self._num_loads[request.request_id] += 1
            self._this_step[request.request_id] = {
                block.block_id
                for group, size in zip(blocks.blocks, self._block_sizes(), strict=True)
                for block in group[num_local // size :]
                if not block.is_null
            }
        if not request.skip_reading_prefix_cache:
            self.stats.record(
                num_tokens=request.num_tokens - num_local,
                num_hits=num_external,
                preempted=request.num_preemptions > 0,
            )
            self.stats.add_sources(self._sources(request, num_external))

    def _sources(self, request: Request, num_external: int) -> dict[str, int]:
        """Where the tokens of a hit come from, as far as the connector knows."""
        ask = getattr(self.connector, "get_external_cache_hit_sources", None)
        if ask is None or not num_external:
            return {}
        return ask(request, num_external) or {}

    def _block_sizes(self) -> list[int]:
        managers = self.kv_cache_manager.coordinator.single_type_managers
        return [manager.block_size for manager in managers]

    def is_loading_in_step(self, request_id: str) -> bool:
        """Says whether a step under way fills blocks of the request."""
        return request_id in self._num_loads

    def step_is_decided(self) -> None:
        """Closes the list of loads of the step that was just scheduled."""
        if self.connector is not None:
            self._steps.append(self._this_step)
            self._this_step = {}

    def take_loads_of_oldest_step(self) -> dict[str, set[int]]:
        """The loads of the step whose output has come: block ids by request."""
        loads = self._steps.popleft() if self._steps else {}
        self._num_loads.subtract(loads.keys())
        for req_id in loads:
            if self._num_loads[req_id] <= 0:
                del self._num_loads[req_id]
        return loads

    def build_meta(self, output: SchedulerOutput) -> Any:
        """What the workers' connectors do in this step, or None."""
        if self.connector is None:
            return None
        return self.connector.build_connector_meta(output)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Whether a transfer still reads the request's blocks, and what its client is
        told about it."""
        if self.connector is None:
            return False, None
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
        all_groups = getattr(self.connector, "request_finished_all_groups", None)
        if all_groups is not None:
            delay, params = all_groups(request, block_ids)
        elif len(block_ids) == 1:
            delay, params = self.connector.request_finished(request, block_ids[0])
        else:
            raise ValueError(
                f"{type(self.connector).__name__} serves one KV cache group, not "
                f"{len(block_ids)}: pass --disable-hybrid-kv-cache-manager"
            )
        return bool(delay and any(block_ids)), params

    def hold(self, request_id: str, num_transfers: int) -> None:
        """Notes that transfers still use the blocks of a finished request."""
        self.awaited[request_id] += num_transfers

    def release(self, request_id: str) -> bool:
        """Notes the end of one of them; says whether it was the last."""
        if request_id not in self.awaited:
            return False
        self.awaited[request_id] -= 1
        if self.awaited[request_id] > 0:
            return False
        del self.awaited[request_id]
        return True

    def take_events(self) -> list[Any]:
        if self.connector is None:
            return []
        return list(self.connector.take_events() or ())

    def take_stats(self) -> ConnectorPrefixCacheStats | None:
        """External look-ups since the last call; None without a connector."""
        if self.connector is None:
            return None
        stats, self.stats = self.stats, ConnectorPrefixCacheStats()
        return stats

    def take_connector_stats(self, news: KVConnectorOutput | None) -> Any:
        """The connector's own numbers, of the workers' side and of this one; None when
        it has none."""
        workers = None if news is None else news.kv_connector_stats
        take = getattr(self.connector, "get_kv_connector_stats", None)
        own = None if take is None else take()
        if own is None or workers is None:
            return workers if own is None else own
        return own.aggregate(workers)

    def has_pending_work(self) -> bool:
        """Says whether the connector needs further steps though no request does."""
        checks = ("has_pending_push_work", "has_pending_block_frees")
        return self.connector is not None and any(
            getattr(self.connector, name, lambda: False)() for name in checks
        )

    def reset_cache(self) -> bool:
        """Empties the connector's own cache. True without a connector; False when the
        connector says that it did not."""
        return self.connector is None or self.connector.reset_cache() is not False

    def shutdown(self) -> None:
        if self.connector is not None:
            self.connector.shutdown()


def create_connector(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> SchedulerConnector | None:
    """The scheduler side of the configured connector, or None."""
    config = vllm_config.kv_transfer_config
    if config is None or not config.is_kv_transfer_instance:
        return None
    package = "vllm.distributed.kv_transfer.kv_connector"
    factory = resolve(f"{package}.factory:KVConnectorFactory")
    role = resolve(f"{package}.v1.base:KVConnectorRole").SCHEDULER
    connector: SchedulerConnector = factory.create_connector(
        vllm_config, role, kv_cache_config
    )
    return connector
