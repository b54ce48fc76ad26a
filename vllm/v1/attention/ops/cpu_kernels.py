"""The C++ kernels for CPUs, called through ctypes: cache writes and paged attention.

Knows the C ABI of `csrc/cpu/api.h` and checks every argument that guards memory. Knows
of KV formats what `cpu_cells` says. Calls release the GIL and run on the OpenMP threads
that torch uses (`torch.set_num_threads`).
"""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.attention.ops import cpu_cells
from vllm.v1.attention.ops.cpu_cells import Cells, cells_of
from vllm.v1.kv_formats import KVFormat, KVScales
from vllm.v1.kv_formats.base import UNIT_SCALES
from vllm.v1.kv_formats.dense import dense
from vllm.v1.kv_formats.layout import TILE_STATES

logger = init_logger(__name__)

LIBRARY = Path(__file__).parents[3] / "_cpu_kernels.so"
_BUILD = "run `python setup.py build_ext --inplace`"
ISAS = ("avx512", "avx2", "generic")

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_STATUS = {
    1: "no kernel for this cache dtype and query dtype",
    2: "out of memory for scratch space",
    3: "query_start_loc must ascend from 0 or more to at most the query's rows",
    4: "seq_lens must lie between 0 and what the block table covers",
    5: "the block table names a block outside the cache",
}


