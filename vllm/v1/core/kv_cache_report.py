"""What a KV-cache plan holds: one set of numbers for start-up and `vllm kv-plan`.

Knows plans and specs. Every byte comes from a spec, every capacity from the planner.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_capacity import get_kv_cache_capacity
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    get_kv_cache_spec_kind,
)
from vllm.v1.kv_formats import by_id, by_name

# What a format is compared with: the cache that keeps every element in two bytes.
DENSE_REFERENCE = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers of one format and one spec. H, N and C are those of the page [B, H, N, C].

    `bytes_per_token` and `dense_bytes_per_token` are for all of these layers together.
    """

    format_id: str
    backend: str
    kind: str
    spec: str
    num_layers: int
    layers: str
    block_size: int
    head_slots: int
    num_states: int
    state_bytes: int
    page_bytes: int
    bytes_per_token: float
    dense_bytes_per_token: float


@dataclass(frozen=True, kw_only=True)
class KVPlan:
    """A plan in numbers. Capacities are in tokens, concurrency in requests of the
    maximum length."""

    cache_dtype: str
    format_id: str
    groups: tuple[LayerGroup, ...]
    block_size: int
    num_blocks: int
    pool_bytes: int
    max_model_len: int
    capacity_tokens: int
    max_concurrency: float

    @property
    def bytes_per_token(self) -> float:
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def dense_bytes_per_token(self) -> float:
        return sum(group.dense_bytes_per_token for group in self.groups)

    @property
    def saving(self) -> float:
        """How many times more tokens fit than in a bfloat16 cache."""
        return self.dense_bytes_per_token / self.bytes_per_token

    def other_formats(self) -> list[tuple[str, str]]:
        """(layers, format) of the attention layers that do not store the format that
        was asked for, such as ("0-1,28-29", "bfloat16"). The arrangement that a backend
        chooses makes no other format of it."""
        asked = _bare_name(self.format_id)
        named = [(g.layers, _bare_name(g.format_id)) for g in self.groups]
        return [(layers, name) for layers, name in named if name not in ("", asked)]

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "bytes_per_token": self.bytes_per_token,
            "dense_bytes_per_token": self.dense_bytes_per_token,
            "saving": self.saving,
        }


def _bare_name(format_id: str) -> str:
    """The name of a format, without its arrangement and the backend that packs it;
    nothing for layers whose states have no format."""
    found = format_id.partition(" by ")[0]
    return by_id(found).name if found else ""


def kv_plan(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    backends: Mapping[str, str] | None = None,
) -> KVPlan:
    """Describes a plan. `backends` names the attention backend of each layer."""
    tokens, concurrency = get_kv_cache_capacity(vllm_config, kv_cache_config)
    return KVPlan(
        cache_dtype=vllm_config.cache_config.cache_dtype,
        format_id=by_name(vllm_config.cache_config.cache_dtype)
        .resolve(vllm_config.model_config.dtype)
        .format_id,
        groups=tuple(layer_groups(kv_cache_config, backends or {})),
        block_size=vllm_config.cache_config.block_size,
        num_blocks=kv_cache_config.num_blocks,
        pool_bytes=_pool_bytes(kv_cache_config),
        max_model_len=vllm_config.model_config.max_model_len,
        capacity_tokens=tokens,
        max_concurrency=concurrency,
    )


def layer_groups(
    kv_cache_config: KVCacheConfig, backends: Mapping[str, str]
) -> Iterable[LayerGroup]:
    """The layers of a plan, those of equal spec, format and backend together."""
    alike: dict[tuple[KVCacheSpec, str, str], list[str]] = {}
    for name, spec in kv_cache_config.layer_specs().items():
        format_id = kv_cache_config.layer_formats.get(name, "")
        key = (spec, format_id, backends.get(name, ""))
        alike.setdefault(key, []).append(name)
    for (spec, format_id, backend), names in alike.items():
        yield _group(spec, format_id, backend, names)


def _group(
    spec: KVCacheSpec, format_id: str, backend: str, names: list[str]
) -> LayerGroup:
    page = spec.page_size_bytes
    attends = isinstance(spec, AttentionSpec)
    return LayerGroup(
        format_id=format_id,
        backend=backend,
        kind=get_kv_cache_spec_kind(spec).value,
        spec=type(spec).__name__,
        num_layers=len(names),
        layers=_indices(names),
        block_size=spec.block_size,
        head_slots=spec.num_heads if attends else 1,
        num_states=spec.storage_block_size if attends else 1,
        state_bytes=spec.state_content_size_bytes if attends else page,
        page_bytes=page,
        bytes_per_token=len(names) * page / spec.block_size,
        dense_bytes_per_token=len(names) * _dense_bytes(spec),
    )


def _dense_bytes(spec: KVCacheSpec) -> float:
    """Bytes of one token of such a layer in the dense reference format."""
    if not isinstance(spec, AttentionSpec):
        return spec.page_size_bytes / spec.block_size
    heads, size, size_v = spec.num_kv_heads, spec.head_size, spec.head_size_v
    fmt = by_name(DENSE_REFERENCE)
    return fmt.bytes_per_token(heads, size, size_v, torch.bfloat16)


def _indices(names: list[str]) -> str:
    """The layer numbers in names such as "model.layers.7.self_attn.attn", as ranges."""
    numbers = sorted(
        int(part) for name in names for part in name.split(".") if part.isdigit()
    )
    if len(numbers) != len(names):
        return ", ".join(names)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _pool_bytes(config: KVCacheConfig) -> int:
    """Bytes of memory behind a plan; tensors with a block stride share one backing."""
    shared = [t.size for t in config.kv_cache_tensors if t.block_stride]
    own = [t.size for t in config.kv_cache_tensors if not t.block_stride]
    return sum(own) + max(shared, default=0)
