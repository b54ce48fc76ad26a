"""Every call into the package flashinfer (0.7), by keyword.

Knows names, argument names and argument types of that package, and nothing of formats,
batches or layers. A test compares each call with the installed package's signatures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm.utils.import_utils import resolve

PREFILL = "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper"
DECODE = "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper"
TRTLLM_PREFILL = "flashinfer.prefill:trtllm_batch_context_with_kv_cache"
TRTLLM_DECODE = "flashinfer.decode:trtllm_batch_decode_with_kv_cache"

_FA2 = "fa2"
_TRTLLM = "trtllm-gen"
_HEADS_FIRST = "HND"  # [pages, heads, states, size], of any outer strides

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Caches:
    """One layer's pages as flashinfer sees them, K and V apart.

    `codes`: [pages, heads, states, size] in the stored type, packed e2m1 as uint8
    [..., size / 2]. `scales`: None; or e4m3 [pages, heads, states, size / 16] of NVFP4;
    or float32 [pages, heads, states], one per token and head.
    """

    codes: Pair
    scales: Pair | None


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What a plan knows of the layers that run under it. `window_left` is -1 without a
    window. `token_head_scales`: fp8 codes have a scale per token and head."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    scale: float
    window_left: int
    soft_cap: float
    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    token_head_scales: bool


@dataclass(frozen=True, kw_only=True)
class PageLists:
    """The pages of each request: int32 `starts` [R + 1] and `last_states` [R] (states
    in the last page) on the host, `pages` [starts[R]] on the device."""

    starts: torch.Tensor
    pages: torch.Tensor
    last_states: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PageBuffers:
    """Device memory that a captured graph reads page lists from, int32: `starts`
    [R + 1], `pages` [most pages], `last_states` [R]."""

    starts: torch.Tensor
    pages: torch.Tensor
    last_states: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What kernels without a plan read: `block_table` int32 [R, W], `seq_lens` int32
    [R], `query_starts` and `context_starts` int32 [R + 1] (None where every request has
    one query), all on the device; and host numbers."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor | None
    context_starts: torch.Tensor | None
    max_query_len: int
    max_seq_len: int


# --- planned: fa2 -------------------------------------------------------------------


def prefill_wrapper(workspace: torch.Tensor) -> Any:
    """A wrapper to plan with `plan_prefill`; `workspace` is uint8 on the device."""
    return resolve(PREFILL)(
        float_workspace_buffer=workspace, kv_layout=_HEADS_FIRST, backend=_FA2
    )


def decode_wrapper(workspace: torch.Tensor, buffers: PageBuffers | None) -> Any:
    """A wrapper to plan with `plan_decode`; with `buffers` its runs may be captured."""
    return resolve(DECODE)(
        float_workspace_buffer=workspace,
        kv_layout=_HEADS_FIRST,
        use_cuda_graph=buffers is not None,
        use_tensor_cores=True,  # NVFP4 and scales per token and head need them
        paged_kv_indptr_buffer=buffers.starts if buffers else None,
        paged_kv_indices_buffer=buffers.pages if buffers else None,
        paged_kv_last_page_len_buffer=buffers.last_states if buffers else None,
        backend=_FA2,
    )


def plan_prefill(
    wrapper: Any,
    shape: LayerShape,
    lists: PageLists,
    query_starts: torch.Tensor,
    causal: bool,
) -> None:
    """Plans requests of any number of queries; `query_starts` int32 [R + 1], host."""
    wrapper.plan(
        qo_indptr=query_starts,
        paged_kv_indptr=lists.starts,
        paged_kv_indices=lists.pages,
        paged_kv_last_page_len=lists.last_states,
        num_qo_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim_qk=shape.head_size,
        page_size=shape.page_size,
        causal=causal,
        sm_scale=shape.scale,
        window_left=shape.window_left,
        logits_soft_cap=shape.soft_cap,
        q_data_type=shape.query_dtype,
        kv_data_type=shape.cache_dtype,
        use_token_head_sf=shape.token_head_scales,
    )


def plan_decode(wrapper: Any, shape: LayerShape, lists: PageLists) -> None:
    """Plans requests of one query each."""
    wrapper.plan(
        indptr=lists.starts,
        indices=lists.pages,
        last_page_len=lists.last_states,
        num_qo_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        page_size=shape.page_size,
        window_left=shape.window_left,
        logits_soft_cap=shape.soft_cap,
        q_data_type=shape.query_dtype,
        kv_data_type=shape.cache_dtype,
        sm_scale=shape.scale,
        use_token_head_sf=shape.token_head_scales,
    )


def run(
    wrapper: Any,
    query: torch.Tensor,
    caches: Caches,
    output: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Attends as planned. query [T, Hq, D], output [T, Hq, D]; scales per tensor."""
    wrapper.run(
        q=query,
        paged_kv_cache=caches.codes,
        k_scale=k_scale,
        v_scale=v_scale,
        out=output,
        kv_cache_sf=caches.scales,
    )


# --- unplanned: trtllm-gen ------------------------------------------------------------


def trtllm_prefill(
    workspace: torch.Tensor,
    query: torch.Tensor,
    caches: Caches,
    batch: Batch,
    output: torch.Tensor,
    *,
    score_scale: float,
    value_scale: float,
    window_left: int,
    sinks: torch.Tensor | None,
    causal: bool,
) -> None:
    """Attends requests of any number of queries. V scales interleave four states."""
    resolve(TRTLLM_PREFILL)(
        query=query,
        kv_cache=caches.codes,
        workspace_buffer=workspace,
        block_tables=batch.block_table,
        seq_lens=batch.seq_lens,
        max_q_len=batch.max_query_len,
        max_kv_len=batch.max_seq_len,
        bmm1_scale=score_scale,
        bmm2_scale=value_scale,
        batch_size=batch.seq_lens.shape[0],
        cum_seq_lens_q=batch.query_starts,
        cum_seq_lens_kv=batch.context_starts,
        window_left=window_left,
        out=output,
        kv_layout=_HEADS_FIRST,
        sinks=sinks,
        kv_cache_sf=caches.scales,
        causal=causal,
    )


def trtllm_decode(
    workspace: torch.Tensor,
    query: torch.Tensor,
    caches: Caches,
    batch: Batch,
    output: torch.Tensor,
    *,
    score_scale: float,
    value_scale: float,
    window_left: int,
    sinks: torch.Tensor | None,
) -> None:
    """Attends requests of one query each."""
    resolve(TRTLLM_DECODE)(
        query=query,
        kv_cache=caches.codes,
        workspace_buffer=workspace,
        block_tables=batch.block_table,
        seq_lens=batch.seq_lens,
        max_seq_len=batch.max_seq_len,
        bmm1_scale=score_scale,
        bmm2_scale=value_scale,
        window_left=window_left,
        out=output,
        sinks=sinks,
        kv_layout=_HEADS_FIRST,
        backend=_TRTLLM,
        q_len_per_req=1,
        kv_cache_sf=caches.scales,
    )
