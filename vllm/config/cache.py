"""What was asked of the KV cache: format, block size, memory, prefix caching."""

import re
from dataclasses import field
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from vllm.config.utils import config
from vllm.v1.kv_formats.mode import CACHE_DTYPES

# Words that `kv_cache_dtype_skip_layers` takes besides numbers: every layer with a
# window; and no layer that a format would leave dense by default.
_SKIP_WORDS = ("sliding_window", "none")
_LAYER_RANGE = re.compile(r"(\d+)-(\d+)")

PrefixCachingHashAlgo = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
MambaDType = Literal["auto", "float32", "float16", "bfloat16"]
MambaCacheMode = Literal["all", "align", "none"]
KVOffloadingBackend = Literal["native", "lmcache"]


@config
class CacheConfig:
    """KV-cache settings. Sizes are in tokens unless the name says bytes.

    Fields with `init=False` are filled in at start-up: `num_gpu_blocks` blocks in the
    pool, `kv_cache_size_tokens` tokens it holds, `kv_cache_max_concurrency` requests of
    the maximum length it serves at once.
    """

    DEFAULT_BLOCK_SIZE: ClassVar[int] = 16

    block_size: int | None = Field(default=None, gt=0)
    user_specified_block_size: bool = field(default=False, init=False)
    user_specified_mamba_block_size: bool = field(default=False, init=False)
    prefix_match_unit: int | None = Field(default=None, gt=0)
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)
    cache_dtype: str = "auto"
    is_attention_free: bool = False
    num_gpu_blocks_override: int | None = Field(default=None, gt=0)
    sliding_window: int | None = None
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: PrefixCachingHashAlgo = "sha256"
    kv_cache_dtype_skip_layers: list[str] = field(default_factory=list)
    mamba_page_size_padded: int | None = None
    skip_page_size_padded: int | None = None
    mamba_block_size: int | None = Field(default=None, gt=0)
    mamba_cache_dtype: MambaDType = "auto"
    mamba_ssm_cache_dtype: MambaDType = "auto"
    mamba_cache_mode: MambaCacheMode = "none"
    replayssm_buffer_len: int = Field(default=16, gt=0)
    use_replayssm: bool = False
    num_gpu_blocks: int | None = field(default=None, init=False)
    num_cpu_blocks: int | None = field(default=None, init=False)
    kv_cache_size_tokens: int | None = field(default=None, init=False)
    kv_cache_max_concurrency: float | None = field(default=None, init=False)
    kv_sharing_fast_prefill: bool = False
    kv_cache_memory_bytes: int | None = Field(default=None, gt=0)
    kv_offloading_size: float | None = None
    kv_offloading_backend: KVOffloadingBackend = "native"
    _block_size_resolved: bool = field(default=False, init=False)
    _skip_layers_resolved: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.user_specified_block_size = self.block_size is not None
        self.user_specified_mamba_block_size = self.mamba_block_size is not None
        if self.block_size is None:
            self.block_size = self.DEFAULT_BLOCK_SIZE

    @field_validator("cache_dtype")
    @classmethod
    def _known_cache_dtype(cls, value: str) -> str:
        if value not in CACHE_DTYPES:
            raise ValueError(
                f"unknown KV cache dtype {value!r}: expected one of "
                f"{', '.join(CACHE_DTYPES)} (--kv-cache-dtype)"
            )
        return value

    @field_validator("kv_cache_dtype_skip_layers", mode="before")
    @classmethod
    def _one_layer_each(cls, value: Any) -> list[str]:
        """Layer numbers and words, one each: "0,3-5" and "3-5" are taken apart."""
        entries = [value] if isinstance(value, (str, int)) else value
        parts = [p.strip() for entry in entries for p in str(entry).split(",")]
        return [layer for part in parts if part for layer in _skipped_layers(part)]

    def metrics_info(self) -> dict[str, str]:
        """The labels of the metric `vllm:cache_config_info`, as text."""
        names = [n for n in self.__dataclass_fields__ if not n.startswith("_")]
        return {name: str(getattr(self, name)) for name in names}


def _skipped_layers(entry: str) -> list[str]:
    """The layers of one entry: a number, a range with both ends, or a word."""
    if entry.isdecimal() or entry in _SKIP_WORDS:
        return [entry]
    found = _LAYER_RANGE.fullmatch(entry)
    first, last = (int(found[1]), int(found[2])) if found else (1, 0)
    if first > last:
        raise ValueError(
            f"{entry!r} names no layers: expected a layer number, a range like 3-7, or "
            f"one of {', '.join(_SKIP_WORDS)} (--kv-cache-dtype-skip-layers)"
        )
    return [str(layer) for layer in range(first, last + 1)]
