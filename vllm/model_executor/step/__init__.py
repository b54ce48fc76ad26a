"""A decode step as a list of C++ operations, traced from the model's own forward."""

from vllm.model_executor.step.trace import (
    Detour,
    NotPlanned,
    Positions,
    Slot,
    StepTrace,
    TokenIds,
    traces,
)

__all__ = [
    "Detour",
    "NotPlanned",
    "Positions",
    "Slot",
    "StepTrace",
    "TokenIds",
    "traces",
]
