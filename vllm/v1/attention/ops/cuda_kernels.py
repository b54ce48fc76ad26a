"""The CUDA C++ kernels, called through ctypes: NVFP4 and fp8_ds_mla writes, and copies
and zeroing of whole blocks.

Knows the C ABI of `csrc/cuda/api.h` and checks every argument that guards memory. Calls
put work on torch's current stream and do not wait for it. Importing this module needs
neither a GPU nor the library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from pathlib import Path

import torch

from vllm.v1.attention.ops.cpu_kernels import Pages, Rows
from vllm.v1.kv_formats import KVFormat, KVScales, by_name
from vllm.v1.kv_formats.base import UNIT_SCALES
from vllm.v1.kv_formats.nvfp4 import LINEAR, NvFp4

LIBRARY = Path(__file__).parents[3] / "_cuda_kernels.so"
_BUILD = "run `VLLM_TARGET_DEVICE=cuda python setup.py build_ext --inplace`"

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_CODES_ALIGNMENT = 8  # bytes of a group's codes, written at once
_RECORD_ALIGNMENT = 4
_WIDEST_UNIT = 16  # bytes that a thread moves at once
_MOST_ITEMS = 1 << 31  # work items and slots are counted in 32 bits
# cudaError_t when the driver is missing or older than the runtime, and without a GPU.
_INSUFFICIENT_DRIVER, _NO_DEVICE = 35, 100


class NvFp4StoreArgs(ctypes.Structure):
    _fields_ = (
        ("pages", Pages),
        ("key", Rows),
        ("value", Rows),
        ("slot_mapping", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("four_over_six", ctypes.c_int32),
        ("linear", ctypes.c_int32),
        ("k_scale", ctypes.c_float),
        ("v_scale", ctypes.c_float),
    )


class DsMlaStoreArgs(ctypes.Structure):
    _fields_ = (
        ("pages", Pages),
        ("latent", Rows),
        ("rope", Rows),
        ("slot_mapping", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class BlockArgs(ctypes.Structure):
    _fields_ = (
        ("caches", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("most_units", ctypes.c_int64),
        ("num_caches", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("unit", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


_LAUNCHERS = {
    "nvfp4_store": NvFp4StoreArgs,
    "ds_mla_store": DsMlaStoreArgs,
    "copy_blocks": BlockArgs,
    "zero_blocks": BlockArgs,
}


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    if not LIBRARY.exists():
        return f"{LIBRARY.name} was not built: {_BUILD}"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        abi = library.vllm_cuda_abi
    except (OSError, AttributeError) as error:
        return f"{LIBRARY.name} does not load: {error}"
    abi.restype = ctypes.c_int64
    sizes = [ctypes.sizeof(a) for a in (NvFp4StoreArgs, DsMlaStoreArgs, BlockArgs)]
    if abi() != sizes[0] << 32 | sizes[1] << 16 | sizes[2]:
        return f"{LIBRARY.name} was built from other sources: {_BUILD}"
    library.vllm_cuda_error.restype = ctypes.c_char_p
    for name, args in _LAUNCHERS.items():
        launcher = getattr(library, f"vllm_cuda_{name}")
        launcher.argtypes = (ctypes.POINTER(args), ctypes.c_void_p)
        launcher.restype = ctypes.c_int32
    return library


def why_unavailable() -> str:
    """Why there are no kernels, in one line; empty when the library is loaded."""
    library = _load()
    return library if isinstance(library, str) else ""


def _launch(name: str, args: ctypes.Structure, device: torch.device) -> None:
    """Puts a kernel on the device's current stream. RuntimeError says what is missing
    in words, or what the launch failed of."""
    library = _load()
    if isinstance(library, str):
        raise RuntimeError(f"the CUDA kernels are not available: {library}")
    stream = torch.cuda.current_stream(device).cuda_stream if _on_cuda(device) else 0
    error = getattr(library, f"vllm_cuda_{name}")(ctypes.byref(args), stream)
    if not error:
        return
    words = library.vllm_cuda_error(error).decode()
    if error in (_INSUFFICIENT_DRIVER, _NO_DEVICE):
        words += (
            "; install NVIDIA's driver for CUDA 13 or newer, or serve on the CPU with "
            "VLLM_TARGET_DEVICE=cpu"
        )
    raise RuntimeError(f"CUDA kernel {name} did not start: {words}")


def _on_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


# --- writes -------------------------------------------------------------------------


def nvfp4_store(
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    fmt: KVFormat,
    scales: KVScales = UNIT_SCALES,
) -> None:
    """Writes one state per slot and head: byte for byte what `fmt.store` writes.

    pages: uint8 [B, 2H, N, C], the axes [2H, N, C] dense, N a multiple of 4 and each
    side a multiple of 8 bytes. slot_mapping: int64 [T'], block * N +
    offset; slots outside the cache, such as -1, are skipped. key and value: [T, H, D],
    float32, float16 or bfloat16, last axis contiguous, T >= T'. `fmt` is nvfp4 or
    nvfp4_4over6 in either arrangement. ValueError for arguments that do not fit.
    """
    if not isinstance(fmt, NvFp4):
        raise ValueError(f"KV cache format {fmt.name}: expected one of nvfp4")
    if key.shape != value.shape or key.dtype != value.dtype:
        raise ValueError(
            f"key is {key.dtype} {tuple(key.shape)}, value {value.dtype} "
            f"{tuple(value.shape)}: expected the same"
        )
    key_rows, value_rows = _rows("key", key), _rows("value", value)
    layout = fmt.layout(key_rows.size, key_rows.size)
    layout.check_pages(pages)
    layer = _pages(pages, _CODES_ALIGNMENT)
    side = layer.num_heads // layout.num_sides * layer.block_size * layout.nbytes
    interleave = layout.field("v_scales").interleave
    if side % _CODES_ALIGNMENT or layer.block_size % interleave:
        raise ValueError(
            f"pages {tuple(pages.shape)}: one side takes {side} bytes, and blocks have "
            f"{layer.block_size} states; expected multiples of {_CODES_ALIGNMENT} and "
            f"{interleave}"
        )
    if layer.num_heads != layout.num_sides * key.shape[1]:
        raise ValueError(
            f"{key.shape[1]} heads need {layout.num_sides * key.shape[1]} head slots, "
            f"the pages have {layer.num_heads}"
        )
    layer.num_heads //= layout.num_sides
    args = NvFp4StoreArgs(
        layer,
        key_rows,
        value_rows,
        _slots(slot_mapping, key),
        slot_mapping.shape[0],
        fmt.four_over_six,
        fmt.arrangement == LINEAR,
        scales.k,
        scales.v,
    )
    _launch("nvfp4_store", args, pages.device)


def ds_mla_store(
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
) -> None:
    """Writes one fp8_ds_mla record per slot: byte for byte what the format writes.

    pages: uint8 [B, 1, N, C], records contiguous at multiples of 4 bytes. latent and
    rope: [T, 1, 512] and [T, 1, 64] of one dtype, as for `nvfp4_store`. ValueError for
    arguments that do not fit.
    """
    layout = by_name("fp8_ds_mla").layout(latent.shape[-1] + rope.shape[-1], 0)
    layout.check_pages(pages)
    counts = [layout.field(name).count for name in ("nope", "rope")]
    if [latent.shape[-1], rope.shape[-1]] != counts or latent.dtype != rope.dtype:
        raise ValueError(
            f"latent {latent.dtype} {tuple(latent.shape)} and rope {rope.dtype} "
            f"{tuple(rope.shape)}: expected one dtype and sizes {counts}"
        )
    args = DsMlaStoreArgs(
        _pages(pages, _RECORD_ALIGNMENT),
        _rows("latent", latent),
        _rows("rope", rope),
        _slots(slot_mapping, latent, rope),
        slot_mapping.shape[0],
        0,
    )
    _launch("ds_mla_store", args, pages.device)


# --- whole blocks -------------------------------------------------------------------


def block_runs(cache: torch.Tensor) -> list[tuple[int, int, int, int, int]]:
    """The bytes of one block of a cache [B, ...] of any strides, as rows (address,
    block stride, count, stride, bytes): `count` runs of contiguous bytes each."""
    size = cache.element_size()
    axes = [
        (stride * size, length)
        for stride, length in zip(cache.stride()[1:], cache.shape[1:], strict=True)
        if length > 1
    ]
    run, outer = size, []
    for stride, length in sorted(axes):
        if stride == run and not outer:
            run *= length
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0], outer[-1][1] * length)
        else:
            outer.append((stride, length))
    stride, count = outer[0] if outer else (run, 1)
    starts = [0]
    for step, length in outer[1:]:
        starts = [start + i * step for start in starts for i in range(length)]
    block_stride = cache.stride(0) * size
    return [
        (cache.data_ptr() + start, block_stride, count, stride, run) for start in starts
    ]


class BlockMover:
    """Copies and zeroes whole blocks of a fixed set of caches, in one launch each.

    Touches the bytes of the caches' views only, not the padding between pages.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        rows = [row for cache in caches for row in block_runs(cache)]
        self._caches = list(caches)  # the addresses below stay valid
        self._device = caches[0].device
        self._table = torch.tensor(rows, dtype=torch.int64).to(self._device)
        divided = [number for row in rows for number in _moved(row)]
        self._unit = gcd(_WIDEST_UNIT, *divided)
        most_bytes = max(count * run for _, _, count, _, run in rows)
        _check_count("bytes of a block", most_bytes)
        self._most_units = most_bytes // self._unit

    def zero(self, blocks: torch.Tensor) -> None:
        """Zeroes these blocks, int64 [n] on the caches' device."""
        self._move("zero_blocks", blocks, blocks.shape[0])

    def copy(self, pairs: torch.Tensor) -> None:
        """Copies blocks, int64 [n, 2] of (source, target) on the caches' device. No
        block is both a source and a target of one call."""
        if pairs.dim() != 2 or pairs.shape[1] != 2:
            raise ValueError(f"pairs {tuple(pairs.shape)}: expected [n, 2]")
        self._move("copy_blocks", pairs, pairs.shape[0])

    def _move(self, name: str, blocks: torch.Tensor, count: int) -> None:
        args = BlockArgs(
            self._table.data_ptr(),
            _vector("blocks", blocks.flatten()),
            self._most_units,
            self._table.shape[0],
            count,
            self._unit,
            0,
        )
        _launch(name, args, self._device)


def _moved(row: tuple[int, int, int, int, int]) -> tuple[int, ...]:
    """What a unit of bytes must divide; a single run may have any stride."""
    address, block_stride, count, stride, run = row
    return (address, block_stride, run, stride if count > 1 else 0)


def _check_count(what: str, count: int) -> None:
    if count >= _MOST_ITEMS:
        raise ValueError(f"{count} {what}: expected fewer than {_MOST_ITEMS}")


# --- arguments ----------------------------------------------------------------------


def _rows(name: str, tensor: torch.Tensor) -> Rows:
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        raise ValueError(
            f"{name} is {tensor.dtype}: expected float32, float16 or bfloat16"
        )
    if tensor.dim() != 3 or tensor.stride(2) != 1:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: "
            "expected [tokens, heads, size] with a contiguous last axis"
        )
    token_stride, head_stride, _ = tensor.stride()
    return Rows(tensor.data_ptr(), token_stride, head_stride, code, tensor.shape[2])


