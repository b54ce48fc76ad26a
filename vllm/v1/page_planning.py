"""How large pages are, before a cache exists: raw specs priced through the hook.

Knows how (backend, raw spec, format) of every layer turns into bytes per token and into
block sizes that let unlike pages share a pool. Refuses to know any format's bytes, any
global configuration, and which layer comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Protocol

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_spec_base import AttentionSpec
from vllm.v1.kv_formats.base import KVFormat


class MultipleOfTokens(Protocol):
    """A kernel block size that is any multiple of `base` tokens."""

    base: int


class PagedBackend(Protocol):
    """What planning asks of an attention backend class."""

    @staticmethod
    def get_name() -> str: ...

    @staticmethod
    def get_supported_kernel_block_sizes() -> Sequence[int | MultipleOfTokens]: ...

    customize_spec: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class LayerPages:
    """One layer as planning sees it."""

    layer_name: str
    backend: PagedBackend
    raw_spec: AttentionSpec
    fmt: KVFormat
    model_dtype: torch.dtype | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer, as published by the backend."""
        return bytes_per_token(
            self.backend, self.raw_spec, self.fmt, self.layer_name, self.model_dtype
        )


def packed_spec(
    backend: PagedBackend,
    raw_spec: AttentionSpec,
    fmt: KVFormat,
    layer_name: str = "",
    model_dtype: torch.dtype | None = None,
) -> AttentionSpec:
    """The spec of a layer with its backend's packing: the only way from raw to packed.

    Calls `backend.customize_spec` and compares mode, head slots (H) and bytes per state
    (C) with the format's own packing. A backend from outside of this build may publish
    another H and C: then they are what counts (see `packs_by_itself`). Marks the spec
    as indexed by block stride unless the backend says otherwise, so that unlike pages
    may be padded. `model_dtype` matters to dense formats; by default it is the storage
    dtype.

    ValueError names the layer, the backend, the hook and both sizes on a mismatch.
    """
    spec = backend.customize_spec(raw_spec)
    expected = _derived(raw_spec).packed(fmt, model_dtype)
    published = (spec.num_heads, spec.state_content_size_bytes)
    wanted = (expected.num_heads, expected.state_content_size_bytes)
    is_its_own = _is_foreign(backend) and spec.is_packed and not raw_spec.is_packed
    if spec.kv_quant_mode != fmt.mode or (published != wanted and not is_its_own):
        raise ValueError(
            f"layer {layer_name!r}: {backend.get_name()}.customize_spec published "
            f"{published[0]} head slots of {published[1]} bytes per state (mode "
            f"{spec.kv_quant_mode.name}), but format {fmt.format_id} stores "
            f"{wanted[0]} of {wanted[1]} (mode {fmt.mode.name}). Return "
            "spec.packed(format) from the hook, or publish the size in the layer."
        )
    by_stride = _indexes_by_block_stride(backend)
    if spec.indexes_kv_by_block_stride == by_stride:
        return spec
    return replace(spec, indexes_kv_by_block_stride=by_stride)


def packs_by_itself(
    backend: PagedBackend,
    raw_spec: AttentionSpec,
    fmt: KVFormat,
    model_dtype: torch.dtype | None = None,
) -> bool:
    """Whether the backend's pages have a shape of their own: their bytes are no
    format's, and only the same backend can read them."""
    spec = packed_spec(backend, raw_spec, fmt, "", model_dtype)
    usual = _derived(raw_spec).packed(fmt, model_dtype)
    return (spec.num_heads, spec.state_content_size_bytes) != (
        usual.num_heads,
        usual.state_content_size_bytes,
    )


def _is_foreign(backend: PagedBackend) -> bool:
    return not getattr(backend, "__module__", "").startswith("vllm.")


def bytes_per_token(
    backend: PagedBackend,
    raw_spec: AttentionSpec,
    fmt: KVFormat,
    layer_name: str = "",
    model_dtype: torch.dtype | None = None,
) -> int:
    """Bytes of one token in one layer, without padding, through `packed_spec`.

    Where one state stands for several tokens, their share is rounded up.
    """
    tokens = getattr(raw_spec, "compress_ratio", 1)
    probe = replace(raw_spec, block_size=tokens, page_size_padded=None)
    packed = packed_spec(backend, probe, fmt, layer_name, model_dtype)
    return cdiv(packed.unpadded_page_size_bytes, tokens)


def largest_kernel_block_within(
    sizes: Sequence[int | MultipleOfTokens],
    bytes_per_token: int,
    budget: int | None,
    fallback: int,
) -> int:
    """The kernel block, in tokens, that a layer with its own block size should take.

    `sizes` is what the backend supports; plain sizes count before multiples, which
    count as their base. The largest size whose page fits `budget` bytes, the smallest
    if none does or there is no budget, `fallback` without any size.
    """
    candidates = [s for s in sizes if isinstance(s, int)] or list(map(_base, sizes))
    if not candidates:
        return fallback
    if not budget or bytes_per_token <= 0:
        return min(candidates)
    fitting = [s for s in candidates if s * bytes_per_token <= budget]
    return max(fitting, default=min(candidates))


