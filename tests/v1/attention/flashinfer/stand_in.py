"""FlashInfer's documented behaviour in torch, for a machine without a GPU.

Takes and checks the arguments that the package takes, and computes what its
documentation says: page lists or block tables, codes and scales as separate tensors
with heads before states, V scales in groups of four states for trtllm-gen. Not fast,
and no reference for FlashInfer's own rounding.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from tests.v1.attention.paged_batch import naive_attention
from vllm.v1.attention.ops import flashinfer_calls
from vllm.v1.kv_formats.casts import e2m1_table

Pair = tuple[torch.Tensor, torch.Tensor]
LEVELS = e2m1_table(torch.device("cpu"))
MIN_WORKSPACE = 1 << 20


@dataclass(kw_only=True)
class Problem:
    """Requests: queries start at `query_starts`, pages of each one, its length."""

    query_starts: list[int]
    pages: list[torch.Tensor]
    lengths: list[int]
    causal: bool
    window_left: int
    soft_cap: float
    scale: float
    sinks: torch.Tensor | None = None


def nvfp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[heads, states, size] of uint8 [heads, states, size / 2] and e4m3 scales."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    values = LEVELS[nibbles.long()].unflatten(-1, (-1, 16))
    return (values * scales.float()[..., None]).flatten(-2)


def of_four_states(scales: torch.Tensor) -> torch.Tensor:
    """Scales [heads, states, groups] stored in tiles of [4, groups] whose bytes go
    state by state within a group, as TensorRT-LLM's kernels read them."""
    heads, states, groups = scales.shape
    raw = scales.view(torch.uint8).reshape(heads, states // 4, groups, 4)
    plain = raw.transpose(2, 3).reshape(heads, states, groups)
    return plain.contiguous().view(torch.float8_e4m3fn)


def values_of(
    codes: torch.Tensor, scales: torch.Tensor | None, interleaved: bool
) -> torch.Tensor:
    """One request's float [heads, states, size] from pages [n, heads, states, ...]."""
    if scales is not None and codes.dtype == torch.uint8:
        assert scales.dtype == torch.float8_e4m3fn and scales.dim() == 4
        pages = [
            nvfp4_values(c, of_four_states(s) if interleaved else s)
            for c, s in zip(codes, scales, strict=True)
        ]
        return torch.cat(pages, 1)
    assert codes.dtype != torch.uint8
    values = codes.float()
    if scales is not None:
        assert scales.dtype == torch.float32 and scales.dim() == 3
        values = values * scales[..., None]
    return values.transpose(0, 1).flatten(1, 2)


def attend(
    problem: Problem,
    query: torch.Tensor,
    codes: Pair,
    scales: Pair | None,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
    interleaved: bool,
) -> None:
    sides = scales or (None, None)
    for row, (pages, length) in enumerate(
        zip(problem.pages, problem.lengths, strict=True)
    ):
        key, value = (
            values_of(c[pages], None if s is None else s[pages], interleaved and side)
            for side, (c, s) in enumerate(zip(codes, sides, strict=True))
        )
        first, last = problem.query_starts[row], problem.query_starts[row + 1]
        window = None if problem.window_left < 0 else problem.window_left + 1
        out[first:last] = naive_attention(
            query[first:last].float(),
            key[:, :length].transpose(0, 1) * k_scale,
            value[:, :length].transpose(0, 1) * v_scale,
            first_position=length - (last - first),
            scale=problem.scale,
            sliding_window=window,
            soft_cap=problem.soft_cap or None,
            sinks=problem.sinks,
            causal=problem.causal,
        ).to(out.dtype)


def listed(
    starts: torch.Tensor, pages: torch.Tensor, last: torch.Tensor, page_size: int
) -> tuple[list[torch.Tensor], list[int]]:
    """Pages and lengths of requests, from the lists of a plan."""
    bounds = starts.tolist()
    assert starts.dtype == pages.dtype == last.dtype == torch.int32
    assert bounds[0] == 0 and bounds[-1] == len(pages)
    found = [pages[a:b].long() for a, b in pairwise(bounds)]
    assert bool(((last > 0) & (last <= page_size)).all())
    counts = zip(found, last.tolist(), strict=True)
    return found, [(len(p) - 1) * page_size + states for p, states in counts]


class Wrapper:
    """What both wrappers share."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, backend: str
    ) -> None:
        assert float_workspace_buffer.nbytes >= MIN_WORKSPACE
        assert (kv_layout, backend) == ("HND", "fa2")
        self.problem: Problem | None = None

    def _planned(
        self,
        query_starts: torch.Tensor,
        lists: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        heads: tuple[int, int, int],
        page_size: int,
        kv_data_type: torch.dtype,
        use_token_head_sf: bool,
        **rest: Any,
    ) -> None:
        pages, lengths = listed(*lists, page_size)
        if use_token_head_sf:
            assert kv_data_type in (torch.float8_e4m3fn, torch.float8_e5m2)
        self.heads, self.page_size, self.kv_data_type = heads, page_size, kv_data_type
        self.token_head = use_token_head_sf
        self.problem = Problem(
            query_starts=query_starts.tolist(), pages=pages, lengths=lengths, **rest
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pair,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        kv_cache_sf: Pair | None = None,
    ) -> torch.Tensor:
        num_heads, num_kv_heads, head_size = self.heads
        assert q.shape[1:] == (num_heads, head_size)
        for codes in paged_kv_cache:
            assert codes.dtype == self.kv_data_type
            width = head_size // 2 if codes.dtype == torch.uint8 else head_size
            assert codes.shape[1:] == (num_kv_heads, self.page_size, width)
        if self.token_head:
            for scales in kv_cache_sf or ():
                assert scales.shape == paged_kv_cache[0].shape[:3]
        assert self.problem is not None and out is not None
        scales = (1.0 if s is None else s for s in (k_scale, v_scale))
        sides = paged_kv_cache, kv_cache_sf
        attend(self.problem, q, *sides, *scales, out, interleaved=False)
        return out


class Prefill(Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        self._planned(
            qo_indptr,
            (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk),
            page_size,
            kv_data_type or q_data_type,
            use_token_head_sf,
            causal=causal,
            window_left=window_left,
            soft_cap=logits_soft_cap or 0.0,
            scale=sm_scale or head_dim_qk**-0.5,
        )


class Decode(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        assert use_tensor_cores
        self.buffers = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        assert all((b is not None) == use_cuda_graph for b in self.buffers)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        lists = indptr, indices, last_page_len
        for buffer, part in zip(self.buffers, lists, strict=True):
            if buffer is not None:  # of a captured batch: filled in place
                buffer[: len(part)] = part
        self._planned(
            torch.arange(len(indptr)),
            lists,
            (num_qo_heads, num_kv_heads, head_dim),
            page_size,
            kv_data_type or q_data_type,
            use_token_head_sf,
            causal=True,
            window_left=window_left,
            soft_cap=logits_soft_cap or 0.0,
            scale=sm_scale or head_dim**-0.5,
        )


def trtllm(
    query: torch.Tensor,
    kv_cache: Pair,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    kv_layout: str,
    kv_cache_sf: Pair | None,
    causal: bool = True,
) -> None:
    """Both functions of trtllm-gen: no plan, no soft cap; quantised pages want queries
    of 8 bits; scales of a head's page lie together."""
    assert kv_layout == "HND" and workspace_buffer.nbytes >= MIN_WORKSPACE
    narrow = kv_cache[0].dtype in (torch.uint8, torch.float8_e4m3fn)
    assert narrow == (query.dtype == torch.float8_e4m3fn)
    assert seq_lens.dtype == block_tables.dtype == torch.int32
    for scales in kv_cache_sf or ():
        assert scales.stride()[-2:] == (scales.shape[-1], 1)
    page_size = kv_cache[0].shape[2]
    lengths = seq_lens.tolist()
    problem = Problem(
        query_starts=query_starts.tolist(),
        pages=[
            row[: -(-length // page_size)].long()
            for row, length in zip(block_tables, lengths, strict=True)
        ],
        lengths=lengths,
        causal=causal,
        window_left=window_left,
        soft_cap=0.0,
        scale=bmm1_scale,
        sinks=sinks,
    )
    attend(
        problem, query, kv_cache, kv_cache_sf, 1.0, bmm2_scale, out, interleaved=True
    )


def trtllm_prefill(
    *,
    max_q_len: int,
    max_kv_len: int,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    **rest: Any,
) -> None:
    lengths = rest["seq_lens"]
    assert len(lengths) == batch_size and int(lengths.max()) <= max_kv_len
    assert int(cum_seq_lens_q.diff().max()) <= max_q_len
    assert torch.equal(cum_seq_lens_kv.diff(), lengths)
    trtllm(query_starts=cum_seq_lens_q, **rest)


def trtllm_decode(
    *, max_seq_len: int, backend: str, q_len_per_req: int, **rest: Any
) -> None:
    lengths = rest["seq_lens"]
    assert (backend, q_len_per_req) == ("trtllm-gen", 1)
    assert int(lengths.max()) <= max_seq_len and len(rest["query"]) == len(lengths)
    trtllm(query_starts=torch.arange(len(lengths) + 1), **rest)


TARGETS: dict[str, Any] = {
    flashinfer_calls.PREFILL: Prefill,
    flashinfer_calls.DECODE: Decode,
    flashinfer_calls.TRTLLM_PREFILL: trtllm_prefill,
    flashinfer_calls.TRTLLM_DECODE: trtllm_decode,
}


@dataclass
class StandIn:
    """Put in the place of `resolve`; counts what was asked for."""

    calls: dict[str, int] = field(default_factory=dict)

    def __call__(self, path: str) -> Any:
        self.calls[path] = self.calls.get(path, 0) + 1
        return TARGETS[path]
