"""A request inside the engine core: its tokens, its progress, its status.

Knows nothing of blocks beyond the hashes of its own tokens.
"""

import enum
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.utils import ConstantList

if TYPE_CHECKING:
    from vllm.v1.core.block_hash import BlockHash

BlockHasher = Callable[["Request"], list["BlockHash"]]

# Stands for "no limit": the model's length still ends the request.
_UNLIMITED_TOKENS = 2**63 - 1


class RequestStatus(enum.IntEnum):
    """Where a request is. Everything after PREEMPTED is finished."""

    WAITING = enum.auto()
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    WAITING_FOR_STREAMING_REQ = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()
    FINISHED_ERROR = enum.auto()
    FINISHED_REPETITION = enum.auto()

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def is_finished(status: "RequestStatus") -> bool:
        return status > _LAST_UNFINISHED

    @staticmethod
    def get_finished_reason(status: "RequestStatus") -> FinishReason | None:
        """The reason that clients see, or None while the request goes on."""
        return _FINISH_REASONS.get(status)


_LAST_UNFINISHED = RequestStatus.PREEMPTED

_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


def _max_tokens(
    sampling_params: SamplingParams | None, pooling_params: PoolingParams | None
) -> int:
    if sampling_params is not None:
        limit = sampling_params.max_tokens
        return _UNLIMITED_TOKENS if limit is None else limit
    if pooling_params is not None:
        return 1
    raise ValueError(
        "a request needs sampling_params or pooling_params, got neither: pass one"
    )


def _skips_reading_prefix_cache(
    sampling_params: SamplingParams | None, pooling_params: PoolingParams | None
) -> bool:
    """Prompt logprobs need the logits of every prompt token, so nothing may be
    skipped."""
    if sampling_params is not None:
        wish = sampling_params.skip_reading_prefix_cache
        return bool(wish) or sampling_params.prompt_logprobs is not None
    if pooling_params is not None:
        return bool(pooling_params.skip_reading_prefix_cache)
    return False


