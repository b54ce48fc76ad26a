"""Reads a GGUF file: its metadata, and its tensors as views into the mapped file.

Knows the container only; what the keys mean is the business of `config` and
`tokenizer`, what the tensors are for that of the loader. Parses the header in one pass
over the mapped bytes, because the reader of the gguf package makes several small array
objects per vocabulary entry (2 s for 49,152 tokens; this takes a few 10 ms).
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# The gguf package decodes 16 rows a call: of so many elements they fit into a cache.
_LONG_ROW = 1 << 14

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
_SCALARS = {  # GGUF value type -> struct code
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """One tensor: `shape` in row-major order (the reverse of what the file says)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """Metadata and tensor table of one file; tensor bytes are read when asked for.

    Raises ValueError, naming the file, for a wrong magic or version, a truncated file
    and a tensor type that the gguf package does not know.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if os.path.getsize(self.path) < 24:
            raise ValueError(
                f"{self.path} is no GGUF file: it is shorter than a header"
            )
        with open(self.path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._array = np.frombuffer(self._map, dtype=np.uint8)
        self._bytes = memoryview(self._map)
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ValueError(
                f"GGUF file {self.path} is truncated or damaged in its header (byte "
                f"{self._at} of {len(self._bytes)}): download it again"
            ) from error

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; a leading "." stands for the architecture's own prefix."""
        if key.startswith("."):
            key = self.architecture + key
        return self.metadata.get(key, default)

    def raw_rows(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The stored bytes as [rows, bytes of a row], mapped, read-only."""
        data = self._array[tensor.offset : tensor.offset + tensor.num_bytes]
        return data.reshape(math.prod(tensor.shape[:-1]), -1)

    def dequantize(
        self, tensor: GGUFTensor, rows: slice | None = None
    ) -> npt.NDArray[np.float32]:
        """Values of a tensor, or of some of its rows, as float32 [rows, columns]."""
        data = self.raw_rows(tensor)
        if rows is not None:
            data = data[rows]
        plain = _PLAIN_TYPES.get(tensor.type)
        if plain is not None:
            return data.view(plain).astype(np.float32, copy=False)
        columns = tensor.shape[-1]
        together = math.gcd(len(data), max(1, _LONG_ROW // columns))
        # Blocks know nothing of rows: longer ones mean fewer calls.
        values = dequantize(data.reshape(len(data) // together, -1), tensor.type)
        return values.reshape(len(data), columns)

    def release(self) -> None:
        """Takes what was read out of this process's memory; the system may keep it. It
        comes back when it is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _read_header(self) -> None:
        if bytes(self._bytes[:4]) != MAGIC:
            raise ValueError(f"{self.path} is no GGUF file: expected magic {MAGIC!r}")
        self._at = 4
        version = self._scalar("I")
        if version not in VERSIONS:
            hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise ValueError(
                f"GGUF file {self.path} has version {version}{hint}; supported are "
                f"{VERSIONS}, little-endian: convert it again"
            )
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        for name, shape, type_id, offset in infos:
            self.tensors[name] = self._placed(name, shape, type_id, start + offset)

    def _scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self._bytes, self._at)
        self._at += layout.size
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._bytes):
            raise IndexError(self._at)
        return str(self._bytes[start : self._at], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._code(kind))
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        layout = np.dtype(f"<{self._code(kind)}" if kind != 7 else np.bool_)
        start, self._at = self._at, self._at + count * layout.itemsize
        if self._at > len(self._bytes):
            raise IndexError(self._at)
        return np.frombuffer(self._bytes[start : self._at], layout).tolist()

    def _strings(self, count: int) -> list[str]:
        """`count` strings, in one tight loop: vocabularies have 10^5 of them."""
        data, at = self._bytes, self._at
        end = len(data)
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0]
            if at > end:
                raise IndexError(at)
            strings.append(str(data[start:at], "utf-8"))
        self._at = at
        return strings

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(
                f"GGUF file {self.path} holds a value of unknown type {kind} at byte "
                f"{self._at}: it is damaged or newer than this reader"
            )
        return _SCALARS[kind]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        dims = [self._scalar("Q") for _ in range(num_dims)]
        return name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q")

    def _placed(
        self, name: str, shape: tuple[int, ...], type_id: int, offset: int
    ) -> GGUFTensor:
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise ValueError(
                f"GGUF file {self.path}: tensor {name!r} has unknown type {type_id}; "
                "upgrade the gguf package or use another quantisation"
            ) from None
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(shape) * block_bytes // per_block
        if offset + num_bytes > len(self._bytes):
            raise ValueError(
                f"GGUF file {self.path} is truncated: tensor {name!r} needs bytes "
                f"{offset} to {offset + num_bytes}, the file has {len(self._bytes)}; "
                "download it again"
            )
        return GGUFTensor(
            name=name, shape=shape, type=kind, offset=offset, num_bytes=num_bytes
        )


_PLAIN_TYPES = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F64: np.float64,
}


@lru_cache(maxsize=2)
def _opened(path: str, num_bytes: int, modified_ns: int) -> GGUFFile:
    return GGUFFile(path)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """The parsed file; config, tokenizer and loader of one start share one parse."""
    stat = Path(path).stat()
    return _opened(os.fspath(path), stat.st_size, stat.st_mtime_ns)
