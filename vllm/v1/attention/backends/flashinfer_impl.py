"""FLASHINFER's metadata and impl: pages written by our kernels, read by FlashInfer's.

Knows how to cut a batch into decodes and prefills, and which views of a page the
kernels take. Refuses to know FlashInfer's argument names (`ops.flashinfer_calls`) and
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    Kernels,
    kernels_for,
)
from vllm.v1.attention.backends.reference import scales_of
from vllm.v1.attention.backends.utils import (
    get_per_layer_parameters,
    infer_global_hyperparameters,
    split_decodes_and_prefills,
)
from vllm.v1.attention.ops import cuda_kernels, flashinfer_calls
from vllm.v1.attention.ops.flashinfer_calls import (
    Batch,
    Caches,
    LayerShape,
    PageBuffers,
    PageLists,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_formats import KVFormat, by_name
from vllm.v1.kv_formats.casts import saturate

logger = init_logger(__name__)

_TRITON_STORE = "vllm.v1.attention.ops.triton_store:store"
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends; zero before its first use


@lru_cache(maxsize=8)
def workspace_of(device: torch.device) -> torch.Tensor:
    """Scratch space that the layers of a device share: they run one after another."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@dataclass(kw_only=True)
class Part:
    """Requests `tokens` of the batch that run together: a planned wrapper (fa2), or the
    tensors that a kernel reads (trtllm-gen)."""

    tokens: slice
    one_query: bool
    causal: bool
    wrapper: Any = None
    batch: Batch | None = None


@dataclass(kw_only=True)
class FlashInferMetadata(AttentionMetadata):
    """The decodes of a step, if any, then its prefills, if any."""

    num_actual_tokens: int
    parts: list[Part]


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Plans fa2 on the host; for trtllm-gen only gathers tensors."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    reorder_batch_threshold = 1

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        found = get_per_layer_parameters(vllm_config, layer_names, FlashInferImpl)
        common = infer_global_hyperparameters(found)
        if not common.has_same_all_params:
            raise ValueError(
                f"FLASHINFER plans layers of a group together, but {', '.join(found)} "
                "differ in window, soft cap, scale or sinks: use --attention-backend "
                "TRITON_ATTN"
            )
        impl: FlashInferImpl = layers[layer_names[0]].impl
        self.kernels = impl.kernels
        self.page_size = kv_cache_spec.block_size
        self.shape = impl.layer_shape(self.page_size, vllm_config.model_config.dtype)
        self._prefill: Any = None
        self._decode: Any = None
        # Of captured batches, by their number of requests.
        self._captured: dict[int, tuple[Any, PageBuffers]] = {}

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashInferMetadata:
        common = common_attn_metadata
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=1
        )
        if not _is_causal(common):  # what a decode kernel takes for granted
            decodes, prefills, decode_tokens = 0, common.num_reqs, 0
        parts = []
        if decodes:
            parts.append(self._decodes(common, decodes, decode_tokens))
        if prefills:
            parts.append(self._prefills(common, decodes, decode_tokens))
        return FlashInferMetadata(
            num_actual_tokens=common.num_actual_tokens, parts=parts
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashInferMetadata:
        """Of requests with one query each, over buffers that keep their place."""
        common = common_attn_metadata
        part = self._decodes(common, common.num_reqs, common.num_reqs)
        if self.kernels is Kernels.FA2:
            part.wrapper = self._captured_wrapper(common)
            self.replan_for_graph(common)
        return FlashInferMetadata(num_actual_tokens=common.num_reqs, parts=[part])

    def replan_for_graph(self, common_attn_metadata: CommonAttentionMetadata) -> None:
        common = common_attn_metadata
        if self.kernels is Kernels.FA2:
            wrapper, _ = self._captured[common.num_reqs]
            lists = page_lists(common, 0, common.num_reqs, self.page_size)
            flashinfer_calls.plan_decode(wrapper, self.shape, lists)

    def _captured_wrapper(self, common: CommonAttentionMetadata) -> Any:
        requests, width = common.block_table_tensor.shape

        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self.device)

        if requests not in self._captured:
            buffers = PageBuffers(
                starts=buffer(requests + 1),
                pages=buffer(requests * width),
                last_states=buffer(requests),
            )
            workspace = workspace_of(self.device)
            wrapper = flashinfer_calls.decode_wrapper(workspace, buffers)
            self._captured[requests] = wrapper, buffers
        return self._captured[requests][0]

    def _decodes(
        self, common: CommonAttentionMetadata, count: int, tokens: int
    ) -> Part:
        part = Part(tokens=slice(0, tokens), one_query=True, causal=True)
        if self.kernels is Kernels.TRTLLM:
            part.batch = Batch(
                block_table=common.block_table_tensor[:count],
                seq_lens=common.seq_lens[:count],
                query_starts=None,
                context_starts=None,
                max_query_len=1,
                max_seq_len=common.max_seq_len,
            )
            return part
        if self._decode is None:
            workspace = workspace_of(self.device)
            self._decode = flashinfer_calls.decode_wrapper(workspace, None)
        lists = page_lists(common, 0, count, self.page_size)
        flashinfer_calls.plan_decode(self._decode, self.shape, lists)
        part.wrapper = self._decode
        return part

    def _prefills(
        self, common: CommonAttentionMetadata, first: int, first_token: int
    ) -> Part:
        last = common.num_reqs
        part = Part(
            tokens=slice(first_token, common.num_actual_tokens),
            one_query=False,
            causal=_is_causal(common),
        )
        if self.kernels is Kernels.TRTLLM:
            seq_lens = common.seq_lens[first:last]
            starts = torch.zeros_like(common.query_start_loc[first : last + 1])
            starts[1:] = seq_lens.cumsum(0)
            part.batch = Batch(
                block_table=common.block_table_tensor[first:last],
                seq_lens=seq_lens,
                query_starts=common.query_start_loc[first : last + 1] - first_token,
                context_starts=starts,
                max_query_len=common.max_query_len,
                max_seq_len=common.max_seq_len,
            )
            return part
        if self._prefill is None:
            workspace = workspace_of(self.device)
            self._prefill = flashinfer_calls.prefill_wrapper(workspace)
        flashinfer_calls.plan_prefill(
            self._prefill,
            self.shape,
            page_lists(common, first, last, self.page_size),
            common.query_start_loc_cpu[first : last + 1] - first_token,
            part.causal,
        )
        part.wrapper = self._prefill
        return part


