"""Any other causal language model of transformers, through its own modelling code.

Its attention layers call ours, so that pages, formats and batching are this engine's;
everything else is computed by transformers. Knows how to bind the two; what cannot work
is refused by name.
"""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.models.decoder import positions_needed
from vllm.model_executor.models.transformers_probe import (
    IMPLEMENTATION,
    LAYER,
    AttentionCall,
    attention_calls,
    depends_on_place,
)

# Frequencies of these depend on the length of each batch, but keys are cached rotated.
_VARYING_ROPES = ("dynamic", "longrope")


class _Outputs(dict[str, Any]):
    """What a head looks for in a base model's outputs; what is missing is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self.get("last_hidden_state") if key == 0 else self.get(key)


class _Given(nn.Module):
    """Stands for the base model under its head: returns hidden states it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0, device="cpu")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return self  # a base model inside the base model

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        return _Outputs(last_hidden_state=self.hidden)


def _hidden(body: nn.Module, ids: Any, positions: torch.Tensor, **inputs: Any) -> Any:
    """ids and positions [1, T] -> hidden states [1, T, hidden]."""
    return body(input_ids=ids, position_ids=positions, use_cache=False, **inputs)[0]


class TransformersForCausalLM(nn.Module):
    """`forward` and `compute_logits` as every model here has them.

    Raises ValueError, naming the architecture and why, for a model that keeps other
    states than keys and values, or whose attention cannot be replaced.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self.vllm_config = vllm_config
        self.config = model_config.hf_text_config
        self.dtype = model_config.dtype
        names = [n for n in model_config.architectures if n != type(self).__name__]
        self.name = names[0] if names else type(self.config).__name__
        self.facts: list[tuple[Any, ...]] = []
        self.attention = nn.ModuleList()
        self._register_layers()

    def _refusal(self, why: Any) -> ValueError:
        return ValueError(
            f"{self.name} cannot be served through transformers' own code: {why}. Use "
            "a model whose layers attend causally to keys and values, or one of the "
            "architectures that this engine implements"
        )

    def _register_layers(self) -> None:
        """Asks a model without storage what its layers do, so that they are known, or
        refused, before a weight is read."""
        with torch.device("meta"):
            shell = self._built({}, experts_implementation="batched_mm").eval()
        self._fix_ropes(shell)
        try:
            calls = self._calls(shell, torch.device("meta"))
        except (RuntimeError, NotImplementedError):  # it looks at values: ask later
            return
        self._make_layers(calls)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Builds the model from the checkpoint's tensors by name; without any, with
        random ones. Returns the names. Raises ValueError for names that do not fit."""
        tensors = dict(weights)
        device = self.vllm_config.device_config.device
        self.hf = self._built(tensors).to(device).eval().requires_grad_(False)
        self._fix_ropes(self.hf)
        self.base_name = self._base_name(self.hf)
        self._bind_layers(self._calls(self.hf, device))
        if depends_on_place(self._run, device):
            raise self._refusal(
                "its outputs depend on where a sequence lies in the batch: a layer "
                "mixes tokens outside of attention, or counts positions by itself"
            )
        # The whole model with its body taken out: it shares the head's modules.
        self.head = copy.copy(self.hf)
        self.head._modules = {**self.hf._modules, self.base_name: _Given()}
        return set(tensors)

    def _built(self, tensors: dict[str, torch.Tensor], **options: Any) -> Any:
        config = copy.deepcopy(self.config)
        how = {"attn_implementation": IMPLEMENTATION, "dtype": self.dtype, **options}
        try:
            if not tensors:
                return AutoModelForCausalLM.from_config(config, **how)
            model_cls = AutoModelForCausalLM._model_mapping[type(config)]
            model, found = model_cls.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                output_loading_info=True,
                **how,
            )
        except (KeyError, ValueError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise self._refusal(f"it cannot be built that way ({reason})") from error
        for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            if found.get(kind):
                names = ", ".join(sorted(map(str, found[kind]))[:3])
                raise ValueError(
                    f"{self.name}: {kind.replace('_', ' ')} in the weights: {names}; "
                    "config and weights do not belong together"
                )
        return model

    def _base_name(self, model: Any) -> str:
        """The child of the model that turns ids into hidden states."""
        children = dict(model.named_children())
        if model.base_model_prefix in children:
            return str(model.base_model_prefix)
        bodies = [n for n, m in children.items() if isinstance(m, PreTrainedModel)]
        if len(bodies) != 1:
            raise self._refusal("it has no base model under its head")
        return bodies[0]

    def _fix_ropes(self, model: Any) -> None:
        """Chooses the frequencies that vary with the length once, for the longest."""
        length = positions_needed(self.vllm_config)
        for module in model.modules():
            kind = getattr(module, "rope_type", None)
            kinds = kind.values() if isinstance(kind, dict) else [kind]
            if not set(kinds).intersection(_VARYING_ROPES):
                continue
            if isinstance(kind, dict):
                raise self._refusal(f"its rotations vary per kind of layer ({kind})")
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
                module.config, module.inv_freq.device, seq_len=length
            )
            module.inv_freq.copy_(frequencies)
            module.attention_scaling = factor
            module.rope_type = "default"

    def _calls(self, model: Any, device: torch.device) -> list[AttentionCall]:
        """One call of attention for each layer, in order."""
        body = model._modules[self._base_name(model)]
        try:
            calls = attention_calls(partial(_hidden, body), self.config, device)
        except ValueError as error:
            raise self._refusal(error) from error
        modules = {id(call.module) for call in calls}
        layers = int(self.config.num_hidden_layers)
        if not len(modules) == len(calls) == layers:
            raise self._refusal(
                f"its {layers} layers call a replaceable attention function "
                f"{len(calls)} times, not once each"
            )
        return calls

    def _make_layers(self, calls: list[AttentionCall]) -> None:
        self.facts = [call.facts for call in calls]
        self.attention = nn.ModuleList(
            self._layer(index, call) for index, call in enumerate(calls)
        )

    def _bind_layers(self, calls: list[AttentionCall]) -> None:
        """Gives every attention module the layer that does what it was seen to do."""
        if not self.attention:
            with set_current_vllm_config(self.vllm_config):
                self._make_layers(calls)
        if [call.facts for call in calls] != self.facts:
            raise self._refusal("its attention changes with its weights")
        for call, layer in zip(calls, self.attention, strict=True):
            call.module.__dict__[LAYER] = layer
            if call.sinks is not None:
                layer.impl.sinks = call.sinks.detach().float()

    def _layer(self, index: int, call: AttentionCall) -> Attention:
        attention_cls: type[Attention] = Attention
        extra: dict[str, Any] = {}
        if call.sinks is not None:
            extra["sinks"] = call.sinks.detach().float()
        if call.chunk is not None:
            attention_cls = ChunkedLocalAttention
            extra["attention_chunk_size"] = call.chunk
        window = call.window
        if self.vllm_config.model_config.disable_sliding_window:
            window = None
        return attention_cls(
            call.num_heads,
            call.head_size,
            call.scale,
            num_kv_heads=call.num_kv_heads,
            cache_config=self.vllm_config.cache_config,
            logits_soft_cap=call.soft_cap,
            per_layer_sliding_window=window,
            prefix=f"model.layers.{index}.self_attn.attn",
            head_size_v=call.head_size_v,
            **extra,
        )

    def _run(self, ids: Any, positions: torch.Tensor, **inputs: Any) -> Any:
        body = self.hf._modules[self.base_name]
        return body(input_ids=ids, position_ids=positions, use_cache=False, **inputs)[0]

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """ids [T] -> embeddings [T, hidden]."""
        return self.hf.get_input_embeddings()(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids and positions [T] int64 -> hidden states [T, hidden]."""
        if inputs_embeds is not None:
            embeds = inputs_embeds[None]
            return self._run(None, positions[None], inputs_embeds=embeds)[0]
        return self._run(input_ids[None], positions[None])[0]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden] -> logits [T, vocabulary], with the caps and scales of the
        model's own head."""
        self.head._modules[self.base_name].hidden = hidden_states[None]
        logits = self.head(input_ids=hidden_states.new_zeros((1, 1), dtype=torch.long))
        return logits.logits[0]
