"""The attention layer of a decoder: stores K and V, then attends to what is stored.

Knows its heads, window and cache dtype. Refuses to know any format's bytes (the backend
publishes them) and where pages lie (the worker binds them).
"""

from dataclasses import replace
from typing import Any

import torch

from vllm.config import (
    CacheConfig,
    VllmConfig,
    get_current_vllm_config,
    get_current_vllm_config_or_none,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.kv_layer import (
    SLIDING_WINDOW,
    KVCacheLayer,
    extract_layer_index,
    layer_cache_dtype,
    model_dtype_of,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.step import NotPlanned, Slot, ops, traces
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from vllm.v1.kv_formats import by_name
from vllm.v1.page_planning import bytes_per_token, largest_kernel_block_within

__all__ = ["SLIDING_WINDOW", "Attention", "extract_layer_index", "get_layers"]


@traces
class Attention(KVCacheLayer):
    """Causal attention over this layer's pages.

    query [T, num_heads * head_size], key and value [T, num_kv_heads * head size] (or
    the same split by head) -> [T, num_heads * head_size_v], in the query's dtype.
    Registers itself under `prefix` in the current config's static_forward_context.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        use_alibi_sqrt: bool | None = None,
        cache_config: CacheConfig | None = None,
        quant_config: Any = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        mm_prefix_clamp_sliding_window: bool = False,
        attn_backend: type[AttentionBackend] | None = None,
        head_size_v: int | None = None,
        **extra_impl_args: Any,
    ) -> None:
        super().__init__()
        if use_alibi_sqrt or mm_prefix_clamp_sliding_window:
            raise ValueError(
                f"layer {prefix!r}: square-root ALiBi and clamped multimodal prefixes "
                "are not supported"
            )
        vllm_config = get_current_vllm_config()
        cache_config = cache_config or vllm_config.cache_config
        self.layer_name = prefix
        self.num_heads = num_heads
        self.head_size = head_size
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"layer {prefix!r}: {num_heads} query heads are no multiple of "
                f"{self.num_kv_heads} KV heads"
            )
        self.sliding_window = per_layer_sliding_window
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.kv_cache_dtype = layer_cache_dtype(
            cache_config, prefix, per_layer_sliding_window
        )
        self.model_dtype = model_dtype_of(vllm_config)
        fmt = by_name(self.kv_cache_dtype)
        fmt.check_head_size(head_size, self.head_size_v)
        self.kv_cache_torch_dtype = fmt.storage_dtype(self.model_dtype)
        self.attn_backend = attn_backend or get_attn_backend(
            head_size,
            self.model_dtype,
            self.kv_cache_dtype,
            has_sink=extra_impl_args.get("sinks") is not None,
            attn_type=attn_type,
            num_heads=num_heads,
            has_sliding_window=per_layer_sliding_window is not None,
        )
        self.impl = self._built_impl(
            scale, alibi_slopes, logits_soft_cap, **extra_impl_args
        )
        self._check_sharing(vllm_config)
        self._own_cache(vllm_config)

    def _built_impl(
        self,
        scale: float,
        alibi_slopes: list[float] | None,
        logits_soft_cap: float | None,
        **extra_impl_args: Any,
    ) -> Any:
        return self.attn_backend.get_impl_cls()(
            self.num_heads,
            self.head_size,
            scale,
            self.num_kv_heads,
            alibi_slopes,
            self.sliding_window,
            self.kv_cache_dtype,
            logits_soft_cap,
            self.attn_type,
            self.kv_sharing_target_layer_name,
            **extra_impl_args,
        )

    def _check_sharing(self, vllm_config: VllmConfig) -> None:
        layers = vllm_config.compilation_config.static_forward_context
        target = self.kv_sharing_target_layer_name
        if target is not None and target not in layers:
            raise ValueError(
                f"layer {self.layer_name!r} shares the cache of {target!r}, which must "
                f"be built before it; built are {sorted(layers)}"
            )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output_shape: torch.Size | None = None,
    ) -> torch.Tensor:
        """Stores key and value in this layer's slots, then attends. Zeros in a run
        without attention metadata (memory profiling)."""
        context = get_forward_context()
        tokens = query.shape[0]
        query = _by_head(query, self.num_heads, self.head_size)
        if not context.attn_metadata:
            shape = (tokens, self.num_heads * self.head_size_v)
            return query.new_zeros(shape)
        if key is not None and value is not None:
            key = _by_head(key, self.num_kv_heads, self.head_size)
            value = _by_head(value, self.num_kv_heads, self.head_size_v)
            if self._stores_before_forward:
                self.impl.do_kv_cache_update(
                    self,
                    key,
                    value,
                    self.kv_cache,
                    context.slot_mapping[self.layer_name],
                )
        output = query.new_empty((tokens, self.num_heads, self.head_size_v))
        self.impl.forward(
            self,
            query,
            key,
            value,
            self.kv_cache,
            context.attn_metadata[self.layer_name],
            output,
        )
        return output.view(tokens, -1)

    def emit(self, query: Slot, key: Slot, value: Slot) -> Slot:
        args = self.impl.step_args(self, self.kv_cache, self.head_size_v)
        if args is None:
            raise NotPlanned(f"{self.attn_backend.get_name()} has no kernel for it")
        if args.store is not None and self._stores_before_forward:
            ops.store(self.layer_name, args.store, key, value, args)
        return ops.attend(
            self.layer_name, args.attention, query, self.head_size_v, args
        )

    @property
    def _stores_before_forward(self) -> bool:
        return (
            not self.attn_backend.forward_includes_kv_cache_update
            and self.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
            and self.kv_sharing_target_layer_name is None
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """The raw spec: heads, sizes, dtype and mode, as no backend has packed it yet.

        A windowed layer takes the largest kernel block whose page fits the page shared
        with skipped layers (bytes through the packing hook), else the smallest block;
        so does any layer whose block of the engine's size would not fit that page.
        """
        if self.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
            return None
        if self.attn_type != AttentionType.DECODER:
            raise ValueError(
                f"layer {self.layer_name!r}: attention type {self.attn_type} has no "
                "KV-cache spec here; expected decoder"
            )
        cache_config = vllm_config.cache_config
        if self.sliding_window is None:
            full = FullAttentionSpec(
                block_size=cache_config.block_size, **self._spec_fields()
            )
            return self._within_shared_page(full, vllm_config)
        if self.attn_backend.is_mla():
            raise ValueError(
                f"layer {self.layer_name!r}: backend {self.attn_backend.get_name()} "
                "stores latents and cannot serve a windowed K and V layer"
            )
        probe = SlidingWindowSpec(
            block_size=1, sliding_window=self.sliding_window, **self._spec_fields()
        )
        return SlidingWindowSpec(
            block_size=self._block_within(self._bytes_per_token(probe), vllm_config),
            sliding_window=self.sliding_window,
            page_size_padded=cache_config.skip_page_size_padded,
            **self._spec_fields(),
        )

    def _within_shared_page(
        self, spec: FullAttentionSpec, vllm_config: VllmConfig
    ) -> FullAttentionSpec:
        """The spec, or one of a smaller block padded to the page that layers of other
        cache dtypes share."""
        shared_page = vllm_config.cache_config.skip_page_size_padded
        if shared_page is None or self.attn_backend.is_mla():
            return spec
        per_token = self._bytes_per_token(replace(spec, block_size=1))
        if per_token * spec.block_size <= shared_page:
            return spec
        block_size = self._block_within(per_token, vllm_config)
        return replace(spec, block_size=block_size, page_size_padded=shared_page)

    def _block_within(self, per_token: int, vllm_config: VllmConfig) -> int:
        """Tokens of the largest block of kernels within the shared page.

        Also the multiples of a kernel block that divide the engine's block, since
        padding would waste the rest of the page.
        """
        cache_config = vllm_config.cache_config
        shared_page, largest = (
            cache_config.skip_page_size_padded,
            cache_config.block_size,
        )
        kernel_block = _largest_kernel_block_within(
            self.attn_backend, vllm_config, per_token, shared_page, largest
        )
        if shared_page is None:
            return kernel_block
        fitting = [
            size
            for size in range(
                kernel_block,
                min(shared_page // per_token, largest) + 1,
                kernel_block,
            )
            if largest % size == 0 and self.attn_backend.supports_block_size(size)
        ]
        return max(fitting, default=kernel_block)

    def _spec_fields(self) -> dict[str, Any]:
        return {
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "dtype": self.kv_cache_torch_dtype,
            "kv_quant_mode": get_kv_quant_mode(self.kv_cache_dtype),
        }

    def _bytes_per_token(self, raw_spec: AttentionSpec) -> int:
        return bytes_per_token(
            self.attn_backend,
            raw_spec,
            by_name(self.kv_cache_dtype),
            self.layer_name,
            self.model_dtype,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads} heads of {self.head_size}, "
            f"{self.num_kv_heads} KV heads, cache {self.kv_cache_dtype}, "
            f"backend {self.attn_backend.get_name()}"
        )


def _by_head(x: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """[T, heads * size] as [T, heads, size], without a copy."""
    return x if x.dim() == 3 else x.unflatten(-1, (heads, size))


def _largest_kernel_block_within(
    backend: type[AttentionBackend],
    vllm_config: VllmConfig,
    per_token: int,
    shared_page: int | None,
    fallback: int,
) -> int:
    """Tokens of the backend's largest kernel block whose page fits `shared_page` bytes,
    at `per_token` bytes. The config is there for backends outside this package."""
    return largest_kernel_block_within(
        backend.get_supported_kernel_block_sizes(), per_token, shared_page, fallback
    )


def get_layers(vllm_config: VllmConfig | None = None) -> dict[str, AttentionLayerBase]:
    """Every registered layer of the model by name, in registration order."""
    config = vllm_config or get_current_vllm_config_or_none()
    if config is None:
        raise ValueError("no VllmConfig given and none is current")
    return dict(config.compilation_config.static_forward_context)
