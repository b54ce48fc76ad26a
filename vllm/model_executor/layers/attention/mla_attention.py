"""The attention layer of models that cache one latent per token (DeepSeek's MLA).

Knows the sizes of the latent and of its heads, and cuts the up-projection into the two
parts that backends read. Refuses to know any format's bytes and where pages lie.
"""

from typing import Any

import torch

from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.kv_layer import (
    KVCacheLayer,
    layer_cache_dtype,
    model_dtype_of,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.step import NotPlanned, Slot, head_ops, ops, records, traces
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.mla.common import (
    MLACommonBackend,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.kv_formats import by_name

__all__ = [
    "MLAAttention",
    "MLACommonBackend",
    "MLACommonMetadata",
    "MLACommonMetadataBuilder",
]

logger = init_logger(__name__)


@traces
class MLAAttention(KVCacheLayer):
    """Causal attention over this layer's latents.

    q [T, num_heads, nope + rope] (or flat), kv_c_normed [T, kv_lora_rank] and rotated
    k_pe [T, 1, rope] -> [T, num_heads * v_head_dim], in q's dtype. `kv_b_proj` maps a
    latent to every head's key part and value; its weight is kept once, dense.
    """

    def __init__(
        self,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        kv_b_proj: LinearBase,
        cache_config: CacheConfig | None = None,
        quant_config: Any = None,
        prefix: str = "",
        use_sparse: bool = False,
        indexer: Any = None,
        sliding_window: int | None = None,
        attn_backend: type[AttentionBackend] | None = None,
        **extra_impl_args: Any,
    ) -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError(
                f"layer {prefix!r}: quantised weights are not supported; load an "
                "unquantised checkpoint"
            )
        vllm_config = get_current_vllm_config()
        self.layer_name = prefix
        self.num_heads, self.num_kv_heads = num_heads, 1
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.head_size, self.head_size_v = kv_lora_rank + qk_rope_head_dim, 0
        self.sliding_window = sliding_window
        self.attn_type = AttentionType.DECODER
        self.kv_sharing_target_layer_name: str | None = None
        self.use_sparse, self.indexer = use_sparse, indexer
        self.model_dtype = model_dtype_of(vllm_config)
        asked = layer_cache_dtype(cache_config or vllm_config.cache_config, prefix)
        by_name(asked).check_head_size(self.head_size, 0)
        self.attn_backend = attn_backend or get_attn_backend(
            self.head_size,
            self.model_dtype,
            asked,
            use_mla=True,
            use_sparse=use_sparse,
            num_heads=num_heads,
            has_sliding_window=sliding_window is not None,
        )
        self.kv_cache_dtype = self._stored_dtype(asked)
        self.kv_cache_torch_dtype = by_name(self.kv_cache_dtype).storage_dtype(
            self.model_dtype
        )
        self.impl = self._built_impl(scale, **extra_impl_args)
        kv_b_proj.keeps_dense = True
        self._kv_b_proj = (kv_b_proj,)  # a tuple: the model registers the module
        self._own_cache(vllm_config)

    def _stored_dtype(self, asked: str) -> str:
        """The format that the backend stores when asked for `asked`, for this layer
        alone: the engine's setting stays as the user gave it."""
        stored: str = self.attn_backend.kv_cache_dtype_meanings.get(asked, asked)
        if stored is not asked:
            logger.info_once(
                "%s stores %s where %s is asked for.",
                self.attn_backend.get_name(),
                stored,
                asked,
            )
        return stored

    def _built_impl(self, scale: float, **extra_impl_args: Any) -> Any:
        return self.attn_backend.get_impl_cls()(
            self.num_heads,
            self.head_size,
            scale,
            1,
            None,
            self.sliding_window,
            self.kv_cache_dtype,
            None,
            self.attn_type,
            None,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            qk_head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            **extra_impl_args,
        )

    def process_weights_after_loading(self) -> None:
        """Cuts `kv_b_proj` into `W_UK_T` [Hq, nope, lora] and `W_UV` [Hq, lora, v]:
        views, no copies."""
        weight = self._kv_b_proj[0].dense_weight().detach()
        self.W_KV = weight.view(self.num_heads, -1, self.kv_lora_rank)
        self.W_UK_T = self.W_KV[:, : self.qk_nope_head_dim]
        self.W_UV = self.W_KV[:, self.qk_nope_head_dim :].transpose(1, 2)
        super().process_weights_after_loading()

    def forward(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        output_shape: torch.Size | None = None,
    ) -> torch.Tensor:
        """Stores the latents in this layer's slots, then attends. Zeros in a run
        without attention metadata (memory profiling)."""
        context = get_forward_context()
        tokens = q.shape[0]
        if not context.attn_metadata:
            return q.new_zeros((tokens, self.num_heads * self.v_head_dim))
        query = q if q.dim() == 3 else q.unflatten(-1, (self.num_heads, -1))
        k_pe = k_pe.view(tokens, 1, self.qk_rope_head_dim)
        latent = torch.cat([kv_c_normed.unsqueeze(1), k_pe], dim=-1)
        slots = context.slot_mapping[self.layer_name]
        self.impl.do_kv_cache_update(self, latent, None, self.kv_cache, slots)
        output = q.new_empty((tokens, self.num_heads, self.v_head_dim))
        self.impl.forward(
            self,
            query,
            latent,
            None,
            self.kv_cache,
            context.attn_metadata[self.layer_name],
            output,
        )
        return output.view(tokens, -1)

    def emit(self, q: Slot, kv_c_normed: Slot, k_pe: Slot) -> Slot:
        """The absorbed form, with a detour where a query is too long for it to pay.
        Every head's parts of `kv_b_proj` are packed, and so kept a second time."""
        args = self.impl.step_args(self, self.kv_cache, self.kv_lora_rank)
        if args is None:
            raise NotPlanned(f"{self.attn_backend.get_name()} has no kernel for it")
        if args.store is not None:
            latent = head_ops.joined(kv_c_normed, k_pe)
            ops.store(self.layer_name, args.store, latent, None, args)
        nope, pe = q[:, :, : self.qk_nope_head_dim], q[:, :, self.qk_nope_head_dim :]
        into = head_ops.HeadWeights(self.W_UK_T.transpose(1, 2))
        query = head_ops.head_linear(nope, into, beside=pe)
        if args.signs is not None:
            head_ops.turn(query, args.signs, records.SIGNS_FIRST)
        attended = ops.attend(
            self.layer_name, args.attention, query, self.kv_lora_rank, args
        ).unflatten(-1, (self.num_heads, self.kv_lora_rank))
        if args.signs is not None:
            head_ops.turn(attended, args.signs, records.SIGNS_LAST)
        out_of = head_ops.HeadWeights(self.W_UV.transpose(1, 2))
        out = head_ops.head_linear(attended, out_of).flat()
        group, up_to = q.trace.group_of[self.layer_name], self.impl.absorb_up_to
        q.trace.detour(group, q, out, up_to, self._attend_long_queries)
        return out

    def _attend_long_queries(self, q: torch.Tensor, output: torch.Tensor) -> None:
        """q [T, num_heads * (nope + rope)] -> rows of output [T, num_heads *
        v_head_dim], as in an eager step, over latents that are stored already."""
        self.impl.attend_long_queries(
            self,
            q.unflatten(-1, (self.num_heads, -1)),
            self.kv_cache,
            get_forward_context().attn_metadata[self.layer_name],
            output.unflatten(-1, (self.num_heads, -1)),
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """The raw spec of one latent head; formats whose mode does not tell their bytes
        are published here, by name."""
        fmt = by_name(self.kv_cache_dtype)
        fields: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": 1,
            "head_size": self.head_size,
            "dtype": self.kv_cache_torch_dtype,
            "kv_quant_mode": fmt.mode,
            "cache_dtype_str": self.kv_cache_dtype,
        }
        if self.sliding_window is None:
            spec = MLAAttentionSpec(**fields)
        else:
            spec = SlidingWindowMLASpec(**fields, sliding_window=self.sliding_window)
        return spec.packed(fmt, self.model_dtype) if fmt.opaque else spec

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads} heads over a latent of {self.kv_lora_rank} + "
            f"{self.qk_rope_head_dim}, cache {self.kv_cache_dtype}, "
            f"backend {self.attn_backend.get_name()}"
        )
