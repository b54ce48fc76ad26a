"""What the C++ kernels need to know of a KV format: its number, its bytes, its tables.

The numbers are those of `csrc/cpu/api.h`. Knows no ctypes and calls nothing.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from vllm.v1.kv_formats import KVFormat, KVQuantMode
from vllm.v1.kv_formats.base import DEFAULT_ARRANGEMENT, TILE16
from vllm.v1.kv_formats.codebook import get_centroids, get_midpoints
from vllm.v1.kv_formats.hadamard import rht_signs
from vllm.v1.kv_formats.layout import Extent
from vllm.v1.kv_formats.turboquant import TurboQuant

_CELLS = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 2,
    "fp8_e4m3": 3,
    "fp8_e5m2": 4,
    "int8_per_token_head": 5,
    "fp8_per_token_head": 6,
    "int4_per_token_head": 7,
    "nvfp4": 8,
    "nvfp4_4over6": 9,
    "turboquant_k8v4": 10,
    "turboquant_4bit_nc": 11,
    "turboquant_k3v4_nc": 12,
    "turboquant_3bit_nc": 13,
}
_TILED = 16  # added where states take turns
# Format ids that hold a K and a V per head.
NUMBERS = {f"{name}:{DEFAULT_ARRANGEMENT}": number for name, number in _CELLS.items()}
NUMBERS |= {
    f"{name}:{TILE16}": _TILED + number
    for name, number in _CELLS.items()
    if name not in ("float32", "float16")
}
MAX_HEAD_SIZE = 1024
TILED_HEAD_SIZES = 8  # tiles hold heads of multiples


@dataclass(frozen=True, kw_only=True)
class Cells:
    """A format at one pair of head sizes, as the kernels take it.

    nbytes: of a (head slot, state) cell. `scaled`: the layer's per-tensor scales count.
    `whole_sides`: the head slots of a page must touch; then N is a multiple of 4.
    `tiled`: the states of a head slot touch; N is a multiple of 16.
    Tables are float32 vectors or None.
    """

    name: str
    number: int
    nbytes: int
    sides: int
    scaled: bool
    whole_sides: bool
    tiled: bool
    key_table: torch.Tensor | None
    value_table: torch.Tensor | None
    store_table: torch.Tensor | None

    @property
    def attention_tables(self) -> tuple[int | None, int | None]:
        return _address(self.key_table), _address(self.value_table)

    @property
    def store_tables(self) -> tuple[int | None, int | None]:
        return _address(self.store_table), _address(self.value_table)


def serves(fmt: KVFormat, head_size: int, head_size_v: int) -> bool:
    """Whether there are kernels for the format's states of these sizes."""
    sizes = head_size, head_size_v
    if not all(0 < size <= MAX_HEAD_SIZE for size in sizes):
        return False
    if fmt.arrangement == TILE16 and any(size % TILED_HEAD_SIZES for size in sizes):
        return False
    return fmt.format_id in NUMBERS


def is_tiled(fmt: KVFormat) -> bool:
    """Whether kernels know the format's arrangement "tile16", on some machine."""
    tiled = TILE16 in fmt.arrangements
    return tiled and fmt.arranged(TILE16).format_id in NUMBERS


@lru_cache(maxsize=64)
def cells_of(fmt: KVFormat, head_size: int, head_size_v: int) -> Cells:
    """Raises ValueError for a format without kernels and for head sizes it lacks."""
    if fmt.format_id not in NUMBERS:
        raise ValueError(
            f"KV cache format {fmt.format_id} has no CPU kernel: expected one of "
            f"{', '.join(NUMBERS)}; the torch reference serves others"
        )
    layout = fmt.layout(head_size, head_size_v)
    key, value, store = _tables(fmt, head_size, head_size_v)
    scaled = fmt.mode is KVQuantMode.FP8_PER_TENSOR or fmt.mode.is_nvfp4
    return Cells(
        name=fmt.format_id,
        number=NUMBERS[fmt.format_id],
        nbytes=layout.nbytes,
        sides=layout.num_sides,
        scaled=scaled,
        whole_sides=layout.extent is Extent.SIDE,
        tiled=layout.extent is Extent.TILE,
        key_table=key,
        value_table=value,
        store_table=store,
    )


Tables = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _tables(fmt: KVFormat, head_size: int, head_size_v: int) -> Tables:
    """Of keys and values when read, and of keys when written."""
    if fmt.mode is KVQuantMode.INT4_PER_TOKEN_HEAD:
        signs = rht_signs(head_size).contiguous()
        return signs, rht_signs(head_size_v).contiguous(), signs
    if isinstance(fmt, TurboQuant) and not fmt.key_fp8:
        centroids = get_centroids(head_size, fmt.key_bits).contiguous()
        midpoints = get_midpoints(head_size, fmt.key_bits).contiguous()
        return centroids, None, midpoints
    return None, None, None


def _address(table: torch.Tensor | None) -> int | None:
    return None if table is None else table.data_ptr()
