"""Whose states a stored page holds: a name that changes with the weights, and the
folder of that name.

Knows a model's config and files. Pages of another model have the same sizes.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.page_store import PageStore

_SAMPLE_BYTES = 1 << 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def _weight_files(source: Any) -> list[Path]:
    path = Path(source.path)
    if path.is_file():
        return [path]
    return sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))


def _sample(path: Path) -> bytes:
    """Size and bytes from start, middle and end: weights are too large to hash."""
    size = path.stat().st_size
    state = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for at in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(at)
            state.update(file.read(_SAMPLE_BYTES))
    return state.digest()


def model_identity(vllm_config: Any) -> str:
    """A digest of the model's config, dtype and weights, 16 hex digits.

    The same for the same files in any process and folder.
    """
    model = vllm_config.model_config
    state = hashlib.sha256()
    for part in (
        json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str),
        str(model.dtype),
        str(model.disable_sliding_window),
        f"{vllm_config.load_config.load_format} {model.seed}"
        if vllm_config.load_config.load_format == "dummy"
        else "",
    ):
        state.update(part.encode())
    for path in _weight_files(model.source):
        state.update(_sample(path))
    return state.hexdigest()[:16]


def model_store(
    vllm_config: Any, transfer: KVTransferConfig, setting: str
) -> PageStore | None:
    """The store in the folder that a setting of the connector names; None without it.

    Engines of one model share pages: its identity is the name of the folder within.
    """
    path = transfer.get_from_extra_config(setting, None)
    if not path:
        return None
    return PageStore(Path(path) / model_identity(vllm_config), setting)
