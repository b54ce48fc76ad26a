"""How many tokens and requests one step may take, and in which order."""

from dataclasses import InitVar, field
from typing import Any, ClassVar, Literal

from pydantic import Field

from vllm.config.utils import config

SchedulerPolicy = Literal["fcfs", "priority"]


@config
class SchedulerConfig:
    """Budgets of a step. `max_model_len` is only used to check the budgets."""

    max_model_len: InitVar[int] = 8192
    is_encoder_decoder: InitVar[bool] = False

    DEFAULT_MAX_NUM_BATCHED_TOKENS: ClassVar[int] = 2048
    DEFAULT_MAX_NUM_SEQS: ClassVar[int] = 128

    runner_type: str = "generate"
    max_num_batched_tokens: int = Field(default=DEFAULT_MAX_NUM_BATCHED_TOKENS, ge=1)
    max_num_scheduled_tokens: int | None = Field(default=None, ge=0)
    max_num_seqs: int = Field(default=DEFAULT_MAX_NUM_SEQS, ge=1)
    long_prefill_token_threshold: int = Field(default=0, ge=0)
    enable_chunked_prefill: bool = True
    is_multimodal_model: bool = False
    max_num_encoder_input_tokens: int = field(default=0, init=False)
    encoder_cache_size: int = field(default=0, init=False)
    policy: SchedulerPolicy = "fcfs"
    disable_chunked_mm_input: bool = False
    scheduler_cls: Any = None
    disable_hybrid_kv_cache_manager: bool | None = None
    scheduler_reserve_full_isl: bool = True
    watermark: float = Field(default=0.0, ge=0.0, lt=1.0)
    prefill_schedule_interval: int = Field(default=1, ge=1)
    async_scheduling: bool | None = None
    stream_interval: int = Field(default=1, ge=1)

    def __post_init__(self, max_model_len: int, is_encoder_decoder: bool) -> None:
        self.max_num_encoder_input_tokens = self.max_num_batched_tokens
        self.encoder_cache_size = self.max_num_batched_tokens
        self.verify_max_model_len(max_model_len)

    @staticmethod
    def default_factory(**kwargs: Any) -> "SchedulerConfig":
        return SchedulerConfig(**{"max_model_len": 8192, **kwargs})

    def verify_max_model_len(self, max_model_len: int) -> None:
        """Raises ValueError when the budgets cannot serve a prompt of this length."""
        if self.max_num_batched_tokens < max_model_len and not (
            self.enable_chunked_prefill
        ):
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below "
                f"max_model_len ({max_model_len}) while chunked prefill is off: raise "
                "--max-num-batched-tokens, lower --max-model-len or leave out "
                "--no-enable-chunked-prefill"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below "
                f"max_num_seqs ({self.max_num_seqs}): a step must have room for one "
                "token of each request; raise the first or lower the second"
            )
