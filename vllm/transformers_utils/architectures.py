"""Knows which architectures can be served, as names; the model classes are far above.

The name table sits down here so that a config can be refused before anything heavy is
imported. `ModelRegistry` is its public face.
"""

from typing import Any

_DEEPSEEK = "vllm.model_executor.models.deepseek_v2"
_GEMMA = "vllm.model_executor.models.gemma"

# HF architecture -> "module:Class", resolved only for the model being loaded.
ARCHITECTURES: dict[str, str | type[Any]] = {
    "DeepseekV2ForCausalLM": f"{_DEEPSEEK}:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": f"{_DEEPSEEK}:DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM": f"{_GEMMA}:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": f"{_GEMMA}:Gemma3ForCausalLM",
    "GptOssForCausalLM": "vllm.model_executor.models.gpt_oss:GptOssForCausalLM",
    "Llama4ForCausalLM": "vllm.model_executor.models.llama4:Llama4ForCausalLM",
    "LlamaForCausalLM": "vllm.model_executor.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "vllm.model_executor.models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "vllm.model_executor.models.mixtral:MixtralForCausalLM",
    "Qwen2ForCausalLM": "vllm.model_executor.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "vllm.model_executor.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "vllm.model_executor.models.qwen3_moe:Qwen3MoeForCausalLM",
}


def supported_architectures() -> list[str]:
    """Every name that can be served, plugins included, sorted."""
    return sorted(ARCHITECTURES)


def pick_architecture(names: list[str] | None, where: str) -> str:
    """The first supported name of a config's `architectures`.

    `where` names the file in the error. Raises ValueError when the list is missing or
    holds nothing that can be served.
    """
    supported = ", ".join(supported_architectures())
    if not names:
        raise ValueError(
            f"{where} names no `architectures`; expected one of {supported}: add it to "
            "the file or pass --hf-overrides "
            '\'{"architectures": ["LlamaForCausalLM"]}\''
        )
    for name in names:
        if name in ARCHITECTURES:
            return name
    raise ValueError(
        f"{where}: architectures {list(names)} are not supported; supported are "
        f"{supported} (plugins add more with ModelRegistry.register_model)"
    )
