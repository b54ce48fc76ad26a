"""Plans and caches of a few layers without a model, for every format."""

from typing import Any

import torch

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_formats import KVFormat
from vllm.v1.worker.kv_cache_init import (
    allocate_pages,
    byte_view,
    is_recurrent,
    state_views,
    typed_view,
)

BLOCK = 16
LATENT = 576


def spec_of(fmt: KVFormat, **changes: Any) -> KVCacheSpec:
    """Four heads of 64, or one latent state."""
    sizes: dict[str, Any] = {"num_kv_heads": 4, "head_size": 64}
    kind: Any = FullAttentionSpec
    if fmt.latent:
        kind, sizes = MLAAttentionSpec, {"num_kv_heads": 1, "head_size": LATENT}
    spec = kind(
        block_size=BLOCK,
        dtype=fmt.storage_dtype(torch.bfloat16),
        kv_quant_mode=fmt.mode,
        **sizes,
        **changes,
    )
    return spec.packed(fmt)


def states() -> MambaSpec:
    return MambaSpec(
        block_size=BLOCK,
        shapes=((3, 8), (2, 4, 4)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=4096,
        mamba_cache_mode="align",
    )


def plan_of(
    layers: dict[str, tuple[KVCacheSpec, str]],
    layout: KVCacheLayout,
    num_blocks: int = 6,
    group_sizes: tuple[int, ...] = (),
) -> KVCacheConfig:
    """Layers by name with spec and format id, in groups of the given sizes (one group
    by default); blocks of all layers in one backing where the layout says so."""
    names = list(layers)
    sizes = group_sizes or (len(names),)
    groups, at = [], 0
    for size in sizes:
        members = names[at : at + size]
        groups.append(KVCacheGroupSpec(members, layers[members[0]][0]))
        at += size
    pages = [layers[name][0].page_size_bytes for name in names]
    if layout.block_outermost:
        total = sum(pages)
        offsets = [sum(pages[:i]) for i in range(len(pages))]
        tensors = [
            KVCacheTensor(
                size=total * num_blocks,
                shared_by=[name],
                offset=offset,
                block_stride=total,
            )
            for name, offset in zip(names, offsets, strict=True)
        ]
    else:
        tensors = [
            KVCacheTensor(size=page * num_blocks, shared_by=[name])
            for name, page in zip(names, pages, strict=True)
        ]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        layer_formats={name: fmt for name, (_, fmt) in layers.items() if fmt},
        kv_cache_layout=layout.name,
    )


def caches_of(plan: KVCacheConfig, seed: int) -> dict[str, Any]:
    """What a worker registers, filled with random bytes."""
    layout = KVCacheLayout.from_name(plan.kv_cache_layout or "")
    generator = torch.Generator().manual_seed(seed)
    caches: dict[str, Any] = {}
    for name, pages in allocate_pages(plan, torch.device("cpu")).items():
        backing = pages.backing.view(torch.uint8)
        backing.copy_(
            torch.randint(0, 256, backing.shape, dtype=torch.uint8, generator=generator)
        )
        if is_recurrent(pages.spec):
            caches[name] = state_views(pages)
        else:
            caches[name] = typed_view(byte_view(pages, layout), pages.spec.dtype, name)
    return caches


def block_bytes(cache: Any, block_id: int) -> list[bytes]:
    """The logical content of a block, whatever its order in memory."""
    tensors = cache if isinstance(cache, list) else [cache]
    return [
        t[block_id].contiguous().view(torch.uint8).numpy().tobytes() for t in tensors
    ]
