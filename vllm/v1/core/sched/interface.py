"""What an engine core asks of a scheduler."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


class SchedulerInterface(ABC):
    """Decides step by step which tokens of which requests are computed.

    `block_size` is the number of tokens after which the blocks of all groups end
    together; `hash_block_size` divides the blocks of every group.
    """

    @abstractmethod
    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None: ...

    @abstractmethod
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Decides the next step. With `throttle_prefills` it admits no new request
        while others run."""

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Takes in what a step computed; returns the news for each client index."""

    @abstractmethod
    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Takes in drafts for the next step."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queues a request. ValueError for one that cannot be served."""

    @abstractmethod
    def finish_requests(
        self,
        request_ids: str | Iterable[str] | None,
        finished_status: RequestStatus,
    ) -> list[Request]:
        """Ends requests from outside, whatever their state; None means all of them.
        Unknown and finished ones are left alone. Returns those it ended."""

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Requests waiting or running."""

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Says whether workers have yet to hear of finished requests."""

    def has_requests(self) -> bool:
        """Says whether another step has something to do."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""

    @abstractmethod
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets cached blocks; False when blocks are in use. With
        `reset_running_requests` running requests are preempted first."""

    @abstractmethod
    def make_stats(self) -> SchedulerStats | None:
        """The scheduler's state for the loggers; None when statistics are off."""

    @abstractmethod
    def shutdown(self) -> None:
        """Closes publishers and connectors."""
