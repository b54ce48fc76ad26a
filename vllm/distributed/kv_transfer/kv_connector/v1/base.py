"""The interface of a KV connector: what an engine asks, on both of its sides.

A connector exists twice, once beside the scheduler and once in each worker. The
scheduler side decides and knows requests; the worker side moves bytes and knows
addresses. Each step the first hands the second a metadata object of its own making.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.forward_context import ForwardContext
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

# (source, target, source block ids, target block ids, direction)
CopyBlocksOp = Callable[
    [
        dict[str, torch.Tensor],
        dict[str, torch.Tensor],
        list[int],
        list[int],
        Literal["h2d", "d2h"],
    ],
    None,
]

# Objects of higher layers, known here by what is asked of them.
Request = Any  # vllm.v1.request.Request
KVCacheBlocks = Any  # vllm.v1.core.kv_cache_manager.KVCacheBlocks


class KVConnectorRole(enum.Enum):
    """Which side of the engine a connector object serves."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024 - a mark
    """Orders of one step, from the scheduler side to the worker side."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024 - a mark
    """What a worker tells peers of other engines before it exchanges pages."""


class KVConnectorWorkerMetadata(ABC):
    """News of one step, from a worker to the scheduler side."""

    @abstractmethod
    def aggregate(
        self, other: "KVConnectorWorkerMetadata"
    ) -> "KVConnectorWorkerMetadata":
        """The news of both workers as one."""


@dataclass
class KVConnectorTransferResults:
    """Requests whose transfers are over, and those whose load failed as a whole.

    `failure_reasons` may say of the latter why, in a few words that clients may read.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    failure_reasons: dict[str, str] = field(default_factory=dict)


class SupportsHMA(ABC):
    """A connector that serves several KV cache groups at once."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, with the block ids of every group."""


def supports_hma(connector: Any) -> bool:
    """Says whether a connector, or a connector class, serves several groups."""
    cls = connector if isinstance(connector, type) else type(connector)
    return issubclass(cls, SupportsHMA)


