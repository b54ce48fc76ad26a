"""The dense decoder that every family here is made of.

A family states its facts (biases, per-head norms, windows) in one `DecoderFacts`; the
layers are written once. Knows the order of operations; refuses to know checkpoints,
pages and batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import (
    RopeRows,
    RotaryEmbedding,
    get_rope,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import (
    PACKED_MODULES,
    WeightInfo,
    WeightPlan,
    WeightTarget,
    maybe_prefix,
    plan_weights,
)


@dataclass(frozen=True, kw_only=True)
class DecoderFacts:
    """What distinguishes one family from another.

    `windows` has one entry per layer: its sliding window in tokens, or None. A None of
    `activation` means the config's `hidden_act`, one of `attention_scale` 1 / sqrt(head
    size). Caps bound logits through a tanh. `sinks` gives every head a learnt logit
    that takes attention away from all tokens.
    """

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_cls: type[nn.Module] = RMSNorm
    activation: str | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Each layer's window, from a config's `sliding_window` and `layer_types`."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    count = config.num_hidden_layers
    if window is None:
        return (None,) * count
    if kinds is None:
        return (window,) * count
    if len(kinds) != count:
        raise ValueError(
            f"layer_types has {len(kinds)} entries for {count} layers: correct the "
            "model's config"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class GatedMLP(nn.Module):
    """x [T, hidden] -> down(act(gate(x)) * up(x)) [T, hidden]."""

    def __init__(
        self,
        config: Any,
        facts: DecoderFacts,
        prefix: str,
        intermediate_size: int | None = None,
    ) -> None:
        super().__init__()
        size = intermediate_size or config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [size] * 2,
            bias=facts.mlp_bias,
            prefix=f"{prefix}.gate_up_proj",
            return_bias=False,
        )
        self.down_proj = RowParallelLinear(
            size,
            config.hidden_size,
            bias=facts.mlp_bias,
            prefix=f"{prefix}.down_proj",
            return_bias=False,
        )
        self.act_fn = get_act_and_mul_fn(facts.activation or config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class SelfAttention(nn.Module):
    """x [T, hidden] -> [T, hidden]; rotates Q and K, then attends over the cache.

    With `attention_chunk` a token sees its own chunk of that many positions only.
    """

    def __init__(
        self,
        config: Any,
        facts: DecoderFacts,
        window: int | None,
        vllm_config: VllmConfig,
        rotary_emb: RotaryEmbedding,
        prefix: str,
        attention_chunk: int | None = None,
    ) -> None:
        super().__init__()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.head_dim = head_size(config)
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            heads,
            kv_heads,
            bias=facts.qkv_bias,
            prefix=f"{prefix}.qkv_proj",
            return_bias=False,
        )
        self.o_proj = RowParallelLinear(
            heads * self.head_dim,
            config.hidden_size,
            bias=facts.o_bias,
            prefix=f"{prefix}.o_proj",
            return_bias=False,
        )
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if facts.qk_norm:
            self.q_norm = facts.norm_cls(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = facts.norm_cls(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = rotary_emb
        self.sinks: nn.Parameter | None = None
        extra: dict[str, Any] = {}
        if facts.sinks:
            self.sinks = nn.Parameter(torch.empty(heads), requires_grad=False)
            extra["sinks"] = self.sinks
        attention_cls: type[Attention] = Attention
        if attention_chunk is not None:
            attention_cls = ChunkedLocalAttention
            extra["attention_chunk_size"] = attention_chunk
        self.attn = attention_cls(
            heads,
            self.head_dim,
            facts.attention_scale or self.head_dim**-0.5,
            num_kv_heads=kv_heads,
            cache_config=vllm_config.cache_config,
            logits_soft_cap=facts.attention_soft_cap,
            per_layer_sliding_window=window,
            prefix=f"{prefix}.attn",
            **extra,
        )

    def process_weights_after_loading(self) -> None:
        """Hands the filled sinks to the kernels, which take them in float32."""
        if self.sinks is not None:
            self.attn.impl.sinks = self.sinks.data.float()

    def forward(self, x: torch.Tensor, rope: RopeRows) -> torch.Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (heads + 2 * kv_heads, self.head_dim))
        value = qkv[:, heads + kv_heads :]
        if self.q_norm is None or self.k_norm is None:
            both = self.rotary_emb.rotate(qkv[:, : heads + kv_heads], rope)
            query, key = both[:, :heads], both[:, heads:]
        else:
            query = self.rotary_emb.rotate(self.q_norm(qkv[:, :heads]), rope)
            key = self.k_norm(qkv[:, heads : heads + kv_heads])
            key = self.rotary_emb.rotate(key, rope)
        return self.o_proj(self.attn(query, key, value))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm; the residual travels beside."""

    def __init__(self, config: Any, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=eps)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and residual [T, hidden] -> the same; the new sum is taken by the next
        norm."""
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rope)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class DecoderModel(nn.Module):
    """Embedding, layers and final norm: ids [T] -> hidden [T, hidden].

    Families with other parts override `make_rotary`, `rope_rows`, `make_layer`,
    `make_mlp` and `embed`.
    """

    def __init__(
        self, config: Any, facts: DecoderFacts, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.rotary_emb = self.make_rotary(config, positions_needed(vllm_config))
        self.layers = nn.ModuleList(
            self.make_layer(config, facts, vllm_config, i, f"{prefix}.layers.{i}")
            for i in range(len(facts.windows))
        )
        self.norm = facts.norm_cls(config.hidden_size, eps=config.rms_norm_eps)

    def make_rotary(self, config: Any, num_positions: int) -> nn.Module:
        """The rotation of every layer's heads; 0 positions: as many as config says."""
        return get_rope(
            head_size(config),
            config.max_position_embeddings,
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
        """Layer `index`, whose parts are named below `prefix`."""
        return DecoderLayer(
            config,
            SelfAttention(
                config,
                facts,
                facts.windows[index],
                vllm_config,
                self.rotary_emb,
                f"{prefix}.self_attn",
            ),
            self.make_mlp(config, facts, index, f"{prefix}.mlp"),
        )

    def make_mlp(
        self, config: Any, facts: DecoderFacts, index: int, prefix: str
    ) -> nn.Module:
        """What follows attention in layer `index`."""
        return GatedMLP(config, facts, prefix)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """ids [T] -> what enters the first layer [T, hidden]."""
        return self.embed_tokens(input_ids)

    def rope_rows(self, positions: torch.Tensor) -> Any:
        """The rotation of `positions` [T], computed once for all layers."""
        return self.rotary_emb.rows(positions)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        rope = self.rope_rows(positions)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, rope)
        return self.norm(x, residual)[0] if residual is not None else self.norm(x)


