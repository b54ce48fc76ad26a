"""The base specs: how a state is multiplied into pages, and how specs merge.

Knows heads, sizes and published packing. Refuses to know any format's bytes (they come
from `KVFormat.packing`), any backend, and any pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from typing_extensions import Self

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, SpecError
from vllm.v1.kv_formats.mode import KVQuantMode

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_formats.base import KVFormat

S = TypeVar("S", bound="KVCacheSpec")

# Merge rules, stated in a field's metadata. A field without one merges as SAME.
SAME = {"merge": "same"}  # equal in every spec
ANY = {"merge": "any"}  # true if true in one spec
UNIQUE_OR_NONE = {"merge": "unique-or-none"}  # the one value that is not None


class SpecMergeError(SpecError):
    """Specs cannot share one group; the message names the field that differs."""


def replace_as(
    spec: KVCacheSpec,
    target_cls: type[S],
    drop: Sequence[str] = (),
    **changes: Any,
) -> S:
    """Builds a `target_cls` from every init field of `spec` but those in `drop`.

    Fields that only the target has keep their defaults. TypeError names a field that
    the target does not have.
    """
    values = {
        f.name: getattr(spec, f.name)
        for f in fields(spec)
        if f.init and f.name not in drop
    }
    return target_cls(**{**values, **changes})


@dataclass(frozen=True)
class KVCacheSpec:
    """What one layer stores. `block_size` is in tokens, every other size in bytes."""

    block_size: int

    #: Fields of which at most one may be set in a merged spec.
    exclusive_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def storage_block_size(self) -> int:
        """States per block, N: `block_size` unless a state stands for more tokens."""
        return self.block_size

    @property
    def num_states(self) -> int:
        """Stored states per block, N."""
        return self.storage_block_size

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer, padding included."""
        raise NotImplementedError(f"{type(self).__name__}.page_size_bytes")

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block that hold states."""
        return self.page_size_bytes

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes that one request of the maximum model length needs in this layer."""
        raise NotImplementedError(f"{type(self).__name__}.max_memory_usage_bytes")

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Block-table entries of one request of `max_len` tokens."""
        return cdiv(max_len, self.block_size)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same spec with `block_size` tokens per block."""
        return replace(self, block_size=block_size)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec for layers that share a group, by the merge rule of every field.

        `merge([s, s]) == s`. SpecMergeError names what differs: the class or a field.
        """
        if not specs:
            raise SpecMergeError(f"{cls.__name__}.merge needs at least one spec")
        first = specs[0]
        for spec in (first, *specs):
            if type(spec) is not type(first) or not isinstance(spec, cls):
                raise SpecMergeError(
                    f"cannot merge {type(spec).__name__} into {type(first).__name__} "
                    f"as {cls.__name__}: only specs of one class share a group"
                )
        values = {f.name: _merge_field(f, specs) for f in fields(first) if f.init}
        chosen = [n for n in cls.exclusive_fields if values[n] is not None]
        if len(chosen) > 1:
            raise SpecMergeError(
                f"cannot merge {cls.__name__}: {' and '.join(chosen)} are both set "
                f"({', '.join(str(values[n]) for n in chosen)}); at most one may be"
            )
        return type(first)(**values)

    def is_uniform_with_collection(
        self, kv_cache_specs: Mapping[str, KVCacheSpec]
    ) -> bool:
        """True if every spec derives from this one's registered uniform base.

        SpecError when this class is not registered.
        """
        base = KVCacheSpecRegistry.get_uniform_type_base_spec(self)
        if base is None:
            raise SpecError(
                f"{type(self).__name__} is not a registered KV cache spec: decorate it "
                "with @register_kv_cache_spec(manager_class=...)"
            )
        return all(isinstance(spec, base) for spec in kv_cache_specs.values())


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """A layer that stores H head slots x N states x C bytes per block.

    `num_kv_heads` is per tensor-parallel rank, `dtype` the storage dtype. A backend
    publishes packing through `num_head_slots` (H) and `state_content_bytes` (C); unset,
    they follow from the heads, the head sizes and the dtype.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: int = None  # type: ignore[assignment]  # set to head_size below
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    # Blocks of this layer may lie further apart than their bytes.
    indexes_kv_by_block_stride: bool = False
    num_head_slots: int | None = None
    state_content_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)

    @property
    def num_heads(self) -> int:
        """Head slots per block, H."""
        slots = self.num_head_slots
        return self.num_kv_heads if slots is None else slots

    @property
    def state_content_size_bytes(self) -> int:
        """Bytes of one (head slot, state) cell, C."""
        published = self.state_content_bytes
        return self._dense_state_bytes if published is None else published

    @property
    def _dense_state_bytes(self) -> int:
        return (self.head_size + self.head_size_v) * self.dtype.itemsize

    @property
    def is_packed(self) -> bool:
        """True once a backend has published head slots or bytes per state."""
        return self.num_head_slots is not None or self.state_content_bytes is not None

    @property
    def unpadded_page_size_bytes(self) -> int:
        """H x N x C bytes."""
        return self.num_heads * self.num_states * self.state_content_size_bytes

    @property
    def real_page_size_bytes(self) -> int:
        """Another name of `unpadded_page_size_bytes`."""
        return self.unpadded_page_size_bytes

    @property
    def page_size_bytes(self) -> int:
        """`page_size_padded` if set, else H x N x C. SpecError if padding is short."""
        return checked_padding(self, self.page_size_padded)

    def packed(self, fmt: KVFormat, model_dtype: torch.dtype | None = None) -> Self:
        """This spec with the packing of `fmt` published.

        What equals the derived value stays unset, so a dense spec returns itself.
        `model_dtype` matters to dense formats only; by default the storage dtype.
        """
        packing = fmt.packing(
            self.num_kv_heads,
            self.head_size,
            self.head_size_v,
            model_dtype or _model_dtype(self.dtype),
        )
        slots, state = packing.head_slots, packing.state_bytes
        if (slots, state) == (self.num_heads, self.state_content_size_bytes):
            return self
        return replace(
            self,
            num_head_slots=None if slots == self.num_kv_heads else slots,
            state_content_bytes=None if state == self._dense_state_bytes else state,
        )

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Entries per request; a block is spread over the context-parallel ranks."""
        ranks = vllm_config.parallel_config.decode_context_parallel_size
        return cdiv(max_len, self.block_size * ranks)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same spec with `block_size` tokens; padding grows where it must."""
        if self.page_size_padded is None:
            return replace(self, block_size=block_size)
        bare = replace(self, block_size=block_size, page_size_padded=None)
        if getattr(self, "alignment", None):
            return bare
        padded = max(self.page_size_padded, bare.unpadded_page_size_bytes)
        return replace(bare, page_size_padded=padded)


