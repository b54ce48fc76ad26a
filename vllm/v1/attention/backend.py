"""The contract of an attention backend: facts, reasons, and the packing hook.

Knows what a backend must say. Refuses to know any format's bytes (they come from
`kv_formats`), any layer, and any device. Metadata and impl live next door.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.v1.attention.impl import (
    AttentionImpl,
    AttentionImplBase,
    AttentionLayer,
    AttentionType,
)
from vllm.v1.attention.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    PagedAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout, LayoutDeclaration
from vllm.v1.kv_formats import KVFormat, by_name

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability

__all__ = [
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionImplBase",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionType",
    "CacheDType",
    "CommonAttentionMetadata",
    "MultipleOf",
    "PagedAttentionMetadata",
    "checked_kv_cache_shape",
]

CacheDType = str


@dataclass(frozen=True)
class MultipleOf:
    """A kernel block size: any positive multiple of `base` tokens."""

    base: int


class AttentionBackend(ABC):
    """Facts about one backend. A subclass states them as class data; only names, the
    impl, and the packing hook are methods.

    An empty list of facts means "anything": head sizes, layouts, packages.
    """

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
    ]
    #: What an accepted name means to the kernels, where that is another format.
    kv_cache_dtype_meanings: ClassVar[dict[CacheDType, CacheDType]] = {}
    #: Arrangement of the fields of a state that the kernels read and write.
    kv_cache_arrangement: ClassVar[str] = "cells"
    #: Axis orders of the cache that the kernels take, most preferred first.
    supported_kv_cache_layouts: ClassVar[tuple[KVCacheLayout, ...]] = ()
    #: Block sizes are rounded up to a multiple of this many tokens.
    min_block_alignment: ClassVar[int] = 1
    #: `Platform.device_name` values; empty: any device torch runs on.
    supported_devices: ClassVar[tuple[str, ...]] = ()
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = (AttentionType.DECODER,)

    # --- identity ---------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The name in AttentionBackendEnum."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        """The impl class, imported now. ValueError names a missing package."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """The metadata builder."""
        return AttentionMetadataBuilder

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Module and qualified name, a key that survives pickling."""
        return cls.__module__, cls.__qualname__

    # --- pages ------------------------------------------------------------------

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Publishes head slots and bytes per state for the formats this backend packs.

        Returns its argument when there is nothing to publish or something already is;
        applying it twice changes nothing. Reads no global state.
        """
        return spec

    @classmethod
    def arranged(
        cls, fmt: KVFormat, model_dtype: torch.dtype | None = None
    ) -> KVFormat:
        """The format as the kernels of this backend read and write it for a model of
        that dtype, if one is known. Bytes per state do not depend on it."""
        return fmt.arranged(cls.kv_cache_arrangement)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: CacheDType = "auto",
    ) -> tuple[int, ...]:
        """Logical shape [B, H, N, C] in elements of the storage dtype.

        Derived from the format. An override is honoured by `checked_kv_cache_shape`,
        which compares its bytes with the published ones.
        """
        # Element counts of dense formats do not depend on the model's dtype.
        fmt, dtype = by_name(cache_dtype_str), torch.bfloat16
        packing = fmt.packing(num_kv_heads, head_size, head_size, dtype)
        itemsize = fmt.storage_dtype(dtype).itemsize
        state = packing.state_bytes // itemsize
        return num_blocks, packing.head_slots, block_size, state

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False,
    ) -> tuple[int, ...]:
        """Logical axis at each physical position, outermost first: head-major pages.

        The resolved KVCacheLayout decides for backends that do not override this.
        """
        return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        """Name of the one layout this backend accepts, None if it has a choice."""
        layouts = cls.supported_kv_cache_layouts
        return layouts[0].name if len(layouts) == 1 else None

    @classmethod
    def layout_declaration(cls) -> LayoutDeclaration:
        """The accepted axis orders, for `resolve_kv_cache_layout`."""
        return LayoutDeclaration(
            owner=cls.get_name(), layouts=cls.supported_kv_cache_layouts
        )

    # --- kernel block sizes -----------------------------------------------------

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Tokens per block that the kernels take."""
        return [MultipleOf(1)]

    @classmethod
    def block_sizes_in_words(cls) -> str:
        """The kernel block sizes in tokens, for error messages."""
        return ", ".join(
            str(size) if isinstance(size, int) else f"any multiple of {size.base}"
            for size in cls.get_supported_kernel_block_sizes()
        )

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """True if kernels can address blocks of this many tokens, split or whole."""
        if block_size is None:
            return True
        sizes = cls.get_supported_kernel_block_sizes()
        return not sizes or any(block_size % _block_base(size) == 0 for size in sizes)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int = 16) -> int:
        """`default_block_size` if supported, else the smallest size that is."""
        if cls.supports_block_size(default_block_size):
            return default_block_size
        return min(map(_block_base, cls.get_supported_kernel_block_sizes()))

    # --- facts with a reason ----------------------------------------------------

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head sizes of the kernels; empty: whatever the format takes."""
        return []

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def is_ssm(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in cls.supported_attn_types

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return True

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why the kernels cannot run in this installation; None if they can."""
        return None

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        device_capability: DeviceCapability | None,
    ) -> str | None:
        """A reason why this combination is refused though each part is supported."""
        return None

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        use_per_head_quant_scales: bool,
        device_capability: DeviceCapability | None,
        attn_type: str,
        has_sliding_window: bool = False,
        use_non_causal: bool = False,
        use_batch_invariant: bool = False,
        use_kv_connector: bool = False,
        use_pcp: bool = False,
        use_adaptive_verification: bool = False,
    ) -> list[str]:
        """Every reason why this backend cannot serve such a layer; empty: it can."""
        facts = (
            (cls.supports_head_size(head_size), f"head size {head_size}"),
            (cls.supports_dtype(dtype), f"model dtype {_dtype_name(dtype)}"),
            (cls.supports_kv_cache_dtype(kv_cache_dtype), f"KV cache {kv_cache_dtype}"),
            (
                cls.supports_block_size(block_size),
                f"block size {block_size} (it takes {cls.block_sizes_in_words()})",
            ),
            (cls.is_mla() == use_mla, f"{_yes(use_mla)} latent attention"),
            (cls.is_sparse() == use_sparse, f"{_yes(use_sparse)} sparse selection"),
            (cls.supports_attn_type(attn_type), f"attention type {_value(attn_type)}"),
        )
        wishes = (
            (has_sink, cls.supports_sink(), "attention sinks"),
            (use_mm_prefix, cls.supports_mm_prefix(), "bidirectional prefixes"),
            (use_non_causal, cls.supports_non_causal(), "non-causal attention"),
            (
                use_per_head_quant_scales,
                cls.supports_per_head_quant_scales(),
                "scales per head",
            ),
            (use_batch_invariant, cls.supports_batch_invariance(), "batch invariance"),
            (use_pcp, False, "prefill context parallelism"),
        )
        refused = [what for holds, what in facts if not holds]
        refused += [what for wanted, served, what in wishes if wanted and not served]
        capability = device_capability
        if capability is not None and not cls.supports_compute_capability(capability):
            refused.append(f"compute capability {capability.as_version_str()}")
        reasons = [f"{what} not supported" for what in refused]
        reasons += _format_reasons(kv_cache_dtype, head_size, use_mla, reasons)
        layer = (head_size, dtype, kv_cache_dtype, block_size)
        combined = cls.supports_combination(
            *layer, use_mla, has_sink, use_sparse, device_capability
        )
        return reasons + [r for r in (combined, cls.unavailable_reason()) if r]


