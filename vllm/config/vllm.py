"""The whole configuration of an engine, and which one is current while it is built."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from typing import Any

from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig
from vllm.config.device import DeviceConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig
from vllm.config.observability import (
    ECTransferConfig,
    ObservabilityConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.utils import config


@config
class VllmConfig:
    """All parts of the configuration. `model_config` may be None in tests.

    Raises ValueError when parts contradict each other.
    """

    model_config: ModelConfig | None = None
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = field(
        default_factory=SchedulerConfig.default_factory
    )
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    attention_config: AttentionConfig = field(default_factory=AttentionConfig)
    lora_config: Any = None
    speculative_config: SpeculativeConfig | None = None
    structured_outputs_config: StructuredOutputsConfig = field(
        default_factory=StructuredOutputsConfig
    )
    observability_config: ObservabilityConfig = field(
        default_factory=ObservabilityConfig
    )
    quant_config: Any = None
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    kv_transfer_config: KVTransferConfig | None = None
    kv_events_config: KVEventsConfig | None = None
    ec_transfer_config: ECTransferConfig | None = None
    additional_config: dict[str, Any] = field(default_factory=dict)
    instance_id: str = ""

    def __post_init__(self) -> None:
        if self.model_config is not None and self.model_config.max_model_len > 0:
            self.scheduler_config.verify_max_model_len(self.model_config.max_model_len)
        if self.lora_config is not None or self.speculative_config is not None:
            part = "LoRA" if self.lora_config is not None else "speculative decoding"
            raise ValueError(f"{part} is not supported: leave its options out")

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once."""
        return 2 if self.scheduler_config.async_scheduling else 1

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens scheduled whose results are not back yet, at most."""
        return (
            self.max_concurrent_batches * self.scheduler_config.max_num_batched_tokens
        )

    @property
    def kv_transfer_is_on(self) -> bool:
        transfer = self.kv_transfer_config
        return transfer is not None and transfer.is_kv_transfer_instance


_current: ContextVar[VllmConfig | None] = ContextVar("vllm_config", default=None)


@contextmanager
def set_current_vllm_config(vllm_config: VllmConfig, **_: Any) -> Iterator[None]:
    """Makes a config current while layers are built."""
    token = _current.set(vllm_config)
    try:
        yield
    finally:
        _current.reset(token)


def get_current_vllm_config_or_none() -> VllmConfig | None:
    """The config under construction, or None outside of one."""
    return _current.get()


def get_current_vllm_config() -> VllmConfig:
    """The config under construction.

    Raises RuntimeError outside of `set_current_vllm_config`.
    """
    found = _current.get()
    if found is None:
        raise RuntimeError(
            "no VllmConfig is current: build layers inside "
            "`with set_current_vllm_config(vllm_config):`"
        )
    return found
