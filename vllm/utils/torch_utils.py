"""Torch helpers and facts about cache dtypes, under the names that callers know.

Sizes and storage types are asked of the KV-cache formats; nothing is decided here.
"""

from typing import Protocol, TypeVar

import torch

from vllm.v1.kv_formats import all_formats, by_mode, by_name, mode_by_name
from vllm.v1.kv_formats.mode import KVQuantMode

T = TypeVar("T", int, float)

_PLAIN_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}

# Storage type of every cache dtype, and plain torch types by name. "auto" is absent:
# it depends on the model.
STR_DTYPE_TO_TORCH_DTYPE: dict[str, torch.dtype] = _PLAIN_DTYPES | {
    fmt.name: fmt.storage_dtype(torch.bfloat16)
    for fmt in all_formats()
    if fmt.resolve(torch.bfloat16) is fmt
}


class HasDtype(Protocol):
    """A model config, as far as this module looks."""

    dtype: torch.dtype


def get_dtype_size(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return dtype.itemsize


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """True for cache dtypes whose mode is not NONE. ValueError for unknown names."""
    return mode_by_name(kv_cache_dtype).is_quantized


def kv_cache_dtype_str_to_dtype(
    kv_cache_dtype: str, model_config: HasDtype | None = None
) -> torch.dtype:
    """Element type of the cache tensor; "auto" is the model's dtype (else float16)."""
    model_dtype = model_config.dtype if model_config is not None else torch.float16
    return by_name(kv_cache_dtype).storage_dtype(model_dtype)


def nvfp4_kv_cache_full_dim(head_size: int) -> int:
    """Bytes of one NVFP4 cell: the packed codes of K or V and their scales."""
    return by_mode(KVQuantMode.NVFP4).layout(head_size, head_size).nbytes


def make_tensor_with_pad(
    x: list[list[T]],
    pad: T,
    dtype: torch.dtype,
    *,
    max_len: int | None = None,
    device: str | torch.device | None = None,
    pin_memory: bool = False,
) -> torch.Tensor:
    """A tensor [len(x), max_len] of the rows of x, filled up with `pad`.

    `max_len` is the longest row by default. ValueError when a row is longer than it.
    """
    longest = max((len(row) for row in x), default=0)
    width = longest if max_len is None else max_len
    if longest > width:
        raise ValueError(f"a row of {longest} elements does not fit max_len={width}")
    rows = [[*row, *[pad] * (width - len(row))] for row in x]
    tensor = torch.tensor(rows, dtype=dtype, pin_memory=pin_memory)
    tensor = tensor.reshape(len(x), width)
    return tensor if device is None else tensor.to(device, non_blocking=True)