class KVConnectorBase_V1(ABC):
    """A connector. Seven methods are abstract; the rest has working defaults.

    Raises ValueError without a kv_transfer_config.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        if vllm_config.kv_transfer_config is None:
            raise ValueError(
                f"{type(self).__name__} needs kv_transfer_config: pass "
                "--kv-transfer-config"
            )
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role
        self._connector_metadata: KVConnectorMetadata | None = None
        self._kv_cache_manager: Any = None

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    @property
    def requires_kv_delivery(self) -> bool:
        """Says whether somebody waits for what this engine computes."""
        return self._kv_transfer_config.is_kv_producer

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Says whether groups may have local hits of different lengths."""
        return False

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Says whether the connector would rather have blocks of all layers in one run
        of bytes. A wish: `register_kv_caches` is called in any case."""
        return False

    # --- of the class -----------------------------------------------------------------

    @classmethod
    def check_config(
        cls, transfer: KVTransferConfig, block_bytes: int | None = None
    ) -> None:
        """ValueError for settings that cannot be served. Asked before weights are read:
        at first, and again when it is known how many bytes a block has."""
        return None

    @classmethod
    def check_plan(
        cls, vllm_config: VllmConfig, transfer: KVTransferConfig, plan: KVCacheConfig
    ) -> None:
        """ValueError for a place of pages that cannot be used, or that holds others.

        Asked before weights are read. `plan` has groups, formats and the layout; its
        number of blocks is not known yet.
        """
        return None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The axis order that the connector wants, "HND" or "NHD"; None: any.

        TypeError when asked of the interface itself.
        """
        if cls is KVConnectorBase_V1:
            raise TypeError(
                "get_required_kvcache_layout is to be called on a connector class"
            )
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Says whether layers call the connector, so that one graph of the whole model
        would skip it."""
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Statistics from what `to_dict` gave; None when the connector keeps none."""
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """What exports those statistics to Prometheus, or None."""
        return None

    # --- worker: orders of a step -----------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Sets the orders of the step that begins."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        """The orders of this step. RuntimeError outside of one."""
        if self._connector_metadata is None:
            raise RuntimeError("no step is under way: there is no connector metadata")
        return self._connector_metadata

    # --- worker: bytes ----------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Takes the caches by layer name: [num_blocks, H, N, C] in whole blocks and the
        spec's dtype, or a list of recurrent states [num_blocks, ...]."""

    def register_cross_layers_kv_cache(  # noqa: B027
        self, kv_cache: torch.Tensor, attn_backend: type[Any]
    ) -> None:
        """Takes one cache of all layers, [num_blocks, ...], from engines that have one;
        this one registers layer by layer."""

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:  # noqa: B027
        """Takes what copies blocks between a device and a host buffer."""

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Starts the loads of this step, before the forward pass."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Returns when a layer's pages are there, before it computes."""

    @abstractmethod
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        """A layer has written the pages of this step; `kv_layer` is its cache."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Returns when this step's saves no longer need their pages unchanged."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:  # noqa: B027
        """Called before blocks of preempted requests are written again."""

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose sends and whose loads are over; called once a step. Only those
        for which the scheduler side asked for a delay may be named as sent."""
        return None, None

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        """The same in one object."""
        sent, received = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sent or set(), received or set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed since the last call."""
        return set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Numbers since the last call."""
        return None

    def get_kv_connector_kv_cache_events(self) -> Any:
        """Events of the connector's own cache since the last call."""
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """News for the scheduler side, if any."""
        return None

    def get_mem_pool_context(self) -> AbstractContextManager[Any]:
        """Wraps the allocation of the KV cache, for memory that must be registered."""
        return nullcontext()

    def finish_forward(self) -> None:  # noqa: B027
        """The forward pass of this step is over."""

    def reset_capture_state(self) -> None:  # noqa: B027
        """A graph capture is over."""

    def shutdown(self) -> None:  # noqa: B027
        """Ends transfers and frees resources. May be called twice."""

    # --- scheduler --------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Takes the engine's KV cache manager, before the first request."""
        self._kv_cache_manager = kv_cache_manager

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:  # noqa: B027
        """Takes the engine's block pool, before the first request."""

    def on_new_request(self, request: Request) -> None:  # noqa: B027
        """A request was queued."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens right after the first `num_computed_tokens` can be loaded,
        and whether outside of any step.

        None asks to be asked again later. The second value is False when the first is
        0. May be called several times for one request.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has all its blocks; `num_external_tokens` are to be loaded, 0 for
        none. May be called twice where loads are asynchronous."""

    @abstractmethod
    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        """The orders of this step. Does not change `scheduler_output`."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: B027
        """Takes the workers' news of a step."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. True keeps its blocks until a worker names it as sent; the
        dict is the response's `kv_transfer_params`."""
        return False, None

    def register_finished_partial_tail(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027
        """A request ended within a block that may still be completed."""

    def take_events(self) -> Iterable["KVCacheEvent"]:
        """Events of the connector's cache since the last call."""
        return ()

    def has_pending_block_frees(self) -> bool:
        """Says whether blocks are held that further steps will free."""
        return False

    def has_pending_push_work(self) -> bool:
        """Says whether further steps are needed though no request does."""
        return False

    def get_finished_count(self) -> int | None:
        """How many workers report each transfer; None: all of them."""
        return None

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Takes the workers' handshake metadata by tensor-parallel rank."""
        return

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same by (pipeline rank, tensor rank)."""
        self.set_xfer_handshake_metadata({tp: m for (_, tp), m in metadata.items()})

    def reset_cache(self) -> bool | None:
        """Empties the connector's cache; False when it could not, None when it has
        none."""
        return None

    def get_loaded_kv_cache_group_ids(self, request: Request) -> set[int] | None:
        """Groups that a load fills; None: all."""
        return None

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[str, int] | None:
        """Where the tokens of a hit come from, by name of the source; None: unknown."""
        return None