def _pages(pages: torch.Tensor, alignment: int) -> Pages:
    blocks, heads, states, _ = pages.shape
    _check_count("slots", blocks * states)
    block_stride, head_stride, state_stride, _ = pages.stride()
    places = [pages.data_ptr(), block_stride]
    if alignment == _RECORD_ALIGNMENT:
        places.append(state_stride)
    if any(place % alignment for place in places):
        raise ValueError(
            f"pages at {places[0]:#x} with strides {pages.stride()}: expected "
            f"multiples of {alignment} bytes"
        )
    return Pages(
        pages.data_ptr(), block_stride, head_stride, state_stride, blocks, heads, states
    )


def _slots(slot_mapping: torch.Tensor, *rows: torch.Tensor) -> int:
    tokens = slot_mapping.shape[0]
    _check_count("numbers to store", 2 * tokens * rows[0].shape[1:].numel())
    if any(row.shape[0] < tokens for row in rows):
        raise ValueError(
            f"slot_mapping has {tokens} slots, but there are only "
            f"{min(row.shape[0] for row in rows)} tokens"
        )
    return _vector("slot_mapping", slot_mapping)


def _vector(name: str, tensor: torch.Tensor) -> int:
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype != torch.int64:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}: expected a contiguous vector of int64"
        )
    return tensor.data_ptr()
