"""Writes tiny GGUF files with the gguf package's own writer."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

SIZES: dict[str, Any] = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0,
}
NUM_TOKENS = 40


def write_gguf(
    path: Path,
    arch: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    values: dict[str, Any] | None = None,
    quantized: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """A model file; `values` override or add metadata (None removes a key), keys that
    start with a dot get the architecture's prefix. 2-D blk tensors are quantised."""
    writer = gguf.GGUFWriter(path, arch)
    defaults = {f".{key}": value for key, value in SIZES.items()}
    for key, value in (defaults | (values or {})).items():
        if value is not None:
            _add(writer, arch + key if key.startswith(".") else key, value)
    for name, data in (tensors or {"token_embd.weight": _embedding()}).items():
        if quantized is not None and name.startswith("blk.") and data.ndim == 2:
            packed = gguf.quants.quantize(data, quantized)
            writer.add_tensor(name, packed, raw_dtype=quantized)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _embedding() -> np.ndarray:
    return np.zeros((NUM_TOKENS, SIZES["embedding_length"]), np.float32)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
