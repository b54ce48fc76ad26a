"""Experts whose weights scale what they are given, not what they give (Llama 4).

Knows where the weights go. The arithmetic is `layer`'s.
"""

import torch

from vllm.model_executor.layers.fused_moe.cpu_experts import activation_of
from vllm.model_executor.layers.fused_moe.stacked import StackedMoE
from vllm.model_executor.step import NotPlanned, Slot, head_ops


class InputScaledMoE(StackedMoE):
    """x [T, hidden], weights [T, k], experts [T, k] -> the sum [T, hidden] of what
    `experts` make of x times their weights, rounded to x's dtype."""

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        scaled = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
        ones = torch.ones_like(weights).view(-1, 1)
        outputs = super().forward(scaled, ones, experts.view(-1, 1))
        return outputs.view(*experts.shape, -1).sum(1)

    def emit(self, x: Slot, weights: Slot, ids: Slot) -> Slot:
        packed, activation = self.packed_experts, activation_of(self.act_fn)
        if packed is None or activation is None or packed.dtype != x.dtype:
            raise NotPlanned(f"the experts of {self.prefix} have no kernel")
        scaled = head_ops.spread(x, weights)
        args = packed.args(activation)
        return head_ops.sum_heads(head_ops.head_experts(scaled, ids, args, packed))
