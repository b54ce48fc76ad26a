"""Bamba: layers of Mamba-2, and some that attend; a gated MLP follows either."""

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_mixer2 import Mamba2Sizes
from vllm.model_executor.models.decoder import (
    DecoderFacts,
    DecoderLayer,
    DecoderModel,
    DenseForCausalLM,
)

# A checkpoint's module -> its name here.
_NAMES = {
    ".mamba.": ".self_attn.",
    ".feed_forward.": ".mlp.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "model.final_layernorm.": "model.norm.",
}


class BambaModel(DecoderModel):
    """The layers in `attn_layer_indices` attend; only they rotate."""

    def make_layer(
        self,
        config: Any,
        facts: DecoderFacts,
        vllm_config: VllmConfig,
        index: int,
        prefix: str,
    ) -> DecoderLayer:
        if config.layer_types[index] == "full_attention":
            return super().make_layer(config, facts, vllm_config, index, prefix)
        mixer = MambaMixer2(
            Mamba2Sizes(
                hidden_size=config.hidden_size,
                num_heads=config.mamba_n_heads,
                head_dim=config.mamba_d_head,
                num_groups=config.mamba_n_groups,
                state_size=config.mamba_d_state,
                conv_kernel=config.mamba_d_conv,
                chunk_size=config.mamba_chunk_size,
            ),
            config.rms_norm_eps,
            use_conv_bias=config.mamba_conv_bias,
            use_bias=config.mamba_proj_bias,
            dt_limit=tuple(config.time_step_limit),
            prefix=f"{prefix}.mamba",
        )
        return DecoderLayer(
            config, mixer, self.make_mlp(config, facts, index, f"{prefix}.mlp")
        )


class BambaForCausalLM(DenseForCausalLM):
    """Checkpoints name the parts of a layer differently."""

    model_cls = BambaModel

    @classmethod
    def facts(cls, config: Any) -> DecoderFacts:
        bias = bool(config.attention_bias)
        return DecoderFacts(
            windows=(None,) * config.num_hidden_layers,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(config.mlp_bias),
        )

    def parameter_name(self, name: str) -> str:
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        return name
