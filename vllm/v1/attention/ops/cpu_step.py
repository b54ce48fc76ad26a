"""Arguments of the C++ kernels for a layer, to be kept: rows and batch are filled in
later, step by step.

Knows what `cpu_kernels` knows. Calls nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch

from vllm.v1.attention.ops.cpu_cells import cells_of
from vllm.v1.attention.ops.cpu_kernels import AttentionArgs, StoreArgs, layer_pages
from vllm.v1.kv_formats import KVFormat, KVScales


@dataclass(frozen=True, kw_only=True)
class LayerArgs:
    """A layer's write and read. `store` is None where another layer writes the cache;
    `kept` must live as long as the arguments."""

    store: StoreArgs | None
    attention: AttentionArgs
    kept: tuple[Any, ...]


def layer_args(
    pages: torch.Tensor,
    fmt: KVFormat,
    head_size: int,
    head_size_v: int,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
    scales: KVScales,
    *,
    stores: bool,
) -> LayerArgs:
    """See `cpu_kernels.store` and `cpu_kernels.paged_attention` for the meanings."""
    cells = cells_of(fmt, head_size, head_size_v)
    layer = layer_pages(pages, cells, head_size, head_size_v)
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
    k_scale = scales.k if cells.scaled else 1.0
    v_scale = scales.v if cells.scaled else 1.0
    key_table, value_table = cells.attention_tables
    attention = AttentionArgs(
        pages=layer,
        sinks=None if sinks is None else sinks.data_ptr(),
        cell_format=cells.number,
        causal=1,
        sliding_window=sliding_window,
        scale=scale * k_scale,
        soft_cap=soft_cap,
        k_scale=1.0,
        v_scale=v_scale,
        key_table=key_table,
        value_table=value_table,
    )
    store_key, store_value = cells.store_tables
    store = StoreArgs(
        pages=layer,
        cell_format=cells.number,
        k_scale=k_scale,
        v_scale=v_scale,
        key_table=store_key,
        value_table=store_value,
    )
    return LayerArgs(
        store=store if stores else None,
        attention=attention,
        kept=(pages, cells, sinks),
    )
