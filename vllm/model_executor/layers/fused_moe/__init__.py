"""Mixtures of experts: routing, and the experts' weights and arithmetic."""

from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.fused_moe.routing import (
    Routing,
    fused_topk,
    grouped_topk,
)

__all__ = ["FusedMoE", "Routing", "fused_topk", "grouped_topk"]