class Request:
    """Tokens and state of one request.

    `num_computed_tokens` counts tokens whose KV is computed or will be by the steps
    already scheduled; `num_output_placeholders` counts tokens that such steps will
    sample, `num_stale_outputs` those before them that are to be dropped.
    `num_cached_tokens` is what the prefix cache and the connector saved at the
    first admission, -1 before it.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        sampling_params: SamplingParams | None,
        pooling_params: PoolingParams | None,
        client_index: int = 0,
        arrival_time: float | None = None,
        prompt_embeds: Any = None,
        prompt_is_token_ids: list[bool] | None = None,
        mm_features: list[MultiModalFeatureSpec] | None = None,
        lora_request: LoRARequest | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        block_hasher: BlockHasher | None = None,
        resumable: bool = False,
        session_id: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        abort_immediately: bool = False,
    ) -> None:
        self.request_id = request_id
        self.client_index = client_index
        self.priority = priority
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.lora_request = lora_request
        self.cache_salt = cache_salt
        self.trace_headers = trace_headers
        self.mm_features = mm_features or []
        self.resumable = resumable
        self.session_id = session_id
        self.reasoning_ended = reasoning_ended
        self.reasoning_parser_kwargs = reasoning_parser_kwargs
        self.abort_immediately = abort_immediately
        self.max_tokens = _max_tokens(sampling_params, pooling_params)
        self.skip_reading_prefix_cache = _skips_reading_prefix_cache(
            sampling_params, pooling_params
        )
        extra_args = sampling_params.extra_args if sampling_params else None
        self.kv_transfer_params: dict[str, Any] | None = (extra_args or {}).get(
            "kv_transfer_params"
        )
        self._init_tokens(prompt_token_ids, prompt_embeds, prompt_is_token_ids)
        self._init_progress()
        self._block_hasher = block_hasher
        self.block_hashes: list[BlockHash] = []
        self.update_block_hashes()

    def _init_tokens(
        self,
        prompt_token_ids: list[int] | None,
        prompt_embeds: Any,
        prompt_is_token_ids: list[bool] | None,
    ) -> None:
        if prompt_token_ids is None and prompt_embeds is None:
            raise ValueError(
                f"request {self.request_id!r} has no prompt: pass prompt_token_ids or "
                "prompt_embeds"
            )
        self.prompt_token_ids = prompt_token_ids
        self.prompt_embeds = prompt_embeds
        self.prompt_is_token_ids = prompt_is_token_ids
        # Positions given as embeddings hold token 0; the embeddings tell them apart.
        tokens = prompt_token_ids
        known = [0] * len(prompt_embeds) if tokens is None else list(tokens)
        self.num_prompt_tokens = len(known)
        self._all_token_ids: list[int] = known
        self._output_token_ids: list[int] = []
        self.output_token_ids = ConstantList(self._output_token_ids)
        self.all_token_ids = ConstantList(self._all_token_ids)
        self.spec_token_ids: list[int] = []

    def _init_progress(self) -> None:
        self.status = RequestStatus.WAITING
        self.events: list[EngineCoreEvent] = []
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_external_computed_tokens = 0
        self.num_preemptions = 0
        self.num_output_placeholders = 0
        self.num_stale_outputs = 0
        self.is_prefill_chunk = False
        # Set when a connector failed to load this request's blocks: it is not asked
        # again.
        self.skip_external_cache = False

    @classmethod
    def from_engine_core_request(
        cls, request: EngineCoreRequest, block_hasher: BlockHasher | None = None
    ) -> "Request":
        """The request that a message asks for."""
        return cls(
            request_id=request.request_id,
            client_index=request.client_index,
            prompt_token_ids=request.prompt_token_ids,
            prompt_embeds=request.prompt_embeds,
            mm_features=request.mm_features,
            sampling_params=request.sampling_params,
            pooling_params=request.pooling_params,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
            trace_headers=request.trace_headers,
            block_hasher=block_hasher,
        )

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        """Adds generated tokens, and hashes the blocks that they fill."""
        if isinstance(token_ids, int):
            self._output_token_ids.append(token_ids)
            self._all_token_ids.append(token_ids)
        else:
            self._output_token_ids.extend(token_ids)
            self._all_token_ids.extend(token_ids)
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Hashes the full blocks that have no hash yet."""
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    def drop_last_prompt_token(self) -> None:
        """Shortens a prompt, for another engine that goes on from what comes before its
        last token. ValueError once anything is computed, and for a single token."""
        if self.num_computed_tokens or self.num_output_tokens:
            raise ValueError(f"request {self.request_id!r} has begun: its prompt stays")
        if self.num_prompt_tokens < 2:
            raise ValueError(
                f"request {self.request_id!r} has {self.num_prompt_tokens} prompt "
                "tokens: expected 2 or more"
            )
        end = self.num_prompt_tokens - 1
        # The caller's lists stay as they are.
        for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[:end])
        del self._all_token_ids[end:]
        self.num_prompt_tokens = end
        self.block_hashes.clear()
        self.update_block_hashes()

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self._all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """The same, with draft tokens."""
        return len(self._all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self._output_token_ids)

    @property
    def num_encoder_inputs(self) -> int:
        return len(self.mm_features)

    @property
    def has_encoder_inputs(self) -> bool:
        return bool(self.mm_features)

    @property
    def use_structured_output(self) -> bool:
        """Says whether the output must follow a grammar."""
        params = self.sampling_params
        return params is not None and params.structured_outputs is not None

    def get_num_encoder_embeds(self, input_id: int) -> int:
        """Prompt positions that multimodal item `input_id` fills."""
        return self.mm_features[input_id].mm_position.length

    def is_finished(self) -> bool:
        return self.status > _LAST_UNFINISHED

    def get_finished_reason(self) -> FinishReason | None:
        return RequestStatus.get_finished_reason(self.status)

    def record_event(
        self, event_type: EngineCoreEventType, timestamp: float | None = None
    ) -> None:
        """Notes that something happened; the next output carries it to the client."""
        self.events.append(EngineCoreEvent.new_event(event_type, timestamp))

    def drop_outputs_under_way(self) -> None:
        """Makes tokens that scheduled steps will bring count for nothing."""
        self.num_stale_outputs += self.num_output_placeholders
        self.num_output_placeholders = 0

    def take_events(self) -> list[EngineCoreEvent] | None:
        """The events since the last call, or None."""
        if not self.events:
            return None
        taken, self.events = self.events, []
        return taken

    def __lt__(self, other: "Request") -> bool:
        """Order of the priority queue: smaller priority first, then earlier arrival."""
        return self.sort_key() < other.sort_key()

    def sort_key(self) -> tuple[int, float, str]:
        return (self.priority, self.arrival_time, self.request_id)
