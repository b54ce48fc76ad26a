"""Llama 4, text only: rotated layers attend within chunks, the others to everything.

Knows the order of operations. Layers without a rotation sharpen their queries as the
context grows.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import Routing, StackedMoE
from vllm.model_executor.layers.rotary_embedding import RopeRows, get_rope
from vllm.model_executor.models.decoder import (
    DecoderFacts,
    DecoderLayer,
    DecoderModel,
    DenseForCausalLM,
    GatedMLP,
    SelfAttention,
    head_size,
)
from vllm.model_executor.models.mixtral import router
from vllm.model_executor.models.utils import text_part

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")
_STACKS = {"gate_up": "w13", "down": "w2"}


@dataclass(frozen=True, kw_only=True)
class Llama4Positions:
    """What layers need of the positions: `rope`, and a factor on queries [T, 1, 1]."""

    rope: RopeRows
    temperature: torch.Tensor


class Llama4Attention(SelfAttention):
    """Rotates, then normalises heads; or scales queries by the temperature."""

    def __init__(self, config: Any, rotated: bool, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.rotated = rotated
        self.normalized = rotated and config.use_qk_norm
        self.tuned = not rotated and config.attn_temperature_tuning
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor, rope: Any) -> torch.Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (heads + 2 * kv_heads, self.head_dim))
        both, value = qkv.split([heads + kv_heads, kv_heads], dim=1)
        if self.rotated:
            both = self.rotary_emb.rotate(both, rope.rope)
        if self.normalized:
            normed = F.rms_norm(both.float(), (self.head_dim,), None, self.eps)
            both = normed.to(x.dtype)
        query, key = both.split([heads, kv_heads], dim=1)
        if self.tuned:
            query = (query * rope.temperature).to(x.dtype)
        return self.o_proj(self.attn(query, key, value))


class Llama4MoE(nn.Module):
    """x [T, hidden] -> the shared expert's output plus that of the chosen experts.

    The sigmoid of an expert's logit scales its input.
    """

    def __init__(self, config: Any, facts: DecoderFacts, prefix: str) -> None:
        super().__init__()
        count = config.num_local_experts
        self.gate = router(config, count, prefix)
        self.routing = Routing(top_k=config.num_experts_per_tok, scoring="sigmoid")
        self.experts = StackedMoE(
            count,
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            prefix=f"{prefix}.experts",
        )
        self.shared_expert = GatedMLP(config, facts, f"{prefix}.shared_expert")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.routing.select(self.gate(x))
        scaled = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
        ones = torch.ones_like(weights).view(-1, 1)
        routed = self.experts(scaled, ones, experts.view(-1, 1))
        return self.shared_expert(x) + routed.view(*experts.shape, -1).sum(1)


class Llama4Model(DecoderModel):
    """Reads `no_rope_layers`, `layer_types` and `moe_layers` of the config."""

    def __init__(
        self, config: Any, facts: DecoderFacts, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__(config, facts, vllm_config, prefix)
        self.floor_scale = config.floor_scale
        self.attn_scale = config.attn_scale

    def make_rotary(self, config: Any, num_positions: int) -> nn.Module:
        return get_rope(
            head_size(config),
            config.max_position_embeddings,
            is_neox_style=False,
            rope_parameters=config.rope_parameters,
            num_positions=num_positions or config.max_position_embeddings,
        )

    def rope_rows(self, positions: torch.Tensor) -> Llama4Positions:
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        temperature = torch.log1p(steps) * self.attn_scale + 1.0
        return Llama4Positions(
            rope=self.rotary_emb.rows(positions), temperature=temperature[:, None, None]
        )

    def make_layer(
        self,
        config: Any,
        facts: DecoderFacts,
        vllm_config: VllmConfig,
        index: int,
        prefix: str,
    ) -> DecoderLayer:
        chunked = config.layer_types[index] == "chunked_attention"
        attention = Llama4Attention(
            config,
            bool(config.no_rope_layers[index]),
            facts,
            None,
            vllm_config,
            self.rotary_emb,
            f"{prefix}.self_attn",
            config.attention_chunk_size if chunked else None,
        )
        mlp: nn.Module
        if index in config.moe_layers:
            mlp = Llama4MoE(config, facts, f"{prefix}.mlp")
        else:
            mlp = GatedMLP(config, facts, f"{prefix}.mlp", config.intermediate_size_mlp)
        return DecoderLayer(config, attention, mlp)


class Llama4ForCausalLM(DenseForCausalLM):
    """The text model only: no pictures."""

    model_cls = Llama4Model

    @classmethod
    def facts(cls, config: Any) -> DecoderFacts:
        bias = bool(config.attention_bias)
        return DecoderFacts(
            windows=(None,) * config.num_hidden_layers, qkv_bias=bias, o_bias=bias
        )

    def parameter_name(self, name: str) -> str | None:
        name = name.replace(".feed_forward.", ".mlp.")
        stack = _EXPERTS.fullmatch(name)
        if stack is not None:
            return f"{stack[1]}.{_STACKS[stack[2]]}_weight"
        return name.replace(".mlp.router.", ".mlp.gate.")


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The text model of a checkpoint that also reads pictures."""

    def parameter_name(self, name: str) -> str | None:
        text = text_part(name)
        return None if text is None else super().parameter_name(text)
