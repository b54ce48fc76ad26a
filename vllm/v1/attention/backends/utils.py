"""Helpers that several backends share: splitting a batch, local chunks, layouts.

Knows query and context lengths. Refuses to know formats and kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from vllm import envs
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_layout import KVCacheLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

#: Slot of a padding token: nothing is written for it.
PAD_SLOT_ID = -1

KVCacheLayoutType = Literal["NHD", "HND"]

_layout_override: str | None = None


def get_kv_cache_layout() -> str:
    """The order within one layer that was asked for: by `set_kv_cache_layout`, else
    by VLLM_KV_CACHE_LAYOUT, else NHD."""
    return _layout_override or envs.VLLM_KV_CACHE_LAYOUT or "NHD"


def set_kv_cache_layout(cache_layout: KVCacheLayoutType | None) -> None:
    """Overrides the environment in this process; None takes the override back.

    Raises ValueError for an unknown name.
    """
    global _layout_override
    if cache_layout is not None:
        KVCacheLayout.from_name(cache_layout)
    _layout_override = cache_layout


# --- splitting a batch ----------------------------------------------------------


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> tuple[int, int, int, int]:
    """(decodes, prefills, decode tokens, prefill tokens) of a batch whose decodes
    come first.

    A decode has at most `decode_threshold` queries; with `require_uniform`, as many
    as the first request. Unless `treat_short_extends_as_decodes`, a request still in
    its prompt is a prefill however short. All after the first prefill are prefills.
    """
    common = common_attn_metadata
    query_lens = common.query_start_loc_cpu.diff()[: common.num_reqs]
    is_prefill = query_lens > decode_threshold
    if require_uniform and common.num_reqs:
        is_prefill |= query_lens != query_lens[0]
    if not treat_short_extends_as_decodes and common.is_prefilling is not None:
        is_prefill |= common.is_prefilling[: common.num_reqs].to(is_prefill.device)
    prefills = is_prefill.nonzero()
    decodes = int(prefills[0]) if len(prefills) else common.num_reqs
    decode_tokens = int(common.query_start_loc_cpu[decodes])
    prefill_tokens = common.num_actual_tokens - decode_tokens
    if decodes == common.num_reqs:  # padding tokens count as decode tokens
        decode_tokens, prefill_tokens = common.num_actual_tokens, 0
    return decodes, common.num_reqs - decodes, decode_tokens, prefill_tokens


def reorder_batch_to_split_decodes_and_prefills(
    input_batch: Any,
    scheduler_output: SchedulerOutput,
    decode_threshold: int = 1,
) -> bool:
    """Swaps requests so that decodes come first, then continued prompts, then new
    ones. True if anything moved.

    Uses `input_batch.req_ids`, `.num_computed_tokens_cpu` and `.swap_states(i, j)`.
    """

    def rank(index: int) -> int:
        request = input_batch.req_ids[index]
        if scheduler_output.num_scheduled_tokens[request] <= decode_threshold:
            return 0
        return 1 if input_batch.num_computed_tokens_cpu[index] > 0 else 2

    ranks = [rank(i) for i in range(len(input_batch.req_ids))]
    moved = False
    for position, wanted in enumerate(sorted(ranks)):
        if ranks[position] == wanted:
            continue
        # Take the last request of the wanted kind: it is furthest out of place.
        other = len(ranks) - 1 - ranks[::-1].index(wanted)
        input_batch.swap_states(position, other)
        ranks[position], ranks[other] = ranks[other], ranks[position]
        moved = True
    return moved


def get_dcp_local_seq_lens(
    seq_lens: torch.Tensor,
    dcp_size: int = 1,
    dcp_rank: int | None = None,
    cp_kv_cache_interleave_size: int = 1,
) -> torch.Tensor:
    """Tokens of each request that a context-parallel rank stores, int32.

    Runs of `cp_kv_cache_interleave_size` tokens go round the ranks. Shape [R] for one
    rank, [R, dcp_size] for all of them when `dcp_rank` is None.
    """
    run = cp_kv_cache_interleave_size
    ranks = torch.arange(dcp_size, dtype=torch.int32, device=seq_lens.device)
    if dcp_rank is not None:
        ranks = ranks[dcp_rank : dcp_rank + 1]
    lengths = seq_lens.to(torch.int32)[:, None]
    rounds = lengths // (run * dcp_size)
    rest = lengths - rounds * run * dcp_size
    local = rounds * run + (rest - ranks * run).clamp(0, run)
    return local if dcp_rank is None else local[:, 0]


# --- parameters of the layers of a group ------------------------------------------


@dataclass
class PerLayerParameters:
    """What a kernel plan must share; `window_left` is -1 without a window.

    The `has_same_*` flags are filled in by `infer_global_hyperparameters`.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float
    has_sinks: bool = False
    has_same_window_lefts: bool | None = field(default=None, compare=False)
    has_same_all_params: bool | None = field(default=None, compare=False)


