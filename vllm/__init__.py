"""Public names of the package, resolved on first use so that `import vllm` is cheap."""

import os
from typing import TYPE_CHECKING, Any

from vllm.utils.import_utils import resolve
from vllm.version import __version__, __version_tuple__

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.entrypoints.llm import LLM
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

# OpenMP threads that wait at a barrier spin for milliseconds by default, which stops
# everything where cores are shared. libgomp reads this when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_NAMES = {
    "AsyncEngineArgs": "vllm.engine.arg_utils:AsyncEngineArgs",
    "AsyncLLM": "vllm.v1.engine.async_llm:AsyncLLM",
    "AsyncLLMEngine": "vllm.v1.engine.async_llm:AsyncLLM",
    "CompletionOutput": "vllm.outputs:CompletionOutput",
    "EngineArgs": "vllm.engine.arg_utils:EngineArgs",
    "LLM": "vllm.entrypoints.llm:LLM",
    "LLMEngine": "vllm.v1.engine.llm_engine:LLMEngine",
    "ModelRegistry": "vllm.model_executor.models.registry:ModelRegistry",
    "PoolingParams": "vllm.pooling_params:PoolingParams",
    "PromptType": "vllm.inputs:PromptType",
    "RequestOutput": "vllm.outputs:RequestOutput",
    "SamplingParams": "vllm.sampling_params:SamplingParams",
    "TextPrompt": "vllm.inputs:TextPrompt",
    "TokensPrompt": "vllm.inputs:TokensPrompt",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "ModelRegistry",
    "PoolingParams",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'vllm' has no attribute {name!r}")
    value = resolve(_NAMES[name])
    globals()[name] = value
    return value
