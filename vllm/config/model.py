"""Which model is served: its source, its architecture, its dtype and its lengths."""

from dataclasses import field
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import Field, field_validator

from vllm.config.generation import check_override, check_values, sampling_defaults
from vllm.config.parallel import ParallelConfig
from vllm.config.utils import config
from vllm.transformers_utils.architectures import STATE_LAYER_TYPES
from vllm.transformers_utils.config import (
    generation_config_of,
    get_config,
    get_generation_config,
)
from vllm.transformers_utils.source import ModelSource, resolve_model

_DTYPES = {
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
# Keys under which Hugging Face configs state the longest sequence, best first.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_DEFAULT_MAX_LEN = 2048

RunnerOption = Literal["auto", "generate", "pooling", "draft"]
LogprobsMode = Literal[
    "raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"
]


@config
class ModelConfig:
    """The model as asked for, and what its config file says about it.

    After construction `dtype` is a torch dtype, `max_model_len` an int (or -1: as long
    as the KV cache allows), and `hf_config` the Hugging Face config of the source.
    """

    model: str = "smollm2-135m"
    model_weights: str = ""
    runner: RunnerOption = "auto"
    convert: str = "auto"
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    trust_remote_code: bool = False
    dtype: Any = "auto"
    seed: int = 0
    hf_config: Any = field(default=None, init=False)
    hf_text_config: Any = field(default=None, init=False)
    hf_config_path: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    max_model_len: int | None = Field(default=None, ge=-1)
    quantization: str | None = None
    enforce_eager: bool = False
    max_logprobs: int = Field(default=20, ge=-1)
    logprobs_mode: LogprobsMode = "raw_logprobs"
    disable_sliding_window: bool = False
    disable_cascade_attn: bool = True
    skip_tokenizer_init: bool = False
    served_model_name: str | list[str] | None = None
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    logits_processors: list[Any] | None = None
    model_impl: str = "auto"
    source: ModelSource = field(default=None, init=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.source = resolve_model(self.model, self.revision)
        if self.served_model_name is None:
            self.served_model_name = self.model
        if not all(name.strip() for name in self.served_names):
            raise ValueError(
                f"served_model_name {self.served_model_name!r} has an empty name: "
                "expected names that requests can give, or nothing to take the model's "
                "(--served-model-name)"
            )
        self.hf_config = get_config(
            self.source,
            self.trust_remote_code,
            self.hf_overrides,
            self.model_impl,
        )
        self.hf_text_config = self.hf_config.get_text_config()
        self.dtype = _resolve_dtype(self.dtype, self.hf_config)
        self.max_model_len = self._checked_max_model_len()
        self._check_generation()

    def _check_generation(self) -> None:
        """ValueError, before a core is started, for settings that cannot be used."""
        check_override(self.override_generation_config, "override_generation_config")
        _ = self.generation_defaults

    @field_validator("quantization")
    @classmethod
    def _no_weight_quantization(cls, value: str | None) -> str | None:
        if value not in (None, "gguf"):
            raise ValueError(
                f"quantization {value!r} is not supported: expected none, or gguf, "
                "whose weights are dequantised to the model dtype on loading"
            )
        return value

    @property
    def architectures(self) -> list[str]:
        return list(getattr(self.hf_config, "architectures", None) or [])

    @property
    def architecture(self) -> str:
        return self.architectures[0]

    @property
    def served_names(self) -> list[str]:
        """Names that requests may give; the first one is reported back."""
        names = self.served_model_name
        return [names] if isinstance(names, str) else list(names or [self.model])

    @property
    def use_mla(self) -> bool:
        return getattr(self.hf_text_config, "kv_lora_rank", None) is not None

    @property
    def is_deepseek_mla(self) -> bool:
        return self.use_mla

    @property
    def is_hybrid(self) -> bool:
        kinds = getattr(self.hf_text_config, "layer_types", None) or []
        return any(kind in STATE_LAYER_TYPES for kind in kinds)

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(getattr(self.hf_config, "is_encoder_decoder", False))

    @property
    def is_attention_free(self) -> bool:
        return False

    @cached_property
    def derived_max_model_len(self) -> int:
        """The longest sequence that the model's own config allows, in tokens."""
        lengths = [
            length
            for key in _LENGTH_KEYS
            if (length := getattr(self.hf_text_config, key, None)) is not None
        ]
        longest = min(lengths) if lengths else _DEFAULT_MAX_LEN
        rope = getattr(self.hf_text_config, "rope_parameters", None) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        original = rope.get("original_max_position_embeddings")
        if kind == "yarn" and original and "factor" in rope:
            longest = max(longest, int(original * rope["factor"]))
        return int(longest)

    def _checked_max_model_len(self) -> int:
        longest, wanted = self.derived_max_model_len, self.max_model_len
        if wanted is None:
            return longest
        if wanted == 0 or wanted > longest:
            raise ValueError(
                f"max_model_len {wanted} is outside what {self.model!r} supports: "
                f"expected 1 to {longest} tokens (its config's position limit), or -1 "
                "to take what the KV cache can hold; correct --max-model-len, or leave "
                "it out"
            )
        return wanted

    def get_vocab_size(self) -> int:
        return int(self.hf_text_config.vocab_size)

    def get_hidden_size(self) -> int:
        return int(self.hf_text_config.hidden_size)

    def get_head_size(self) -> int:
        """K head size in elements; the latent (with rope part) for an MLA model."""
        text = self.hf_text_config
        if self.use_mla:
            return int(text.kv_lora_rank + text.qk_rope_head_dim)
        head_dim = getattr(text, "head_dim", None)
        return int(head_dim or text.hidden_size // text.num_attention_heads)

    def get_total_num_attention_heads(self) -> int:
        return int(self.hf_text_config.num_attention_heads)

    def get_num_attention_heads(self, parallel_config: ParallelConfig) -> int:
        ranks = parallel_config.tensor_parallel_size
        return self.get_total_num_attention_heads() // ranks

    def get_total_num_kv_heads(self) -> int:
        if self.use_mla:
            return 1
        heads = getattr(self.hf_text_config, "num_key_value_heads", None)
        return int(heads or self.get_total_num_attention_heads())

    def get_num_kv_heads(self, parallel_config: ParallelConfig) -> int:
        """KV heads of one tensor-parallel rank; heads are replicated below one."""
        ranks = parallel_config.tensor_parallel_size
        return max(1, self.get_total_num_kv_heads() // ranks)

    def get_total_num_hidden_layers(self) -> int:
        return int(self.hf_text_config.num_hidden_layers)

    def get_num_layers(self, parallel_config: ParallelConfig) -> int:
        ranks = parallel_config.pipeline_parallel_size
        return self.get_total_num_hidden_layers() // ranks

    def get_sliding_window(self) -> int | None:
        """The window of the model's windowed layers, or None when it has none."""
        if self.disable_sliding_window:
            return None
        text = self.hf_text_config
        if getattr(text, "use_sliding_window", True) is False:
            return None
        return getattr(text, "sliding_window", None)

    @cached_property
    def generation_defaults(self) -> dict[str, Any]:
        """The checkpoint's generation settings, overridden by the user's."""
        return {**self._stated_generation(), **self.override_generation_config}

    def _stated_generation(self) -> dict[str, Any]:
        """What `generation_config` chooses: a folder's settings, the checkpoint's or
        none."""
        chosen = self.generation_config
        if chosen == "vllm":
            return {}
        if chosen == "auto":
            return get_generation_config(self.source)
        settings = generation_config_of(chosen)
        check_values(settings, f"generation_config {chosen!r}")
        return settings

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Sampling defaults that the checkpoint states, under SamplingParams' names."""
        return sampling_defaults(self.generation_defaults)


def _resolve_dtype(wanted: Any, hf_config: Any) -> torch.dtype:
    """The torch dtype of weights and activations; float32 checkpoints become bfloat16
    under "auto", as a serving engine's users expect."""
    if isinstance(wanted, torch.dtype):
        if wanted not in _DTYPES.values():
            raise ValueError(f"dtype {wanted} is not supported: {_dtype_choices()}")
        return wanted
    if wanted != "auto":
        if wanted not in _DTYPES:
            raise ValueError(f"unknown dtype {wanted!r}: {_dtype_choices()}")
        return _DTYPES[wanted]
    stated = getattr(hf_config, "dtype", None)
    if isinstance(stated, str):
        stated = _DTYPES.get(stated.removeprefix("torch."))
    return stated if stated is torch.float16 else torch.bfloat16


def _dtype_choices() -> str:
    return f"expected one of auto, {', '.join(_DTYPES)} (--dtype)"