@dataclass(frozen=True, kw_only=True)
class SharedPage:
    """A block size, in tokens, and the page, in bytes, that unlike layers share."""

    block_size: int
    page_bytes: int


def align_heterogeneous(
    layers: Sequence[LayerPages], block_size: int, min_page_bytes: int = 0
) -> SharedPage | None:
    """The page that layers of unlike bytes per token share; None if they are alike.

    The cheapest layers set the grid: their block grows until its page holds one kernel
    block of every other layer, and `min_page_bytes` (a recurrent state). Dearer layers
    then take a smaller block of their own and pad it to this page.
    """
    costs = [layer.bytes_per_token for layer in layers]
    if not costs or len(set(costs)) == 1:
        return None
    cheapest = min(costs)
    kernel = smallest_kernel_block([layer.backend for layer in layers])
    grid = _grid(kernel, block_size)
    required = max(
        min_page_bytes,
        *(
            cost * smallest_kernel_block([layer.backend])
            for layer, cost in zip(layers, costs, strict=True)
        ),
    )
    new_size = max(block_size, grid * cdiv(required, grid * cheapest))
    return SharedPage(block_size=new_size, page_bytes=new_size * cheapest)


@dataclass(frozen=True, kw_only=True)
class HybridPage:
    """Sizes at which attention pages and recurrent states take the same bytes.

    `mamba_page_size_padded` is None where the state fills the page exactly;
    `padding_percent` is what padding adds to the state.
    """

    block_size: int
    page_bytes: int
    mamba_block_size: int | None
    mamba_page_size_padded: int | None
    padding_percent: float


def align_hybrid(
    layers: Sequence[LayerPages],
    state_bytes: int,
    block_size: int,
    *,
    mamba_cache_mode: str = "none",
    mamba_block_size: int | None = None,
) -> HybridPage | None:
    """The attention block whose page holds a recurrent state of `state_bytes`.

    None without attention layers or without a state. In mode "all" blocks are multiples
    of `mamba_block_size` (or the model's chunk size), which must be given: ValueError.
    """
    if not layers or state_bytes <= 0:
        return None
    grid = _grid(smallest_kernel_block([la.backend for la in layers]), block_size)
    if mamba_cache_mode == "all":
        if mamba_block_size is None:
            raise ValueError(
                "mamba_cache_mode 'all' needs a mamba block size: pass "
                "--mamba-block-size, or use a model that states its chunk size"
            )
        grid = lcm(mamba_block_size, grid)
    per_token = _common_cost([la.bytes_per_token for la in layers], grid, state_bytes)
    aligned = grid * cdiv(state_bytes, grid * per_token)
    new_size = max(block_size, aligned)
    page = new_size * per_token
    state_block = {"all": aligned, "align": new_size}.get(
        mamba_cache_mode, mamba_block_size
    )
    return HybridPage(
        block_size=new_size,
        page_bytes=page,
        mamba_block_size=state_block,
        mamba_page_size_padded=None if page == state_bytes else page,
        padding_percent=100 * (page - state_bytes) / state_bytes,
    )


def smallest_kernel_block(backends: Sequence[PagedBackend]) -> int:
    """The smallest block, in tokens, that the kernels of all backends can address.

    Honours `min_block_alignment` of a backend that has one.
    """
    sizes = []
    for backend in backends:
        supported = backend.get_supported_kernel_block_sizes()
        sizes.append(min(map(_base, supported), default=1))
        sizes.append(getattr(backend, "min_block_alignment", 1))
    return lcm(*sizes)


def _common_cost(costs: Sequence[int], grid: int, state_bytes: int) -> int:
    """Bytes per token of the page grid.

    The least common multiple serves every format without padding. Where it would more
    than double the page, the dearest layer sets the grid and the others are padded.
    """
    exact = lcm(*costs)
    if grid * cdiv(state_bytes, grid * exact) * exact < 2 * state_bytes:
        return exact
    return max(costs)


def _grid(kernel_block: int, block_size: int) -> int:
    """Tokens in which blocks grow: the larger size, a multiple of the kernel's."""
    larger = max(kernel_block, block_size)
    return larger if larger % kernel_block == 0 else lcm(kernel_block, block_size)


def _base(size: int | MultipleOfTokens) -> int:
    return size if isinstance(size, int) else size.base


def _derived(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, num_head_slots=None, state_content_bytes=None)


def _indexes_by_block_stride(backend: PagedBackend) -> bool:
    fact = getattr(backend, "indexes_kv_by_block_stride", True)
    return bool(fact() if callable(fact) else fact)