def head_size(config: Any) -> int:
    """Elements of one head; configs may state it or leave it to the hidden size."""
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def positions_needed(vllm_config: VllmConfig) -> int:
    """How many positions will be used; 0 where no model config says."""
    model_config = vllm_config.model_config
    if model_config is None:
        return 0
    return max(model_config.max_model_len, 0) or model_config.derived_max_model_len


class DenseForCausalLM(nn.Module):
    """A decoder with an output head. Families override `facts`.

    `forward` gives hidden states [T, hidden]; `compute_logits` turns rows of them into
    logits [T, vocabulary]. Parameters may be built on the meta device.
    """

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES
    # Its forward may be called with the slots of a step plan.
    is_traceable: ClassVar[bool] = True
    model_cls: ClassVar[type[DecoderModel]] = DecoderModel

    @classmethod
    def facts(cls, config: Any) -> DecoderFacts:
        """The family's facts, read from its config."""
        raise NotImplementedError(f"{cls.__name__}.facts")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = model_config.hf_text_config
        facts = self.facts(config)
        if model_config.disable_sliding_window:
            facts = replace(facts, windows=(None,) * len(facts.windows))
        self.config = config
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self.model = self.model_cls(
            config, facts, vllm_config, maybe_prefix(prefix, "model")
        )
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.tie_weights()
        self.logits_processor = LogitsProcessor(
            config.vocab_size, soft_cap=facts.logits_soft_cap
        )

    def tie_weights(self) -> None:
        """Lets the head share the embedding's parameter where the config says so."""
        if self.tied:
            self.lm_head.tie_weights(self.model.embed_tokens)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """ids [T] -> embeddings [T, hidden]."""
        return self.model.embed(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids and positions [T] int64 -> hidden states [T, hidden]."""
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden] -> logits [T, vocabulary] in the model's dtype."""
        return self.logits_processor(self.lm_head, hidden_states)

    def plan_weights(
        self, infos: Sequence[WeightInfo]
    ) -> dict[str, WeightTarget | None]:
        """Places of a checkpoint's tensors; a tied head's own copy is skipped."""
        skip = frozenset({"lm_head.weight"} if self.tied else ())
        ours = {info.name: self.parameter_name(info.name) for info in infos}
        renamed = [replace(i, name=name) for i in infos if (name := ours[i.name])]
        targets = plan_weights(self, renamed, skip)
        return {theirs: name and targets[name] for theirs, name in ours.items()}

    def parameter_name(self, name: str) -> str | None:
        """What a checkpoint's tensor would be called if it were named as modules are
        here, None for one to skip; families with other names override this."""
        return name

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fills every parameter from (Hugging Face name, tensor) pairs, all held at
        once; loaders stream instead. Returns the names that were used."""
        tensors = dict(weights)
        targets = self.plan_weights(
            [
                WeightInfo(name=name, shape=tuple(t.shape), file="the given weights")
                for name, t in tensors.items()
            ]
        )
        plan = WeightPlan(self, targets)
        for name, tensor in tensors.items():
            plan.place(name, tensor)
        return {name for name, target in targets.items() if target is not None}
