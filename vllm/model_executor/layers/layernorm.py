"""Root-mean-square norm, with the residual addition fused into its interface."""

import torch
import torch.nn.functional as F
from torch import nn


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

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"