def _is_causal(common: CommonAttentionMetadata) -> bool:
    if isinstance(common.causal, torch.Tensor):
        raise ValueError(
            "FLASHINFER takes one mask for all requests of a step: use "
            "--attention-backend TRITON_ATTN for requests that differ"
        )
    return common.causal


def page_lists(
    common: CommonAttentionMetadata, first: int, last: int, page_size: int
) -> PageLists:
    """The pages of requests first ... last - 1. Reads nothing back from the device."""
    lengths = common.seq_lens_cpu[first:last].int()
    counts = (lengths + page_size - 1) // page_size
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    rows = torch.repeat_interleave(torch.arange(first, last), counts)
    columns = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(counts)
    table = common.block_table_tensor
    index = (rows * table.shape[1] + columns).to(table.device, non_blocking=True)
    return PageLists(
        starts=starts,
        pages=table.flatten()[index],
        last_states=lengths - (counts - 1) * page_size,
    )


class FlashInferImpl(AttentionImpl[FlashInferMetadata]):
    """Decoder layers. What is written is what Triton's and the CUDA kernels write."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None or attn_type != AttentionType.DECODER:
            raise ValueError(
                f"FLASHINFER serves decoder layers without ALiBi, not {attn_type} "
                f"with slopes {alibi_slopes}: use --attention-backend TRITON_ATTN"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.soft_cap = float(logits_soft_cap or 0.0)
        self.shares_kv_cache = kv_sharing_target_layer_name is not None
        self.sinks = None if sinks is None else sinks.float()
        self.format = FlashInferBackend.arranged(by_name(kv_cache_dtype))
        capability = current_platform.get_device_capability()
        self.kernels = self._kernels(kernels_for(self.format, capability))
        self._store = _store_of(self.format)
        self._caches: tuple[Any, Caches] | None = None

    def _kernels(self, kernels: Kernels) -> Kernels:
        """trtllm-gen knows no soft caps; fa2 reads the same pages but NVFP4's."""
        if kernels is Kernels.TRTLLM and self.soft_cap:
            if self.format.mode.is_nvfp4 or self.sinks is not None:
                raise ValueError(
                    f"FLASHINFER has no soft caps over {self.kv_cache_dtype} pages, or "
                    "with sinks, on this device: use --kv-cache-dtype fp8 or "
                    "--attention-backend TRITON_ATTN"
                )
            return Kernels.FA2
        return kernels

    @property
    def window_left(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window - 1

    def layer_shape(self, page_size: int, model_dtype: torch.dtype) -> LayerShape:
        """What fa2 plans with."""
        fmt = self.format.resolve(model_dtype)
        codes = fmt.layout(self.head_size, self.head_size, model_dtype).fields[0]
        return LayerShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            page_size=page_size,
            scale=self.scale,
            window_left=self.window_left,
            soft_cap=self.soft_cap,
            query_dtype=model_dtype,
            cache_dtype=codes.element_dtype,
            token_head_scales=fmt.mode.is_per_token_head,
        )

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.shares_kv_cache:
            return
        self._store(
            kv_cache.view(torch.uint8),
            slot_mapping,
            key,
            value,
            self.format.resolve(kv_cache.dtype),
            scales_of(layer),
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashInferMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("FLASHINFER writes unquantised outputs only.")
        if attn_metadata is None:  # a profiling run has no cache to read
            return output.zero_()
        caches = self._views(kv_cache)
        for part in attn_metadata.parts:
            if part.batch is None:
                self._run_planned(part, layer, query, caches, output)
            else:
                self._run_trtllm(part, part.batch, layer, query, caches, output)
        return output

    def _run_planned(
        self,
        part: Part,
        layer: AttentionLayer,
        query: torch.Tensor,
        caches: Caches,
        output: torch.Tensor,
    ) -> None:
        scales = scales_of(layer)
        applied = self.format.per_tensor_scales
        flashinfer_calls.run(
            part.wrapper,
            query[part.tokens],
            caches,
            output[part.tokens],
            scales.k if applied else 1.0,
            scales.v if applied else 1.0,
        )

    def _run_trtllm(
        self,
        part: Part,
        batch: Batch,
        layer: AttentionLayer,
        query: torch.Tensor,
        caches: Caches,
        output: torch.Tensor,
    ) -> None:
        scales = scales_of(layer)
        applied = self.format.per_tensor_scales
        if self.format.mode.is_quantized:  # these kernels take queries of 8 bits
            query = saturate(query, torch.float8_e4m3fn)
        arguments: dict[str, Any] = {
            "score_scale": self.scale * (scales.k if applied else 1.0),
            "value_scale": scales.v if applied else 1.0,
            "window_left": self.window_left,
            "sinks": self.sinks,
        }
        workspace = workspace_of(query.device)
        tensors = query[part.tokens], caches, batch, output[part.tokens]
        if part.one_query:
            flashinfer_calls.trtllm_decode(workspace, *tensors, **arguments)
        else:
            flashinfer_calls.trtllm_prefill(
                workspace, *tensors, **arguments, causal=part.causal
            )

    def _views(self, kv_cache: torch.Tensor) -> Caches:
        """Made once per cache: a layer keeps its cache."""
        key = kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride()
        if self._caches is None or self._caches[0] != key:
            fmt = self.format.resolve(kv_cache.dtype)
            self._caches = (
                key,
                cache_views(fmt, kv_cache.view(torch.uint8), self.head_size),
            )
        return self._caches[1]


def cache_views(fmt: KVFormat, pages: torch.Tensor, head_size: int) -> Caches:
    """What the kernels take of uint8 pages [B, slots, N, C]; every tensor is a view."""
    layout = fmt.layout(head_size, head_size)

    def view(name: str) -> torch.Tensor:
        return layout.view(pages, name)

    if fmt.mode.is_nvfp4:
        # In stored order: where V scales interleave states, the kernel knows it.
        planes = [layout.plane_view(pages, side, 1) for side in range(layout.num_sides)]
        stored = [plane.transpose(3, 4).flatten(2) for plane in planes]
        k_scales, v_scales = (
            part.unflatten(2, (pages.shape[2], -1)).view(torch.float8_e4m3fn)
            for part in stored
        )
        return Caches(
            codes=(view("k_codes"), view("v_codes")), scales=(k_scales, v_scales)
        )
    if fmt.mode.is_per_token_head:
        per_token = view("k_scale").squeeze(-1), view("v_scale").squeeze(-1)
        return Caches(codes=(view("k"), view("v")), scales=per_token)
    return Caches(codes=(view("k"), view("v")), scales=None)


def _store_of(fmt: KVFormat) -> Any:
    """The kernel that writes: CUDA's for NVFP4 where it is built, else Triton's."""
    if fmt.mode.is_nvfp4:
        reason = cuda_kernels.why_unavailable()
        if not reason:
            return cuda_kernels.nvfp4_store
        logger.info_once("NVFP4 pages are written by Triton: %s", reason)
    return resolve(_TRITON_STORE)
