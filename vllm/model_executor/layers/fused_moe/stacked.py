"""Experts whose checkpoint stores all of them in one tensor per matrix.

Knows that layout: input-major, gate and up side by side or interleaved, biases. The
arithmetic is `layer`'s.
"""

import torch
import torch.nn.functional as F
from torch import nn

from vllm.model_executor.layers.fused_moe.layer import FusedMoE


class StackedMoE(FusedMoE):
    """Like `FusedMoE`; checkpoint tensors are [E, hidden, 2 * intermediate] and
    [E, intermediate, hidden], biases [E, 2 * intermediate] and [E, hidden].

    With `interleaved`, columns 2i are gates and 2i + 1 ups. `act_fn` replaces the named
    activation.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        params_dtype: torch.dtype | None = None,
        prefix: str = "",
        *,
        interleaved: bool = False,
        has_bias: bool = False,
        act_fn: nn.Module | None = None,
    ) -> None:
        super().__init__(
            num_experts,
            hidden_size,
            intermediate_size,
            activation,
            params_dtype,
            prefix,
        )
        self.interleaved = interleaved
        if act_fn is not None:
            self.act_fn = act_fn
        self.w13_bias: nn.Parameter | None = None
        self.w2_bias: nn.Parameter | None = None
        if has_bias:
            dtype = params_dtype or torch.get_default_dtype()
            w13 = torch.empty(num_experts, 2 * intermediate_size, dtype=dtype)
            w2 = torch.empty(num_experts, hidden_size, dtype=dtype)
            self.w13_bias, self.w2_bias = self._loadable(w13), self._loadable(w2)

    def checkpoint_pieces(self, name: str) -> dict[None, tuple[int, ...]]:
        """Shape of the one checkpoint tensor that fills the parameter `name`."""
        shape = tuple(getattr(self, name).shape)
        return {None: shape if name.endswith("bias") else (shape[0], *shape[:0:-1])}

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard: None = None
    ) -> None:
        """Copies a matrix or bias of all experts, gates first, then ups."""
        rows = loaded if loaded.dim() == 2 else loaded.transpose(1, 2)
        if self.interleaved and (param is self.w13_weight or param is self.w13_bias):
            half = self.intermediate_size
            param.data[:, :half].copy_(rows[:, 0::2])
            param.data[:, half:].copy_(rows[:, 1::2])
        else:
            param.data.copy_(rows)

    def _biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.w13_bias, self.w2_bias

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        if self.w13_bias is None or self.w2_bias is None:
            return super()._expert(expert, x)
        up_bias, down_bias = self.w13_bias[expert], self.w2_bias[expert]
        if self._packed:
            w13, w2 = self._packed[expert]
            return w2.linear(self.act_fn(w13.linear(x, up_bias)), down_bias)
        up = F.linear(x, self.w13_weight[expert], up_bias)
        return F.linear(self.act_fn(up), self.w2_weight[expert], down_bias)
