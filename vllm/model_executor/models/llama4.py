"""Llama 4, text only: rotated layers attend within chunks, the others to everything.

Knows the order of operations. Layers without a rotation sharpen their queries as the
context grows.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import InputScaledMoE, Routing
from vllm.model_executor.layers.layernorm import PlainRMSNorm
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
from vllm.model_executor.step import Positions, Slot, head_ops

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")
_STACKS = {"gate_up": "w13", "down": "w2"}


@dataclass(frozen=True, kw_only=True)
class Llama4Positions:
    """What layers need of the positions: `rope`, and a factor on queries [T, 1, 1]."""

    rope: RopeRows
    temperature: torch.Tensor


class QueryTemperature:
    """A factor on queries that grows with the logarithm of their position."""

    def __init__(self, config: Any, num_positions: int) -> None:
        self.floor_scale = config.floor_scale
        self.attn_scale = config.attn_scale
        self.num_positions = num_positions

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Float32 [T, 1, 1] for `positions` [T]; a traced step looks them up itself."""
        if isinstance(positions, Positions):
            return positions
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        return (torch.log1p(steps) * self.attn_scale + 1.0)[:, None, None]

    def scaled(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """query [T, heads, size] times `rows`, in its dtype."""
        if isinstance(query, Slot):
            return head_ops.scale_by_position(query, self._table)
        return (query * rows).to(query.dtype)

    @cached_property
    def _table(self) -> torch.Tensor:
        """Float32 [positions], for all layers of a traced step."""
        return self.rows(torch.arange(self.num_positions)).flatten()


class Llama4Attention(SelfAttention):
    """Rotates, then normalises heads; or scales queries by the temperature."""

    def __init__(
        self,
        config: Any,
        rotated: bool,
        temperature: QueryTemperature,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.rotated = rotated
        self.normalized = rotated and config.use_qk_norm
        self.tuned = not rotated and config.attn_temperature_tuning
        self.temperature = temperature
        self.head_norm = PlainRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rope: Any) -> torch.Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (heads + 2 * kv_heads, self.head_dim))
        both, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.rotated:
            both = self.rotary_emb.rotate(both, rope.rope)
        if self.normalized:
            both = self.head_norm(both)
        query, key = both[:, :heads], both[:, heads:]
        if self.tuned:
            query = self.temperature.scaled(query, rope.temperature)
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
        self.experts = InputScaledMoE(
            count,
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            prefix=f"{prefix}.experts",
        )
        self.shared_expert = GatedMLP(config, facts, f"{prefix}.shared_expert")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.routing.select(self.gate(x))
        return self.shared_expert(x) + self.experts(x, weights, experts)


class Llama4Model(DecoderModel):
    """Reads `no_rope_layers`, `layer_types` and `moe_layers` of the config."""

    def make_rotary(self, config: Any, num_positions: int) -> nn.Module:
        count = num_positions or config.max_position_embeddings
        self.temperature = QueryTemperature(config, count)
        return get_rope(
            head_size(config),
            config.max_position_embeddings,
            is_neox_style=False,
            rope_parameters=config.rope_parameters,
            num_positions=count,
        )

    def rope_rows(self, positions: torch.Tensor) -> Llama4Positions:
        return Llama4Positions(
            rope=self.rotary_emb.rows(positions),
            temperature=self.temperature.rows(positions),
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
            self.temperature,
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