def checked_padding(
    spec: KVCacheSpec, padded: int | None, unpadded: int | None = None
) -> int:
    """The padded page in bytes, or the unpadded one when there is no padding.

    SpecError when the padded page does not hold the states.
    """
    bare = spec.unpadded_page_size_bytes if unpadded is None else unpadded
    if padded is None:
        return bare
    if padded < bare:
        raise SpecError(
            f"{type(spec).__name__}.page_size_padded is {padded} bytes, but a block of "
            f"{spec.block_size} tokens holds {bare} bytes: pad to at least that, or "
            "lower the block size"
        )
    return padded


def _model_dtype(storage: torch.dtype) -> torch.dtype:
    return storage if storage.is_floating_point else torch.bfloat16


def _merge_field(f: Field[Any], specs: Sequence[KVCacheSpec]) -> Any:
    rule = f.metadata.get("merge", SAME["merge"])
    values = [getattr(spec, f.name) for spec in specs]
    if rule == ANY["merge"]:
        return any(values)
    if rule == UNIQUE_OR_NONE["merge"]:
        values = [v for v in values if v is not None] or [None]
    if any(v != values[0] for v in values):
        seen = ", ".join(dict.fromkeys(map(str, values)))
        raise SpecMergeError(
            f"cannot merge {type(specs[0]).__name__}: {f.name} differs ({seen}); "
            "layers of one group agree on it"
        )
    return values[0]
