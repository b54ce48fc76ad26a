"""Knows which architectures can be served, as names; the model classes are far above.

The name table sits down here so that a config can be refused before anything heavy is
imported. `ModelRegistry` is its public face.
"""

from typing import Any

from vllm.utils.import_utils import resolve

_DEEPSEEK = "vllm.model_executor.models.deepseek_v2"
_GEMMA = "vllm.model_executor.models.gemma"
_LLAMA4 = "vllm.model_executor.models.llama4"

# What serves a model of transformers that is not in the table.
FALLBACK = "TransformersForCausalLM"
MODEL_IMPLS = ("auto", "vllm", "transformers")
_CAUSAL_LMS = "transformers.models.auto.modeling_auto:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"

# Layer types that keep a recurrent state instead of keys and values.
STATE_LAYER_TYPES = frozenset(
    {"mamba", "mamba2", "linear_attention", "recurrent", "conv", "hybrid"}
)

# HF architecture -> "module:Class", resolved only for the model being loaded.
ARCHITECTURES: dict[str, str | type[Any]] = {
    "BambaForCausalLM": "vllm.model_executor.models.bamba:BambaForCausalLM",
    "DeepseekV2ForCausalLM": f"{_DEEPSEEK}:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": f"{_DEEPSEEK}:DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM": f"{_GEMMA}:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": f"{_GEMMA}:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": f"{_GEMMA}:Gemma3ForConditionalGeneration",
    "GptOssForCausalLM": "vllm.model_executor.models.gpt_oss:GptOssForCausalLM",
    "Llama4ForCausalLM": f"{_LLAMA4}:Llama4ForCausalLM",
    "Llama4ForConditionalGeneration": f"{_LLAMA4}:Llama4ForConditionalGeneration",
    "LlamaForCausalLM": "vllm.model_executor.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "vllm.model_executor.models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "vllm.model_executor.models.mixtral:MixtralForCausalLM",
    "Qwen2ForCausalLM": "vllm.model_executor.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "vllm.model_executor.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "vllm.model_executor.models.qwen3_moe:Qwen3MoeForCausalLM",
    FALLBACK: f"vllm.model_executor.models.transformers_fallback:{FALLBACK}",
}


def supported_architectures() -> list[str]:
    """Every name that can be served, plugins included, sorted."""
    return sorted(ARCHITECTURES)


def pick_architecture(
    names: list[str] | None, where: str, model_impl: str = "vllm"
) -> str:
    """The first supported name of a config's `architectures`, or the fallback's.

    `where` names the file in the error. `model_impl` "vllm" takes implementations of
    this package only, "transformers" the library's, "auto" the former where there is
    one. Raises ValueError when the list is missing or holds nothing that can be served.
    """
    if model_impl not in MODEL_IMPLS:
        raise ValueError(
            f"model_impl {model_impl!r} is unknown: expected one of "
            f"{', '.join(MODEL_IMPLS)} (--model-impl)"
        )
    supported = ", ".join(supported_architectures())
    if not names:
        raise ValueError(
            f"{where} names no `architectures`; expected one of {supported}: add it to "
            "the file or pass --hf-overrides "
            '\'{"architectures": ["LlamaForCausalLM"]}\''
        )
    for name in names:
        if name in ARCHITECTURES and model_impl != "transformers":
            return name
    if model_impl != "vllm" and set(names) & _causal_lms():
        return FALLBACK
    others = "" if model_impl == "vllm" else ", and causal models of transformers"
    raise ValueError(
        f"{where}: architectures {list(names)} are not supported; supported are "
        f"{supported}{others} (plugins add more with ModelRegistry.register_model)"
    )


def _causal_lms() -> set[str]:
    """Every causal language model that transformers has."""
    names: set[str] = {FALLBACK}
    for value in resolve(_CAUSAL_LMS).values():
        names.update([value] if isinstance(value, str) else value)
    return names