def get_per_layer_parameters(
    vllm_config: VllmConfig, layer_names: list[str], cls_: type[Any]
) -> dict[str, PerLayerParameters]:
    """Parameters of the named layers, whose impls must be of class `cls_`."""
    layers = vllm_config.compilation_config.static_forward_context
    found: dict[str, PerLayerParameters] = {}
    for name in layer_names:
        impl = layers[name].impl
        if not isinstance(impl, cls_):
            raise ValueError(
                f"Layer {name} runs {type(impl).__name__}, expected {cls_.__name__}: "
                "layers of one group share one backend."
            )
        window = impl.sliding_window
        found[name] = PerLayerParameters(
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=getattr(impl, "soft_cap", None) or None,
            sm_scale=impl.scale,
            has_sinks=getattr(impl, "sinks", None) is not None,
        )
    return found


def infer_global_hyperparameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> PerLayerParameters:
    """The first layer's parameters, and whether the others equal them."""
    layers = list(per_layer_params.values())
    if not layers:
        raise ValueError("No attention layers in this group: nothing to infer from.")
    first = layers[0]
    return replace(
        first,
        has_same_window_lefts=all(p.window_left == first.window_left for p in layers),
        has_same_all_params=all(p == first for p in layers),
    )


# --- chunked local attention --------------------------------------------------------


def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    common_attn_metadata: CommonAttentionMetadata,
    block_size: int = 0,
) -> tuple[CommonAttentionMetadata, Callable[[torch.Tensor], torch.Tensor]]:
    """Cuts each request at chunk borders, so that causal attention stays in a chunk.

    Every (request, chunk) that has queries becomes one virtual request; its context
    starts at the chunk. Returns the new batch and a function that makes its block
    table [V, chunk / block_size] from the original [R, W]. Raises ValueError unless
    chunks are whole blocks.
    """
    if block_size <= 0 or attn_chunk_size % block_size:
        raise ValueError(
            f"attention chunks of {attn_chunk_size} tokens are not whole blocks of "
            f"{block_size} tokens: choose a --block-size that divides the chunk."
        )
    common = common_attn_metadata
    rows, chunks, query_lens, contexts = [], [], [], []
    query_lens_cpu = common.query_start_loc_cpu.diff().tolist()
    lengths = zip(query_lens_cpu, common.seq_lens_cpu.tolist(), strict=True)
    for row, (query_len, seq_len) in enumerate(lengths):
        position = seq_len - query_len
        while position < seq_len:
            chunk = position // attn_chunk_size
            end = min(seq_len, (chunk + 1) * attn_chunk_size)
            rows.append(row)
            chunks.append(chunk)
            query_lens.append(end - position)
            contexts.append(end - chunk * attn_chunk_size)
            position = end
    device = common.block_table_tensor.device
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0)
    seq_lens = torch.tensor(contexts, dtype=torch.int32)
    row_index = torch.tensor(rows, device=device)[:, None]
    blocks_per_chunk = cdiv(attn_chunk_size, block_size)
    first_block = torch.tensor(chunks, device=device)[:, None] * blocks_per_chunk
    columns = first_block + torch.arange(blocks_per_chunk, device=device)

    def make_block_table(block_table: torch.Tensor) -> torch.Tensor:
        return block_table[row_index, columns.clamp(max=block_table.shape[1] - 1)]

    starts = starts.to(torch.int32)
    virtual = common.replace(
        query_start_loc=starts.to(common.query_start_loc.device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(common.seq_lens.device),
        num_reqs=len(rows),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(contexts, default=0),
        block_table_tensor=make_block_table(common.block_table_tensor),
        causal=True,
        _seq_lens_cpu=seq_lens,
    )
    return virtual, make_block_table
