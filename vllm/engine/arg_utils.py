"""Engine arguments: one dataclass for Python, the command line and the configs."""

import argparse
import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, get_args

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.transformers_utils.architectures import MODEL_IMPLS
from vllm.utils.argparse_utils import FlexibleArgumentParser, json_value
from vllm.utils.mem_constants import GiB_bytes
from vllm.utils.mem_utils import parse_size
from vllm.v1.kv_formats.mode import CACHE_DTYPES


def _arg(default: Any, help_text: str, **cli: Any) -> Any:
    """A field with its command-line description; `cli` goes to argparse as it is."""
    metadata = {"help": help_text, "cli": cli}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _flag(default: bool | None, help_text: str) -> Any:
    return _arg(default, help_text, action=argparse.BooleanOptionalAction)


def memory_option(text: str) -> int:
    """What argparse takes for an amount of memory."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_JSON = {"type": json_value, "metavar": "JSON"}


@dataclass
class EngineArgs:
    """Everything that can be asked of an engine. Sizes are in tokens unless named."""

    # model
    model: str = _arg("smollm2-135m", "path, GGUF file, hub name or built-in name")
    tokenizer: str | None = _arg(None, "tokenizer path when it is not the model's")
    tokenizer_mode: str = _arg("auto", "accepted for compatibility")
    skip_tokenizer_init: bool = _flag(False, "serve token ids only")
    trust_remote_code: bool = _flag(False, "run code that comes with the checkpoint")
    revision: str | None = _arg(None, "branch, tag or commit of a hub model")
    dtype: Any = _arg("auto", "auto, float32, float16 or bfloat16")
    seed: int = _arg(0, "seed of sampling", type=int)
    max_model_len: int | None = _arg(
        None, "longest sequence; -1: the longest that the KV cache holds", type=int
    )
    quantization: str | None = _arg(None, "gguf, or nothing")
    enforce_eager: bool = _flag(False, "run the model with plain PyTorch calls")
    max_logprobs: int = _arg(20, "most logprobs a request may ask for", type=int)
    logprobs_mode: str = _arg("raw_logprobs", "which logprobs are returned")
    served_model_name: str | list[str] | None = _arg(
        None, "names that requests may give", nargs="+"
    )
    hf_overrides: dict = _arg({}, "values that replace those of config.json", **_JSON)
    disable_sliding_window: bool = _flag(False, "attend to everything in every layer")
    generation_config: str = _arg(
        "auto", "auto: the checkpoint's; vllm: none; or a folder with such a file"
    )
    override_generation_config: dict = _arg({}, "generation settings", **_JSON)
    logits_processors: list[Any] | None = _arg(
        None, "logits processors as module:Class", nargs="+"
    )
    model_impl: str = _arg(
        "auto", "whose code computes the model", choices=list(MODEL_IMPLS)
    )
    load_format: str = _arg("auto", "auto, safetensors, gguf or dummy")
    download_dir: str | None = _arg(None, "where hub downloads go")
    # KV cache
    kv_cache_dtype: str = _arg("auto", "KV format", choices=CACHE_DTYPES)
    kv_cache_dtype_skip_layers: list[str] = _arg(
        [],
        "layers kept in the model dtype: numbers, ranges like 3-7, sliding_window; "
        "none: no default ones either",
        nargs="+",
    )
    block_size: int | None = _arg(None, "tokens of one block", type=int)
    mamba_block_size: int | None = _arg(
        None, "tokens between cached recurrent states", type=int
    )
    mamba_cache_mode: str = _arg(
        "none", "recurrent states that are cached", choices=["none", "align", "all"]
    )
    mamba_cache_dtype: str = _arg("auto", "dtype of convolution states")
    mamba_ssm_cache_dtype: str = _arg("auto", "dtype of recurrent states")
    kv_cache_memory_bytes: int | str | None = _arg(
        None, "memory of the KV cache, for example 4GiB", type=memory_option
    )
    gpu_memory_utilization: float = _arg(0.92, "share of device memory", type=float)
    num_gpu_blocks_override: int | None = _arg(None, "blocks in the pool", type=int)
    enable_prefix_caching: bool = _flag(True, "reuse blocks of equal prefixes")
    prefix_caching_hash_algo: str = _arg("sha256", "hash of block contents")
    attention_backend: str | None = _arg(None, "attention backend by name")
    attention_config: dict = _arg({}, "attention settings", **_JSON)
    # scheduling
    max_num_batched_tokens: int | None = _arg(None, "tokens of one step", type=int)
    max_num_seqs: int | None = _arg(None, "requests of one step", type=int)
    long_prefill_token_threshold: int = _arg(
        0, "prompts above this are computed in parts of this size", type=int
    )
    enable_chunked_prefill: bool = _flag(True, "split prompts over steps")
    scheduling_policy: str = _arg("fcfs", "order", choices=["fcfs", "priority"])
    disable_hybrid_kv_cache_manager: bool | None = _flag(
        None, "one block size for layers of every kind"
    )
    async_scheduling: bool | None = _flag(None, "accepted for compatibility")
    stream_interval: int = _arg(1, "tokens between stream chunks", type=int)
    # devices
    device: str = _arg("auto", "auto, cpu or cuda")
    tensor_parallel_size: int = _arg(1, "ranks that share each layer", type=int)
    pipeline_parallel_size: int = _arg(1, "ranks that share the layers", type=int)
    data_parallel_size: int = _arg(1, "copies of the engine", type=int)
    distributed_executor_backend: Any = _arg(None, "uni, mp or ray")
    worker_cls: str = _arg("auto", "worker class by dotted path")
    # connectors, events, the rest
    kv_transfer_config: Any = _arg(None, "KV connector settings", **_JSON)
    kv_offloading_size: float | None = _arg(
        None, "GiB of host memory for KV blocks that were used before", type=float
    )
    kv_offloading_backend: str = _arg(
        "native", "what keeps them", choices=["native", "lmcache"]
    )
    kv_events_config: Any = _arg(None, "KV event settings", **_JSON)
    additional_config: dict = _arg({}, "settings for plugins", **_JSON)
    structured_outputs_config: dict = _arg({}, "structured output settings", **_JSON)
    disable_log_stats: bool = _flag(False, "no periodic statistics")

    def __post_init__(self) -> None:
        load_general_plugins()
        for entry in dataclasses.fields(self):
            if isinstance(getattr(self, entry.name), bool) and _is_number(entry.type):
                raise ValueError(
                    f"{entry.name}={getattr(self, entry.name)}: expected a number"
                )
        if self.kv_cache_memory_bytes is not None:
            try:
                self.kv_cache_memory_bytes = parse_size(self.kv_cache_memory_bytes)
            except ValueError as error:
                raise ValueError(f"kv_cache_memory_bytes: {error}") from None

    @classmethod
    def add_cli_args(cls, parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
        """Adds one option per field; `model` is left to the command, which may take it
        as its positional argument. Plugins may add choices before."""
        load_general_plugins()
        for entry in dataclasses.fields(cls):
            if entry.name == "model":
                continue
            default = (
                entry.default_factory()
                if entry.default is dataclasses.MISSING
                else entry.default
            )
            option = f"--{entry.name.replace('_', '-')}"
            parser.add_argument(
                option,
                default=default,
                help=entry.metadata["help"],
                **entry.metadata["cli"],
            )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        names = [f.name for f in dataclasses.fields(cls) if hasattr(args, f.name)]
        return cls(**{name: getattr(args, name) for name in names})

    def create_model_config(self) -> ModelConfig:
        return ModelConfig(**self._values_of(ModelConfig))

    def create_engine_config(self, usage_context: Any = None) -> VllmConfig:
        """Builds and checks the whole configuration.

        Raises ValueError, before weights are read or memory is taken, for anything that
        this platform cannot serve.
        """
        model_config = self.create_model_config()
        max_len = model_config.max_model_len
        config = VllmConfig(
            model_config=model_config,
            cache_config=self._cache_config(),
            parallel_config=ParallelConfig(**self._values_of(ParallelConfig)),
            scheduler_config=self._scheduler_config(max_len),
            device_config=DeviceConfig(device=self.device),
            load_config=LoadConfig(**self._values_of(LoadConfig)),
            attention_config=self._attention_config(),
            structured_outputs_config=StructuredOutputsConfig(
                **self.structured_outputs_config
            ),
            observability_config=ObservabilityConfig(),
            kv_transfer_config=self._kv_transfer_config(),
            kv_events_config=_as(KVEventsConfig, self.kv_events_config),
            additional_config=self.additional_config,
        )
        current_platform.check_and_update_config(config)
        return config

    def _values_of(self, config_cls: type) -> dict[str, Any]:
        """This object's values for the fields that it shares with a config class."""
        mine = {f.name for f in dataclasses.fields(self)}
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(config_cls)
            if f.init and f.name in mine
        }

    def _cache_config(self) -> CacheConfig:
        values = self._values_of(CacheConfig)
        layers = [
            part.strip()
            for entry in self.kv_cache_dtype_skip_layers
            for part in str(entry).split(",")
            if part.strip()
        ]
        values.update(
            cache_dtype=self.kv_cache_dtype, kv_cache_dtype_skip_layers=layers
        )
        return CacheConfig(**values)

    def _scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        values = self._values_of(SchedulerConfig)
        # A value that is refused decides no other one, which nobody gave.
        tokens = self.max_num_batched_tokens
        if tokens is None:
            asked = self.max_num_seqs if _is_count(self.max_num_seqs) else 0
            tokens = max(current_platform.default_step_tokens, asked)
            if not self.enable_chunked_prefill:
                tokens = max(tokens, max_model_len)
        seqs = self.max_num_seqs
        if seqs is None:
            seqs = SchedulerConfig.DEFAULT_MAX_NUM_SEQS
            if _is_count(tokens):
                seqs = min(seqs, tokens)
        values.update(
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            policy=self.scheduling_policy,
        )
        return SchedulerConfig(max_model_len=max(max_model_len, 1), **values)

    def _kv_transfer_config(self) -> KVTransferConfig | None:
        """The connector as asked for, or the one that --kv-offloading-size stands
        for."""
        given: KVTransferConfig | None = _as(KVTransferConfig, self.kv_transfer_config)
        if self.kv_offloading_size is None:
            return given
        if self.kv_offloading_backend != "native":
            raise ValueError(
                f"--kv-offloading-backend {self.kv_offloading_backend} is not built "
                "in: expected native"
            )
        if given is not None:
            raise ValueError(
                "--kv-offloading-size sets up a KV connector, and so does "
                "--kv-transfer-config: leave one out, or name OffloadingConnector "
                "beside the other in a MultiConnector"
            )
        size = self.kv_offloading_size
        if not isinstance(size, (int, float)) or not 0 < size < math.inf:
            raise ValueError(
                f"--kv-offloading-size {size} is no amount of memory: expected a "
                "number of GiB above 0, for example 4; or leave it out"
            )
        return KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "cpu_bytes_to_use": max(int(size * GiB_bytes), 1)
            },
        )

    def _attention_config(self) -> AttentionConfig:
        values = dict(self.attention_config)
        if self.attention_backend is not None:
            values["backend"] = self.attention_backend
        return AttentionConfig(**values)


def _is_number(kind: Any) -> bool:
    """Says whether a field of this type takes numbers, and no truth values."""
    kinds = {kind, *get_args(kind)}
    return bool(kinds & {int, float}) and bool not in kinds


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _as(config_cls: type, value: Any) -> Any:
    """The value as a config object: a mapping becomes one, None stays None."""
    return config_cls(**value) if isinstance(value, dict) else value


@dataclass
class AsyncEngineArgs(EngineArgs):
    """Engine arguments of a server."""

    enable_log_requests: bool = _flag(False, "log each request")
