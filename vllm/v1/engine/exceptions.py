"""The errors of the engine, under the path where callers look for them."""

from vllm.exceptions import EngineDeadError, EngineGenerateError

__all__ = ["EngineDeadError", "EngineGenerateError"]
