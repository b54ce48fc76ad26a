"""Turns messages into bytes and back: msgpack, with arrays as raw bytes.

Knows arrays, tensors and plain data. Refuses everything else on both sides: nothing
here can run code that arrives on the wire.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec
import numpy as np
import torch

Frame: TypeAlias = bytes | bytearray | memoryview

_EXT_ARRAY = 1
# Arrays of at least this many bytes travel as frames of their own, without a copy.
_FRAME_THRESHOLD_BYTES = 4096

_TORCH_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}
_NUMPY_KINDS = "biufc"


class _ArrayHeader(msgspec.Struct, array_like=True):
    """What an array is: "torch" or "numpy", its dtype and shape, and where its bytes
    are: in frame number `frame`, or right here in `data` when `frame` is 0."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    frame: int = 0
    data: bytes = b""


class PydanticMsgspecMixin:
    """Marks msgspec structs that other code may use as pydantic fields."""

    __pydantic_msgspec_exclude__: ClassVar[set[str]] = set()


class MsgpackEncoder:
    """Encodes a message into frames: msgpack first, then the bytes of large arrays.

    `encode` raises TypeError, naming the type, for what is not plain data.
    """

    def __init__(self, frame_threshold_bytes: int = _FRAME_THRESHOLD_BYTES) -> None:
        self._threshold = frame_threshold_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_other)
        self._header_encoder = msgspec.msgpack.Encoder()
        self._frames: list[Frame] = []

    def encode(self, obj: Any) -> list[Frame]:
        """The frames of `obj`; frames after the first may alias its arrays."""
        self._frames = [b""]
        try:
            self._frames[0] = self._encoder.encode(obj)
            return self._frames
        finally:
            self._frames = []

    def _encode_other(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            name = str(obj.dtype).removeprefix("torch.")
            flat = obj.detach().cpu().contiguous().reshape(-1)
            data = memoryview(flat.view(torch.uint8).numpy())
            return self._encode_array("torch", name, tuple(obj.shape), data)
        if isinstance(obj, np.ndarray) and obj.dtype.kind in _NUMPY_KINDS:
            flat_np = np.ascontiguousarray(obj).reshape(-1)
            data = memoryview(flat_np.view(np.uint8))
            return self._encode_array("numpy", obj.dtype.str, obj.shape, data)
        if isinstance(obj, np.generic):
            return obj.item()
        raise TypeError(
            f"an object of type {type(obj).__module__}.{type(obj).__qualname__} cannot "
            "be sent between processes: expected numbers, text, bytes, lists, dicts, "
            "dataclasses, msgspec structs, tensors or numeric arrays"
        )

    def _encode_array(
        self, kind: str, dtype: str, shape: tuple[int, ...], data: memoryview
    ) -> msgspec.msgpack.Ext:
        if data.nbytes < self._threshold:
            header = _ArrayHeader(kind, dtype, shape, data=bytes(data))
        else:
            self._frames.append(data)
            header = _ArrayHeader(kind, dtype, shape, frame=len(self._frames) - 1)
        return msgspec.msgpack.Ext(_EXT_ARRAY, self._header_encoder.encode(header))


class MsgpackDecoder:
    """Decodes frames into a value of type `t` (any plain data when it is not given).

    `decode` raises msgspec.ValidationError or msgspec.DecodeError for a message that is
    not of that type or not well formed. Arrays come back as writable copies.
    """

    def __init__(self, t: Any = Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(
            t, ext_hook=self._decode_ext, dec_hook=_check_instance
        )
        self._header_decoder = msgspec.msgpack.Decoder(_ArrayHeader)
        self._frames: Sequence[Any] = ()

    def decode(self, frames: Any) -> Any:
        """Takes one frame or a sequence of frames (bytes, or ZeroMQ frames)."""
        if isinstance(frames, (bytes, bytearray, memoryview)):
            frames = [frames]
        if not frames:
            raise msgspec.DecodeError("the message has no frames")
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        finally:
            self._frames = ()

    def _decode_ext(self, code: int, data: memoryview) -> Any:
        if code != _EXT_ARRAY:
            raise msgspec.ValidationError(
                f"msgpack extension type {code} is not accepted: only arrays "
                f"({_EXT_ARRAY}) travel as extensions"
            )
        header = self._header_decoder.decode(data)
        if not 0 <= header.frame < max(len(self._frames), 1):
            raise msgspec.ValidationError(
                f"array names frame {header.frame}, the message has {len(self._frames)}"
            )
        raw = header.data if header.frame == 0 else self._frames[header.frame]
        return _build_array(header, memoryview(raw))


def _build_array(header: _ArrayHeader, raw: memoryview) -> Any:
    """The array that a header and its bytes describe, in memory of its own."""
    if header.kind == "torch":
        if header.dtype not in _TORCH_DTYPES:
            raise msgspec.ValidationError(f"unknown tensor dtype {header.dtype!r}")
        dtype = _TORCH_DTYPES[header.dtype]
        _check_size(header, raw, dtype.itemsize)
        if raw.nbytes == 0:
            return torch.empty(header.shape, dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(header.shape)
    if header.kind == "numpy":
        np_dtype = _numpy_dtype(header.dtype)
        _check_size(header, raw, np_dtype.itemsize)
        return np.frombuffer(bytearray(raw), dtype=np_dtype).reshape(header.shape)
    raise msgspec.ValidationError(f"unknown kind of array {header.kind!r}")


def _numpy_dtype(name: str) -> np.dtype:
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise msgspec.ValidationError(f"unknown array dtype {name!r}") from None
    if dtype.kind not in _NUMPY_KINDS or dtype.fields is not None:
        raise msgspec.ValidationError(f"array dtype {name!r} is not numeric")
    return dtype


def _check_size(header: _ArrayHeader, raw: memoryview, itemsize: int) -> None:
    if any(extent < 0 for extent in header.shape):
        raise msgspec.ValidationError(
            f"array shape {header.shape} has a negative extent"
        )
    expected = math.prod(header.shape) * itemsize
    if raw.nbytes != expected:
        raise msgspec.ValidationError(
            f"array of {header.dtype} {header.shape} needs {expected} bytes, got "
            f"{raw.nbytes}"
        )


def _check_instance(expected: type, obj: Any) -> Any:
    """Accepts what the extension hook built; plain data is not turned into objects."""
    if isinstance(obj, expected):
        return obj
    raise msgspec.ValidationError(
        f"expected {expected.__qualname__}, got {type(obj).__qualname__}"
    )
