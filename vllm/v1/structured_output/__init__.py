"""Where output grammars would be compiled. None is built in: requests are refused."""

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

__all__ = ["StructuredOutputGrammar", "StructuredOutputManager"]


class StructuredOutputManager:
    """Stands at the scheduler's door for requests that ask for structured output."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config

    def grammar_init(self, request: Request) -> None:
        """Refuses a request that asks for a grammar (VLLMValidationError); does nothing
        for others."""
        if request.use_structured_output:
            raise VLLMValidationError(
                "structured outputs are not built in: leave out structured_outputs, "
                "guided decoding and response_format, and check the text yourself",
                parameter="structured_outputs",
            )
