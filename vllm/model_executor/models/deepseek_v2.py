"""DeepSeek-V2, V3 and R1: latent attention and mixtures of experts.

Knows the order of operations and what tells V2 from V3: how experts are chosen. The
decoder around them is `decoder`'s.
"""

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe import FusedMoE, Routing
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rope_scaling import yarn_mscale
from vllm.model_executor.layers.rotary_embedding import (
    RopeRows,
    RotaryEmbedding,
    get_rope,
)
from vllm.model_executor.models.decoder import (
    DecoderFacts,
    DecoderLayer,
    DecoderModel,
    DenseForCausalLM,
    GatedMLP,
)
from vllm.model_executor.models.utils import WeightInfo, WeightTarget
from vllm.model_executor.step import Slot, head_ops

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def attention_scale(config: Any) -> float:
    """1 / sqrt(query head size), sharpened by the rotation's scaling where it has an
    `mscale_all_dim`."""
    scale = float(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    all_dim = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") != "default" and all_dim:
        scale *= yarn_mscale(rope["factor"], all_dim) ** 2
    return scale


class MLASelfAttention(nn.Module):
    """x [T, hidden] -> [T, hidden] through one latent per token.

    Queries come from x at once or through a latent of their own (`q_lora_rank`). Only
    `qk_rope_head_dim` elements of a head are rotated; all heads share the rotated key.
    """

    def __init__(
        self,
        config: Any,
        vllm_config: VllmConfig,
        rotary_emb: RotaryEmbedding,
        prefix: str,
    ) -> None:
        super().__init__()
        heads, lora = config.num_attention_heads, config.kv_lora_rank
        self.num_heads, self.kv_lora_rank = heads, lora
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.rotary_emb = rotary_emb
        self._make_query(config, prefix)
        self.kv_a_proj_with_mqa = ReplicatedLinear(
            config.hidden_size,
            lora + config.qk_rope_head_dim,
            bias=config.attention_bias,
            prefix=f"{prefix}.kv_a_proj_with_mqa",
            return_bias=False,
        )
        self.kv_a_layernorm = RMSNorm(lora)
        self.kv_b_proj = ColumnParallelLinear(
            lora,
            heads * (config.qk_nope_head_dim + config.v_head_dim),
            bias=False,
            prefix=f"{prefix}.kv_b_proj",
            return_bias=False,
        )
        self.o_proj = RowParallelLinear(
            heads * config.v_head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            prefix=f"{prefix}.o_proj",
            return_bias=False,
        )
        self.attn = MLAAttention(
            heads,
            attention_scale(config),
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            config.q_lora_rank,
            lora,
            self.kv_b_proj,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attn",
        )

    def _make_query(self, config: Any, prefix: str) -> None:
        hidden, rank = config.hidden_size, config.q_lora_rank
        size = self.num_heads * self.qk_head_dim
        self.q_proj: ColumnParallelLinear | None = None
        if rank is None:
            self.q_proj = ColumnParallelLinear(
                hidden, size, bias=False, prefix=f"{prefix}.q_proj", return_bias=False
            )
            return
        self.q_a_proj = ReplicatedLinear(
            hidden,
            rank,
            bias=config.attention_bias,
            prefix=f"{prefix}.q_a_proj",
            return_bias=False,
        )
        self.q_a_layernorm = RMSNorm(rank)
        self.q_b_proj = ColumnParallelLinear(
            rank, size, bias=False, prefix=f"{prefix}.q_b_proj", return_bias=False
        )

    def forward(self, x: torch.Tensor, rope: RopeRows) -> torch.Tensor:
        if self.q_proj is not None:
            flat = self.q_proj(x)
        else:
            flat = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = flat.unflatten(-1, (self.num_heads, self.qk_head_dim))
        query = self.rotary_emb.rotate_last(query, rope)
        latent = self.kv_a_proj_with_mqa(x)
        compressed = self.kv_a_layernorm(latent[:, : self.kv_lora_rank])
        key = latent[:, self.kv_lora_rank :].unflatten(-1, (1, -1))
        key = self.rotary_emb.rotate(key, rope)
        return self.o_proj(self.attn(query, compressed, key))


class Gate(ReplicatedLinear):
    """x [T, hidden] -> router logits [T, experts], in float32 whatever the model's
    dtype; `e_score_correction_bias` [experts] shifts the choice of experts."""

    def __init__(self, config: Any, has_bias: bool, prefix: str) -> None:
        super().__init__(
            config.hidden_size,
            config.n_routed_experts,
            bias=False,
            params_dtype=torch.float32,
            prefix=prefix,
            return_bias=False,
        )
        self.e_score_correction_bias: nn.Parameter | None = None
        if has_bias:
            bias = torch.empty(config.n_routed_experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())

    def emit(self, x: Slot) -> Slot:
        return super().emit(head_ops.widen(x))


class DeepseekMoE(nn.Module):
    """x [T, hidden] -> routed experts' sum plus the shared experts' output."""

    def __init__(
        self,
        config: Any,
        facts: DecoderFacts,
        routing: Routing,
        has_bias: bool,
        prefix: str,
    ) -> None:
        super().__init__()
        self.routing = routing
        self.gate = Gate(config, has_bias, f"{prefix}.gate")
        self.experts = FusedMoE(
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            config.hidden_act,
            prefix=f"{prefix}.experts",
        )
        self.shared_experts: GatedMLP | None = None
        if config.n_shared_experts:
            self.shared_experts = GatedMLP(
                config,
                facts,
                f"{prefix}.shared_experts",
                config.moe_intermediate_size * config.n_shared_experts,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.gate.e_score_correction_bias
        weights, experts = self.routing.select(self.gate(x), bias)
        routed = self.experts(x, weights, experts)
        if self.shared_experts is None:
            return routed
        return routed + self.shared_experts(x)


class DeepseekModel(DecoderModel):
    """V2: softmax scores, the best experts of all or of the best groups."""

    correction_bias: ClassVar[bool] = False

    def routing(self, config: Any) -> Routing:
        """How this family chooses experts. ValueError for an unknown `topk_method`."""
        method = config.topk_method
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(
                f"topk_method {method!r} is not supported: expected greedy or "
                "group_limited_greedy; correct the model's config"
            )
        grouped = method == "group_limited_greedy"
        return Routing(
            top_k=config.num_experts_per_tok,
            num_groups=config.n_group if grouped else None,
            topk_groups=config.topk_group if grouped else None,
            scale=config.routed_scaling_factor,
        )

    def rotates_pairs(self, config: Any) -> bool:
        """Whether elements 2i and 2i + 1 form a pair, rather than i and i + half."""
        return True

    def make_rotary(self, config: Any, num_positions: int) -> RotaryEmbedding:
        return get_rope(
            config.qk_rope_head_dim,
            config.max_position_embeddings,
            is_neox_style=not self.rotates_pairs(config),
            rope_parameters=config.rope_parameters,
            num_positions=num_positions or config.max_position_embeddings,
        )

    def make_layer(
        self,
        config: Any,
        facts: DecoderFacts,
        vllm_config: VllmConfig,
        index: int,
        prefix: str,
    ) -> DecoderLayer:
        attention = MLASelfAttention(
            config, vllm_config, self.rotary_emb, f"{prefix}.self_attn"
        )
        mlp: nn.Module
        if index >= config.first_k_dense_replace:
            mlp = DeepseekMoE(
                config,
                facts,
                self.routing(config),
                self.correction_bias,
                f"{prefix}.mlp",
            )
        else:
            mlp = GatedMLP(config, facts, f"{prefix}.mlp")
        return DecoderLayer(config, attention, mlp)


class DeepseekV3Model(DeepseekModel):
    """V3 and R1: sigmoid scores; a learnt bias balances experts without a loss."""

    correction_bias: ClassVar[bool] = True

    def routing(self, config: Any) -> Routing:
        return Routing(
            top_k=config.num_experts_per_tok,
            scoring="sigmoid",
            num_groups=config.n_group,
            topk_groups=config.topk_group,
            scores_per_group=2,
            renormalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )

    def rotates_pairs(self, config: Any) -> bool:
        return bool(config.rope_interleave)


class DeepseekV2ForCausalLM(DenseForCausalLM):
    """Layers past the last one (multi-token prediction) are left out."""

    model_cls = DeepseekModel

    @classmethod
    def facts(cls, config: Any) -> DecoderFacts:
        return DecoderFacts(
            windows=(None,) * config.num_hidden_layers,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
        )

    def plan_weights(
        self, infos: Sequence[WeightInfo]
    ) -> dict[str, WeightTarget | None]:
        last = self.config.num_hidden_layers
        beyond = {
            info.name: None
            for info in infos
            if (layer := _LAYER.match(info.name)) and int(layer[1]) >= last
        }
        kept = [info for info in infos if info.name not in beyond]
        return super().plan_weights(kept) | beyond


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """V3 and R1."""

    model_cls = DeepseekV3Model
