"""Pages, vectors and format lists for the tests of KV-cache formats."""

import math

import torch

from vllm.v1.kv_formats import KVFormat, all_formats, model_formats

AXIS_ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
HEAD_SIZES = (16, 48, 64, 72, 80, 96, 128)
SENTINEL = 0xA5


def named_formats() -> list[KVFormat]:
    """Every format with a fixed storage type, in its default arrangement."""
    formats = (*all_formats(), *model_formats())
    return [fmt for fmt in formats if fmt.resolve(torch.bfloat16) is fmt]


def arranged_formats() -> list[KVFormat]:
    """Every named format in every arrangement."""
    return [fmt.arranged(a) for fmt in named_formats() for a in fmt.arrangements]


def format_id(fmt: KVFormat) -> str:
    return f"{fmt.name}-{fmt.arrangement}"


def fits(fmt: KVFormat, head_size: int, head_size_v: int) -> bool:
    try:
        fmt.check_head_size(head_size, head_size_v)
    except ValueError:
        return False
    return True


def size_pairs(fmt: KVFormat) -> list[tuple[int, int]]:
    """Head sizes to try: equal, unequal and latent ones, as far as the format fits."""
    wanted = [(d, d) for d in HEAD_SIZES] + [(128, 64), (72, 40), (576, 0)]
    if fmt.latent:
        wanted = [(getattr(fmt, "head_size", 0), 0)]
    return [pair for pair in wanted if fits(fmt, *pair)]


def vectors(
    tokens: int,
    heads: int,
    sizes: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normally distributed K and V; V is None for a latent."""
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(tokens, heads, sizes[0], generator=generator).to(dtype)
    if sizes[1] == 0:
        return key, None
    return key, torch.randn(tokens, heads, sizes[1], generator=generator).to(dtype)


def heads_of(fmt: KVFormat, sizes: tuple[int, int], heads: int = 3) -> int:
    return heads if sizes[1] else 1


def make_pages(
    order: str,
    blocks: int,
    slots: int,
    states: int,
    cell: int,
    *,
    layers: int = 2,
    layer: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of sentinels in an axis order, and one layer's view [B, H, N, C]."""
    sizes = {"L": layers, "B": blocks, "H": slots, "N": states, "C": cell}
    shape = [sizes[axis] for axis in order]
    buffer = torch.full((math.prod(shape),), SENTINEL, dtype=torch.uint8)
    logical = buffer.view(shape).permute(*(order.index(axis) for axis in "LBHNC"))
    return buffer, logical[layer]


def rms_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference, relative to the wanted values."""
    difference = (got.double() - wanted.double()).square().mean()
    return float((difference / wanted.double().square().mean()).sqrt())
