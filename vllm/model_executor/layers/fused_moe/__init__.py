"""Mixtures of experts: routing, and the experts' weights and arithmetic."""

from vllm.model_executor.layers.fused_moe.input_scaled import InputScaledMoE
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.fused_moe.routing import (
    Routing,
    fused_topk,
    grouped_topk,
)
from vllm.model_executor.layers.fused_moe.stacked import StackedMoE

__all__ = [
    "FusedMoE",
    "InputScaledMoE",
    "Routing",
    "StackedMoE",
    "fused_topk",
    "grouped_topk",
]
