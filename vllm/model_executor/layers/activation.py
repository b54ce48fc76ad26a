"""Activations of gated MLPs."""

import torch
import torch.nn.functional as F
from torch import nn

from vllm.model_executor.step import Slot, ops, records, traces


@traces
class SiluAndMul(nn.Module):
    """[..., 2 * d] -> [..., d]: silu of the first half times the second half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]).mul_(x[..., half:])

    def emit(self, x: Slot) -> Slot:
        return ops.gate(x, records.GATE_SILU)


@traces
class GeluAndMul(nn.Module):
    """[..., 2 * d] -> [..., d]: gelu of the first half times the second half.

    `approximate` is "none" or "tanh".
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return F.gelu(x[..., :half], approximate=self.approximate).mul_(x[..., half:])

    def emit(self, x: Slot) -> Slot:
        tanh = self.approximate == "tanh"
        return ops.gate(x, records.GATE_GELU_TANH if tanh else records.GATE_GELU)


@traces
class ClampedSwigluAndMul(nn.Module):
    """[..., 2 * d] -> [..., d]: g * sigmoid(alpha * g) * (u + 1), where g is the first
    half, at most `limit`, and u the second, within +-`limit`."""

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


# Hugging Face's `hidden_act` -> the gated activation
_GATED = {
    "silu": SiluAndMul,
    "swish": SiluAndMul,
    "gelu": GeluAndMul,
    "gelu_pytorch_tanh": lambda: GeluAndMul("tanh"),
    "gelu_new": lambda: GeluAndMul("tanh"),
}


def get_act_and_mul_fn(act_fn_name: str) -> nn.Module:
    """The gated activation for a `hidden_act`; ValueError lists the known names."""
    name = act_fn_name.lower()
    if name not in _GATED:
        raise ValueError(
            f"activation {act_fn_name!r} is not supported: expected one of "
            f"{', '.join(_GATED)}"
        )
    return _GATED[name]()
