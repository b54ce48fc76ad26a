"""Gemma 2 and 3, text only: norms on both sides of attention and MLP, mixed windows.

Knows the order of operations and which rotation a layer's kind has. The decoder around
it is `decoder`'s.
"""

from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.rotary_embedding import RopeRows, get_rope
from vllm.model_executor.models.decoder import (
    DecoderFacts,
    DecoderModel,
    DenseForCausalLM,
    SelfAttention,
    head_size,
    layer_windows,
)
from vllm.model_executor.models.utils import text_part


class GemmaDecoderLayer(nn.Module):
    """Attention and MLP, each between two norms; the residual travels beside.

    `kind` is the layer's entry of `layer_types`, under which its rotation is found.
    """

    def __init__(
        self, config: Any, self_attn: nn.Module, mlp: nn.Module, kind: str
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.kind = kind
        self.input_layernorm = GemmaRMSNorm(size, eps=eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = GemmaRMSNorm(size, eps=eps)
        self.pre_feedforward_layernorm = GemmaRMSNorm(size, eps=eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = GemmaRMSNorm(size, eps=eps)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rope: dict[str, RopeRows],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and residual [T, hidden] -> the same; the new sum is taken by the next
        norm."""
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, rope[self.kind]))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class GemmaModel(DecoderModel):
    """Scales its embeddings, and has one rotation for each kind of layer."""

    def __init__(
        self, config: Any, facts: DecoderFacts, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__(config, facts, vllm_config, prefix)
        # Rounded to the model's dtype first, as the model was trained.
        scale = torch.tensor(config.hidden_size**0.5, device="cpu")
        self.embed_scale = float(scale.to(torch.get_default_dtype()))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids) * self.embed_scale

    def make_rotary(self, config: Any, num_positions: int) -> nn.ModuleDict:
        rope = config.rope_parameters
        return nn.ModuleDict(
            {
                kind: get_rope(
                    head_size(config),
                    config.max_position_embeddings,
                    rope_parameters=rope.get(kind, rope),
                    num_positions=num_positions or config.max_position_embeddings,
                )
                for kind in sorted(set(config.layer_types))
            }
        )

    def rope_rows(self, positions: torch.Tensor) -> dict[str, RopeRows]:
        return {kind: rope.rows(positions) for kind, rope in self.rotary_emb.items()}

    def make_layer(
        self,
        config: Any,
        facts: DecoderFacts,
        vllm_config: VllmConfig,
        index: int,
        prefix: str,
    ) -> nn.Module:
        kind = config.layer_types[index]
        attention = SelfAttention(
            config,
            facts,
            facts.windows[index],
            vllm_config,
            self.rotary_emb[kind],
            f"{prefix}.self_attn",
        )
        mlp = self.make_mlp(config, facts, index, f"{prefix}.mlp")
        return GemmaDecoderLayer(config, attention, mlp, kind)


class Gemma3ForCausalLM(DenseForCausalLM):
    """A norm on every query and key head, and a rotation of their own for windowed
    layers. The text model only: no pictures."""

    model_cls = GemmaModel
    qk_norm = True

    @classmethod
    def facts(cls, config: Any) -> DecoderFacts:
        if getattr(config, "use_bidirectional_attention", False):
            raise ValueError(
                "a Gemma model with use_bidirectional_attention is an encoder, which "
                "is not supported: use a model that generates text"
            )
        bias = bool(getattr(config, "attention_bias", False))
        return DecoderFacts(
            windows=layer_windows(config),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=cls.qk_norm,
            norm_cls=GemmaRMSNorm,
            activation=config.hidden_activation,
            attention_scale=config.query_pre_attn_scalar**-0.5,
            attention_soft_cap=getattr(config, "attn_logit_softcapping", None),
            logits_soft_cap=getattr(config, "final_logit_softcapping", None),
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model of a checkpoint that also reads pictures."""

    def parameter_name(self, name: str) -> str | None:
        return text_part(name)


class Gemma2ForCausalLM(Gemma3ForCausalLM):
    """Soft caps on attention and output logits, no norms on heads."""

    qk_norm = False
