"""Root-mean-square norms; those of whole rows add the residual themselves."""

import torch
import torch.nn.functional as F
from torch import nn

from vllm.model_executor.step import Slot, ops, records, traces


@traces
class RMSNorm(nn.Module):
    """y = weight * x / rms(x), the mean taken in float32 over the last axis.

    Below float32 the normalised value is rounded to the input's dtype before it is
    multiplied by `weight`, as Hugging Face models do.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=dtype), requires_grad=False
        )
        self._shape = (hidden_size,)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """norm(x), or (norm(x + residual), x + residual) when there is a residual."""
        if residual is None:
            return self._norm(x)
        summed = x + residual
        return self._norm(summed), summed

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        eps = self.variance_epsilon
        if x.dtype == torch.float32:
            return F.rms_norm(x, self._shape, self.weight, eps)
        normed = F.rms_norm(x.float(), self._shape, None, eps)
        return normed.to(x.dtype).mul_(self.weight)

    def emit(self, x: Slot, residual: Slot | None = None) -> Slot | tuple[Slot, Slot]:
        weight, mode = self.weight.float(), records.NORM_ROUNDED
        return ops.rms_norm(x, weight, self.variance_epsilon, mode, residual)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"


@traces
class PlainRMSNorm(nn.Module):
    """y = x / rms(x) over the last axis, in float32 and rounded once: no weight."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.variance_epsilon = eps
        self._shape = (hidden_size,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.float(), self._shape, None, self.variance_epsilon)
        return normed.to(x.dtype)

    def emit(self, x: Slot) -> Slot:
        return ops.rms_norm(x, None, self.variance_epsilon, records.NORM_ROUNDED)

    def extra_repr(self) -> str:
        return f"{self._shape[0]}, eps={self.variance_epsilon}"


@traces
class GemmaRMSNorm(nn.Module):
    """y = (1 + weight) * x / rms(x), all in float32, rounded once to x's dtype.

    Interface of `RMSNorm`, but not a kind of it: the weight means something else.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.variance_epsilon = eps
        self.weight = nn.Parameter(
            torch.zeros(hidden_size, dtype=dtype), requires_grad=False
        )
        self._shape = (hidden_size,)
        self._factor: torch.Tensor | None = None

    def process_weights_after_loading(self) -> None:
        """Computes 1 + weight once, in float32."""
        self._factor = 1.0 + self.weight.data.float()

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """norm(x), or (norm(x + residual), x + residual) when there is a residual."""
        if residual is None:
            return self._norm(x)
        summed = x + residual
        return self._norm(summed), summed

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        factor = self._factor
        if factor is None:
            factor = 1.0 + self.weight.float()
        normed = F.rms_norm(x.float(), self._shape, factor, self.variance_epsilon)
        return normed.to(x.dtype)

    def emit(self, x: Slot, residual: Slot | None = None) -> Slot | tuple[Slot, Slot]:
        weight, mode = 1.0 + self.weight.float(), records.NORM_WHOLE
        return ops.rms_norm(x, weight, self.variance_epsilon, mode, residual)

    def extra_repr(self) -> str:
        return f"{self._shape[0]}, eps={self.variance_epsilon}"