class Pages(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("state_stride", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
    )


class Rows(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("size", ctypes.c_int32),
    )


class AttentionArgs(ctypes.Structure):
    _fields_ = (
        ("out", Rows),
        ("query", Rows),
        ("pages", Pages),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("block_table_width", ctypes.c_int32),
        ("num_requests", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_query_heads", ctypes.c_int32),
        ("cell_format", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("sliding_window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("k_scale", ctypes.c_float),
        ("v_scale", ctypes.c_float),
        ("key_table", ctypes.c_void_p),
        ("value_table", ctypes.c_void_p),
    )


class StoreArgs(ctypes.Structure):
    _fields_ = (
        ("pages", Pages),
        ("key", Rows),
        ("value", Rows),
        ("slot_mapping", ctypes.c_void_p),
        ("signs", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("cell_format", ctypes.c_int32),
        ("k_scale", ctypes.c_float),
        ("v_scale", ctypes.c_float),
        ("key_table", ctypes.c_void_p),
        ("value_table", ctypes.c_void_p),
    )


class _Kernels:
    """The library's functions, each looked up once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.handle = library
        self.choose_isa = library.vllm_cpu_choose_isa
        self.choose_isa.argtypes = (ctypes.c_char_p,)
        self.choose_isa.restype = ctypes.c_char_p
        self.attention = library.vllm_cpu_paged_attention
        self.attention.argtypes = (ctypes.POINTER(AttentionArgs),)
        self.attention.restype = ctypes.c_int64
        self.store = library.vllm_cpu_store
        self.store.argtypes = (ctypes.POINTER(StoreArgs),)
        self.store.restype = ctypes.c_int64
        self.read = library.vllm_cpu_read
        self.read.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self.read.restype = ctypes.c_double
        self.advise = library.vllm_cpu_advise_huge_pages
        self.advise.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self.advise.restype = ctypes.c_int32
        self.isa = ""


@lru_cache(maxsize=1)
def _load() -> _Kernels | str:
    """The kernels, or why there are none."""
    if not LIBRARY.exists():
        return (
            f"{LIBRARY.name} was not built: run `python setup.py build_ext --inplace`"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
        abi = library.vllm_cpu_abi
    except (OSError, AttributeError) as error:
        return f"{LIBRARY.name} does not load: {error}"
    abi.restype = ctypes.c_int64
    if abi() != ctypes.sizeof(AttentionArgs) << 32 | ctypes.sizeof(StoreArgs):
        return f"{LIBRARY.name} was built from other sources: {_BUILD}"
    kernels = _Kernels(library)
    _choose_isa(kernels, envs.VLLM_CPU_ISA)
    return kernels


def _choose_isa(kernels: _Kernels, name: str | None) -> None:
    chosen = kernels.choose_isa(name.encode() if name else None)
    if chosen is None:
        raise ValueError(
            f"VLLM_CPU_ISA={name!r}: expected one of {', '.join(ISAS)} that this "
            "processor supports; unset the variable to use the best"
        )
    kernels.isa = chosen.decode()


def loaded() -> _Kernels:
    """The loaded library. RuntimeError says why there is none."""
    kernels = _load()
    if isinstance(kernels, str):
        raise RuntimeError(f"the CPU kernels are not available: {kernels}")
    return kernels


@lru_cache(maxsize=1)
def available() -> bool:
    """Says whether the library is built and loads; logs one line if not."""
    reason = why_unavailable()
    if reason:
        logger.info("CPU kernels are off, torch code serves instead: %s", reason)
    return not reason


def why_unavailable() -> str:
    """The reason in one line; empty when the kernels are available."""
    kernels = _load()
    return kernels if isinstance(kernels, str) else ""


def isa() -> str:
    """The instruction set in use: "avx512", "avx2" or "generic"; "" without kernels."""
    kernels = _load()
    return "" if isinstance(kernels, str) else kernels.isa


def reads_tiles(fmt: KVFormat, dtype: torch.dtype | None) -> bool:
    """Whether there are kernels for the format's "tile16" with queries of a dtype."""
    fast = dtype is torch.bfloat16 and isa() == ISAS[0]
    return fast and cpu_cells.is_tiled(fmt.resolve(dtype))


def choose_isa(name: str | None) -> str:
    """Switches this process to an instruction set, None for the best; returns its name.

    Raises ValueError where the processor lacks it.
    """
    kernels = loaded()
    _choose_isa(kernels, name)
    return kernels.isa


def store_dense(
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """`store` in the dense format of `dtype` (None: the key's); the value may be empty.

    Values past the finite range of a narrower `dtype` saturate.
    """
    store(pages, slot_mapping, key, value, dense_format(dtype or key.dtype))


def dense_format(dtype: torch.dtype) -> KVFormat:
    if dtype not in _DTYPES:
        raise ValueError(
            f"cache dtype {dtype}: expected float32, float16 or bfloat16; other "
            "formats have names"
        )
    return dense(dtype)


def store(
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    fmt: KVFormat,
    scales: KVScales = UNIT_SCALES,
) -> None:
    """Writes one state per slot and head: byte for byte what `fmt.store` writes.

    pages: uint8 [B, slots, N, C], cells contiguous, outer strides free (but for formats
    whose sides are whole). slot_mapping: int64 [T'], block * N + offset; slots outside
    the cache, such as -1, are skipped. key: [T, H, D], value: [T, H, Dv], float32,
    float16 or bfloat16, last axis contiguous, T >= T'. `scales` are the layer's, for
    formats with scales per tensor. ValueError for arguments that do not fit.
    """
    if key.dtype != value.dtype:
        raise ValueError(f"key is {key.dtype} but value is {value.dtype}: cast one")
    tokens = slot_mapping.shape[0]
    if min(key.shape[0], value.shape[0]) < tokens:
        raise ValueError(
            f"slot_mapping has {tokens} slots, but there are only {key.shape[0]} keys "
            f"and {value.shape[0]} values"
        )
    key_rows, value_rows = rows_of("key", key), rows_of("value", value)
    cells = cells_of(fmt, key_rows.size, value_rows.size)
    layer = layer_pages(pages, cells, key_rows.size, value_rows.size)
    if not key.shape[1] == value.shape[1] == layer.num_heads:
        raise ValueError(
            f"key has {key.shape[1]} heads, value {value.shape[1]}, the cache "
            f"{layer.num_heads}: expected the same number"
        )
    args = StoreArgs(
        layer,
        key_rows,
        value_rows,
        vector_at("slot_mapping", slot_mapping, torch.int64),
        None,
        tokens,
        cells.number,
        scales.k if cells.scaled else 1.0,
        scales.v if cells.scaled else 1.0,
        *cells.store_tables,
    )
    raise_for(loaded().store(args))


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    fmt: KVFormat,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    head_size: int,
    head_size_v: int,
    scale: float,
    sliding_window: int = -1,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    scales: KVScales = UNIT_SCALES,
) -> None:
    """Attends R requests to their pages: prefill, decode and any mix of them.

    out: [T, Hq, Dv] and query: [T, Hq, D], float32, float16 or bfloat16, last axis
    contiguous; rows past query_start_loc[R] are left alone. pages: uint8 [B, slots, N,
    C] holding `fmt`, as for `store`; Hq is a multiple of the KV heads.
    query_start_loc: int32 [R + 1]. seq_lens: int32 [R], the new tokens included.
    block_table: int32 [R, W], rows may be strided.

    A sliding window of w tokens includes the query's own; without `causal` it reaches
    w - 1 tokens both ways. soft_cap c: c * tanh(logit / c). sinks: [Hq], one more logit
    per head that takes probability and adds no value. Sums are fp32; for bfloat16
    queries over other than float caches AVX-512 rounds queries, codebooks and
    probabilities to bfloat16. A query that sees no key gives 0. The bits of a row do
    not depend on the rest of the batch or on threads.

    Raises ValueError, before anything is written, for shapes, types and indices that do
    not fit.
    """
    cells = cells_of(fmt, head_size, head_size_v)
    check_heads(out, query, pages, head_size, head_size_v, cells.sides)
    check_batch(query_start_loc, seq_lens, block_table)
    tokens, heads, _ = query.shape
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
        if sinks.shape != (heads,):
            raise ValueError(f"{tuple(sinks.shape)} sinks: expected ({heads},)")
    args = AttentionArgs(
        rows_of("out", out),
        rows_of("query", query),
        layer_pages(pages, cells, head_size, head_size_v),
        vector_at("query_start_loc", query_start_loc, torch.int32),
        vector_at("seq_lens", seq_lens, torch.int32),
        address_of("block_table", block_table, torch.int32),
        None if sinks is None else sinks.data_ptr(),
        block_table.stride(0),
        block_table.shape[1],
        seq_lens.shape[0],
        tokens,
        heads,
        cells.number,
        causal,
        sliding_window,
        scale * (scales.k if cells.scaled else 1.0),
        soft_cap,
        1.0,
        scales.v if cells.scaled else 1.0,
        *cells.attention_tables,
    )
    raise_for(loaded().attention(args))


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Asks for huge pages under a contiguous CPU tensor; call it before its first use.

    Returns whether the system agreed.
    """
    kernels = _load()
    if isinstance(kernels, str) or tensor.device.type != "cpu":
        return False
    size = tensor.numel() * tensor.element_size()
    return kernels.advise(tensor.data_ptr(), size) == 0


def read_all(tensor: torch.Tensor) -> float:
    """Reads a contiguous CPU tensor once, on all threads: to time the memory."""
    size = tensor.numel() * tensor.element_size()
    return loaded().read(tensor.data_ptr(), size)


def check_heads(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    head_size: int,
    head_size_v: int,
    sides: int = 1,
) -> None:
    if query.dim() != 3 or query.shape[2] != head_size:
        raise ValueError(
            f"query has shape {tuple(query.shape)}: expected [tokens, heads, "
            f"{head_size}]"
        )
    tokens, heads, _ = query.shape
    if out.shape != (tokens, heads, head_size_v):
        raise ValueError(
            f"out has shape {tuple(out.shape)}: expected {(tokens, heads, head_size_v)}"
        )
    kv_heads = pages.shape[1] // sides if pages.dim() == 4 else 1
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads do not divide among {kv_heads} KV heads: expected a "
            "multiple"
        )


def check_batch(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
) -> None:
    requests = seq_lens.shape[0]
    if query_start_loc.shape[0] != requests + 1 or block_table.shape[0] != requests:
        raise ValueError(
            f"{requests} seq_lens, {query_start_loc.shape[0]} query_start_loc and "
            f"{block_table.shape[0]} rows of block_table: expected R, R + 1 and R"
        )
    if block_table.dim() != 2 or (requests and block_table.stride(1) != 1):
        raise ValueError("block_table must be [R, W] with contiguous rows")


def address_of(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> int:
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}: expected {dtype} on cpu"
        )
    return tensor.data_ptr()


def vector_at(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> int:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: "
            "expected a contiguous vector"
        )
    return address_of(name, tensor, dtype)


def rows_of(name: str, tensor: torch.Tensor) -> Rows:
    code = _DTYPES.get(tensor.dtype)
    if code is None or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}: expected float32, float16 "
            "or bfloat16 on cpu"
        )
    if tensor.dim() != 3 or tensor.stride(2) != 1:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: "
            "expected [tokens, heads, size] with a contiguous last axis"
        )
    token_stride, head_stride, _ = tensor.stride()
    return Rows(tensor.data_ptr(), token_stride, head_stride, code, tensor.shape[2])


def layer_pages(pages: torch.Tensor, cells: Cells, size: int, size_v: int) -> Pages:
    layer = pages_of(pages, cells.nbytes, f"{size} + {size_v} elements of {cells.name}")
    if cells.tiled:
        _check_tiles(pages, cells, layer, size, size_v)
        layer.num_heads //= cells.sides
    if cells.whole_sides:
        states, width = layer.block_size, cells.nbytes
        dense_states = states % 4 == 0 and layer.state_stride == width
        if not dense_states or layer.head_stride != states * width:
            raise ValueError(
                f"pages of {cells.name} have strides {pages.stride()} and {states} "
                "states: expected dense head slots of a multiple of 4 states"
            )
        layer.num_heads //= cells.sides
    return layer


def _check_tiles(
    pages: torch.Tensor, cells: Cells, layer: Pages, size: int, size_v: int
) -> None:
    states = layer.block_size
    if states % TILE_STATES or (states > 1 and layer.state_stride != cells.nbytes):
        raise ValueError(
            f"pages of {cells.name} have strides {pages.stride()} and {states} "
            f"states: expected a multiple of {TILE_STATES} states that touch"
        )
    step = cpu_cells.TILED_HEAD_SIZES
    if size % step or size_v % step:
        raise ValueError(
            f"{cells.name} with head sizes {size} and {size_v}: the kernels take "
            f"multiples of {step}"
        )


def pages_of(pages: torch.Tensor, cell_bytes: int, what: str) -> Pages:
    """uint8 [B, H, N, C] for the kernels; `cell_bytes` is what holds `what`."""
    if pages.dim() != 4 or pages.stride(3) != 1:
        raise ValueError(
            f"pages have shape {tuple(pages.shape)} and strides {pages.stride()}: "
            "expected [blocks, heads, states, bytes] with contiguous cells"
        )
    blocks, heads, states, cell = pages.shape
    if cell != cell_bytes:
        raise ValueError(
            f"cells of {cell} bytes do not hold {what}: expected {cell_bytes} bytes"
        )
    data = address_of("pages", pages, torch.uint8)
    block_stride, head_stride, state_stride, _ = pages.stride()
    return Pages(data, block_stride, head_stride, state_stride, blocks, heads, states)


def raise_for(result: int) -> None:
    if result == 0:
        return
    status, request = result & 0xFF, result >> 8
    if status == 2:
        raise MemoryError(_STATUS[status])
    raise ValueError(f"request {request} of the batch: {_STATUS[status]}")
