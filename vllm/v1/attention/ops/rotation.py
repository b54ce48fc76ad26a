"""Queries and outputs of formats that store rotated vectors, as matrix products.

Knows which formats rotate and by what. The matrices are orthonormal, so that nothing
grows or shrinks in 16-bit floats; what is left of the format's scaling is a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from vllm.v1.kv_formats import KVFormat, KVQuantMode
from vllm.v1.kv_formats.hadamard import block_size, hadamard, rht
from vllm.v1.kv_formats.turboquant import TurboQuant


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """key . query == `factor` * (stored key . `forward` of the query), and likewise for
    the values where `rotates_values`: value == `factor` * `back` of the stored one."""

    signed: bool
    factor: float
    rotates_values: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] in the space of the stored vectors, in x's dtype."""
        return _times(x, _orthonormal(block_size(x.shape[-1]), self.signed, x.device))

    def back(self, x: torch.Tensor, block: int | None = None) -> torch.Tensor:
        """The inverse of `forward`; `block` is the whole vector's where x [..., D]
        is a part of it."""
        block = block or block_size(x.shape[-1])
        return _times(x, _orthonormal(block, self.signed, x.device).T)


def rotation_of(fmt: KVFormat, head_size: int) -> Rotation | None:
    """How the format rotates vectors of this size; None where it does not."""
    if fmt.mode is KVQuantMode.INT4_PER_TOKEN_HEAD:
        factor = block_size(head_size) ** -0.5
        return Rotation(signed=True, factor=factor, rotates_values=True)
    if isinstance(fmt, TurboQuant) and not fmt.key_fp8:
        return Rotation(signed=False, factor=1.0, rotates_values=False)
    return None


def _times(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    blocks = x.float().unflatten(-1, (-1, len(matrix)))
    return (blocks @ matrix).flatten(-2).to(x.dtype)


@lru_cache(maxsize=32)
def _orthonormal(size: int, signed: bool, device: torch.device) -> torch.Tensor:
    """[b, b] in float32; row i is what the transform makes of unit vector i."""
    transform = rht if signed else hadamard
    return (transform(torch.eye(size)) * size**-0.5).to(device)
