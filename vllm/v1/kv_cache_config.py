"""The plan of the KV cache as data: groups of layers, their tensors, one block pool.

Knows which layers share block ids and how many bytes each tensor has. Refuses to know
how the plan was found and how bytes become views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from typing_extensions import Self

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_spec_base import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import SpecError
from vllm.v1.kv_cache_specs import MambaSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one kind and block size whose pages may differ in bytes.

    They share block ids; each layer has its own tensor, so no byte is padding.
    """

    kv_cache_specs: dict[str, KVCacheSpec]

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    @property
    def unpadded_page_size_bytes(self) -> int:
        specs = self.kv_cache_specs.values()
        return sum(spec.unpadded_page_size_bytes for spec in specs)

    def max_memory_usage_pages(self, vllm_config: VllmConfig) -> int:
        """Blocks that one request of the maximum model length needs."""
        return max(
            (
                cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
                for spec in self.kv_cache_specs.values()
            ),
            default=0,
        )

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.max_memory_usage_pages(vllm_config) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """The width that every layer asks for. SpecError when they disagree."""
        widths = {
            spec.max_num_blocks_per_req(vllm_config, max_len)
            for spec in self.kv_cache_specs.values()
        }
        if len(widths) > 1:
            raise SpecError(
                "layers of one group need different block-table widths: "
                f"{sorted(widths)}; they share one table"
            )
        return widths.pop() if widths else 0

    def copy_with_new_block_size(self, block_size: int) -> Self:
        specs = {
            name: spec.copy_with_new_block_size(block_size)
            for name, spec in self.kv_cache_specs.items()
        }
        return replace(self, block_size=block_size, kv_cache_specs=specs)

    def get_page_sizes(self) -> list[int]:
        """Distinct page sizes in bytes, ascending."""
        return sorted({s.page_size_bytes for s in self.kv_cache_specs.values()})

    def get_num_layer_tuples(self) -> int:
        """How many layers have the most common page size."""
        counts = Counter(s.page_size_bytes for s in self.kv_cache_specs.values())
        return max(counts.values(), default=0)

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """True if these layers can share block ids: one block size, one kind."""
        if not kv_cache_specs:
            return False
        if len({spec.block_size for spec in kv_cache_specs.values()}) > 1:
            return False
        first = next(iter(kv_cache_specs.values()))
        return first.is_uniform_with_collection(kv_cache_specs)

    @classmethod
    def from_specs(cls, kv_cache_specs: dict[str, KVCacheSpec]) -> Self | None:
        """The group spec of these layers, None if they are not uniform."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, kv_cache_specs=kv_cache_specs)


@dataclass
class KVCacheTensor:
    """One allocation, or one region of the shared backing when `block_stride` is set.

    `size` is bytes: page x blocks of this tensor, or the whole backing. `shared_by`
    names layers that use the same bytes, each for its own blocks. With `layers`, the
    page of layer l and block b starts at offset + l * layer_stride + b * block_stride.
    """

    size: int
    shared_by: list[str] = field(default_factory=list)
    offset: int = 0
    block_stride: int = 0
    layers: list[str] = field(default_factory=list)
    layer_stride: int = 0

    @property
    def layer_names(self) -> list[str]:
        """Every layer with pages in this tensor."""
        return self.layers or self.shared_by


@dataclass
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False

    def layer_spec(self, layer_name: str) -> KVCacheSpec:
        """The spec of one layer of this group."""
        spec = self.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            return spec.kv_cache_specs[layer_name]
        return spec


@dataclass
class KVCacheConfig:
    """The plan of one worker.

    `layer_formats` maps a layer to its format id; `kv_cache_layout` names the axis
    order of pages. Both are empty where a caller plans without layers.
    """

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    layer_formats: dict[str, str] = field(default_factory=dict)
    kv_cache_layout: str | None = None

    def layer_specs(self) -> dict[str, KVCacheSpec]:
        """The spec of every layer, in the order of the groups."""
        return {
            name: group.layer_spec(name)
            for group in self.kv_cache_groups
            for name in group.layer_names
        }

    @property
    def has_mamba_layers(self) -> bool:
        """True if a layer keeps a recurrent state, inside uniform groups too."""
        return any(isinstance(s, MambaSpec) for s in self._all_specs())

    @property
    def has_mixed_precision_kv_cache(self) -> bool:
        """True if attention layers store states in more than one format."""
        formats = {
            (spec.dtype, spec.kv_quant_mode, self.layer_formats.get(name))
            for name, spec in self.layer_specs().items()
            if isinstance(spec, AttentionSpec)
        }
        return len(formats) > 1

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """True if stale bytes of a reused block could be read as another format."""
        return self.has_mamba_layers or self.has_mixed_precision_kv_cache

    def _all_specs(self) -> list[KVCacheSpec]:
        specs: list[KVCacheSpec] = []
        for group in self.kv_cache_groups:
            spec = group.kv_cache_spec
            uniform = isinstance(spec, UniformTypeKVCacheSpecs)
            specs += spec.kv_cache_specs.values() if uniform else [spec]
        return specs
