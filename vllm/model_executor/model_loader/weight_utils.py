"""Which files hold a Hugging Face model's weights, and what their headers say.

Knows the safetensors container and the sharded index. Reads no tensor data: every
check here happens before anything is allocated.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_LENGTH_BYTES = 8  # the header's own length, little-endian
_MAX_HEADER_BYTES = 100_000_000

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """One tensor as a safetensors header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: str | Path, name: str) -> list[Path]:
    """The safetensors files of a model folder, in order.

    The index decides where there is one. Raises ValueError naming what is missing, and
    the way out when there are only pickled weights.
    """
    folder = Path(folder)
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed_files(index)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    files = sorted(folder.glob("*.safetensors"))
    # Mistral repositories carry the same weights a second time under this name.
    files = [f for f in files if not f.name.startswith("consolidated")] or files
    if files:
        return files
    pickled = sorted(f.name for glob in _PICKLED for f in folder.glob(glob))
    if pickled:
        raise ValueError(
            f"model {name!r} has pickled weights only ({pickled[0]}), which can run "
            "code when opened and are not loaded: save it as safetensors with "
            "transformers (from_pretrained, then save_pretrained)"
        )
    raise ValueError(
        f"model {name!r} has no weights in {folder}: expected {SINGLE_FILE}, "
        f"{INDEX_FILE} with its shards, or a .gguf file; download it again, or pass "
        "--load-format dummy for random weights"
    )


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is damaged ({type(error).__name__}: {error}); expected JSON with "
            "a weight_map: download it again"
        ) from error
    files = [index.parent / name for name in names]
    lost = [file.name for file in files if not file.is_file()]
    if lost:
        raise ValueError(
            f"{index} lists {len(names)} files, {len(lost)} of which are missing "
            f"({', '.join(lost[:3])}): download the rest"
        )
    return files


def read_header(path: Path) -> list[TensorHeader]:
    """Every tensor of a safetensors file, checked against the file's length.

    Raises ValueError naming the file, and the tensor where there is one, for a damaged
    header, missing or surplus bytes, and data that is not floating point.
    """
    file_bytes = path.stat().st_size
    header, data_bytes = _parsed_header(path, file_bytes)
    tensors, end = [], 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            start, stop = entry["data_offsets"]
            size = stop - start
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, f"the entry of tensor {name!r} is {entry}") from error
        if dtype not in _BYTES:
            raise ValueError(
                f"tensor {name!r} in {path} has dtype {dtype}; expected one of "
                f"{', '.join(_BYTES)}: quantised checkpoints are not supported, use "
                "the unquantised one or a GGUF file"
            )
        if size != math.prod(shape) * _BYTES[dtype]:
            raise _damaged(
                path,
                f"tensor {name!r} of shape {list(shape)} and dtype {dtype} has {size} "
                f"bytes, expected {math.prod(shape) * _BYTES[dtype]}",
            )
        if start < 0 or stop > data_bytes:
            raise ValueError(
                f"{path} is truncated: tensor {name!r} of shape {list(shape)} ends at "
                f"data byte {stop}, the file has {data_bytes}; download it again"
            )
        end = max(end, stop)
        tensors.append(TensorHeader(name=name, dtype=dtype, shape=shape))
    if end != data_bytes:
        raise _damaged(path, f"it has {data_bytes - end} bytes that no tensor names")
    return tensors


def _parsed_header(path: Path, file_bytes: int) -> tuple[dict[str, Any], int]:
    """The header as a dict, and how many bytes of data follow it."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        data_bytes = file_bytes - _LENGTH_BYTES - length
        if length == 0 or length > _MAX_HEADER_BYTES or data_bytes < 0:
            raise _damaged(
                path,
                f"its header claims {length} bytes, the file has {file_bytes} in all",
            )
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise _damaged(path, f"its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    return header, data_bytes


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path} is truncated or no safetensors file: {why}; download it again"
    )