def checked_kv_cache_shape(
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    num_blocks: int,
    kernel_block_size: int,
    cache_dtype_str: CacheDType = "auto",
) -> tuple[int, ...]:
    """Logical shape of a layer's cache, `num_blocks` kernel blocks, in elements.

    A backend without its own `get_kv_cache_shape` gets [B, H, N, C] straight from the
    packed spec, as does a layer whose values are not as wide as its keys: the override
    is not told their size. Otherwise an override is honoured if its bytes are the
    published ones; ValueError names the backend, both sizes and the way out.
    """
    itemsize = spec.dtype.itemsize
    states = spec.num_states * kernel_block_size // spec.block_size
    published = spec.num_heads * states * spec.state_content_size_bytes
    overridden = backend.get_kv_cache_shape is not AttentionBackend.get_kv_cache_shape
    if not overridden or spec.head_size_v not in (0, spec.head_size):
        state = spec.state_content_size_bytes // itemsize
        return num_blocks, spec.num_heads, states, state
    shape = backend.get_kv_cache_shape(
        num_blocks,
        kernel_block_size,
        spec.num_kv_heads,
        spec.head_size,
        cache_dtype_str,
    )
    if prod(shape) * itemsize != num_blocks * published:
        raise ValueError(
            f"{backend.get_name()}.get_kv_cache_shape returns {shape} for KV cache "
            f"dtype {cache_dtype_str}, {prod(shape) * itemsize // num_blocks} bytes a "
            f"block, but its spec publishes {published}. Publish the same size from "
            "customize_spec, or drop the override."
        )
    return shape


def _format_reasons(
    kv_cache_dtype: CacheDType | None, head_size: int, use_mla: bool, so_far: list[str]
) -> list[str]:
    """Why the format itself cannot hold such a head; nothing if already refused."""
    if kv_cache_dtype is None or so_far:
        return []
    fmt = by_name(kv_cache_dtype)
    if fmt.latent and not use_mla:
        return [f"KV cache dtype {kv_cache_dtype} stores latent states only"]
    try:
        fmt.check_head_size(head_size, 0 if use_mla else head_size)
    except ValueError as error:
        return [str(error)]
    return []


def _block_base(size: int | MultipleOf) -> int:
    return size if isinstance(size, int) else size.base


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _yes(flag: bool) -> str:
    return "with" if flag else "without"


def _value(attn_type: str) -> str:
    return attn_type.value if isinstance(attn_type, AttentionType) else attn_type
