"""Rotary position embedding: a table of cosines and sines, and the rotation.

Knows how pairs are arranged. The frequencies come from `rope_scaling`.
"""

import json
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.rope_scaling import RopeRequest, rope_frequencies
from vllm.model_executor.step import Positions, Slot, ops, records

# So many rows in float32 stay in a cache, and are no new memory each.
_POSITIONS_AT_ONCE = 256

RopeRows = tuple[torch.Tensor, torch.Tensor]


class RotaryEmbedding(nn.Module):
    """Rotates the first `rotary_dim` elements of each head by its token's position.

    `cos_sin_cache` [positions, rotary_dim]: cosines, then sines, computed in float32
    and stored in `dtype`. Neox style pairs element i with i + rotary_dim / 2, the other
    style 2i with 2i + 1.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        num_positions: int,
        is_neox_style: bool,
        dtype: torch.dtype,
        inv_freq: torch.Tensor,
        attention_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.is_neox_style = is_neox_style
        self.attention_factor = attention_factor
        self.cos_sin_cache: torch.Tensor
        cache = torch.empty(num_positions, rotary_dim, dtype=dtype, device="cpu")
        positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
        for part, rows in zip(
            cache.split(_POSITIONS_AT_ONCE),
            positions.split(_POSITIONS_AT_ONCE),
            strict=True,
        ):
            angles = torch.outer(rows, inv_freq)
            part.copy_(torch.cat([angles.cos(), angles.sin()], -1) * attention_factor)
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def rows(self, positions: torch.Tensor) -> RopeRows:
        """cos and signed sin [T, 1, rotary_dim] for `positions` [T], for `rotate`.

        One call serves every layer of a forward pass. A traced step looks its
        positions up itself, and passes them on.
        """
        if isinstance(positions, Positions):
            return positions
        half = self.rotary_dim // 2
        both = self.cos_sin_cache.index_select(0, positions).unsqueeze(1)
        cos, sin = both[..., :half], both[..., half:]
        if self.is_neox_style:
            return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return (
            torch.stack([cos, cos], -1).flatten(-2),
            torch.stack([-sin, sin], -1).flatten(-2),
        )

    def rotate(self, x: torch.Tensor, rows: RopeRows) -> torch.Tensor:
        """x [T, heads, head_size], any strides -> a new tensor, rotated."""
        if isinstance(x, Slot):
            return self.emit(x)
        cos, sin = rows
        dim = self.rotary_dim
        part = x if dim == x.shape[-1] else x[..., :dim]
        if self.is_neox_style:
            swapped = part.roll(dim // 2, -1)
        else:
            swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        rotated = torch.addcmul(part * cos, swapped, sin)
        if dim == x.shape[-1]:
            return rotated
        return torch.cat([rotated, x[..., dim:]], -1)

    def rotate_last(self, x: torch.Tensor, rows: RopeRows) -> torch.Tensor:
        """x [T, heads, size], whose heads end in `rotary_dim` elements to rotate."""
        kept = x.shape[-1] - self.rotary_dim
        rotated = self.rotate(x[:, :, kept:], rows)
        if isinstance(x, Slot):  # in place
            return x
        return torch.cat([x[:, :, :kept], rotated], -1)

    def emit(self, x: Slot) -> Slot:
        pairs = records.ROTATE_HALVES if self.is_neox_style else records.ROTATE_PAIRS
        return ops.rotate(x, self.cos_sin_cache, self.rotary_dim, pairs)

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query [T, heads * head_size] and key likewise, rotated, in their shapes."""
        rows = self.rows(positions)
        rotated = self.rotate(query.view(len(positions), -1, self.head_size), rows)
        query = rotated.reshape(query.shape)
        if key is not None:
            rotated = self.rotate(key.view(len(positions), -1, self.head_size), rows)
            key = rotated.reshape(key.shape)
        return query, key

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, "
            f"positions={self.cos_sin_cache.shape[0]}, neox={self.is_neox_style}"
        )


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    num_positions: int | None = None,
) -> RotaryEmbedding:
    """The embedding for a config's `rope_parameters`; equal arguments share one.

    `max_position` is the config's max_position_embeddings (some schemes depend on it),
    `num_positions` how many positions will be used, by default the same number.
    """
    return _cached_rope(
        head_size,
        max_position,
        is_neox_style,
        json.dumps(rope_parameters or {}, sort_keys=True),
        dtype or torch.get_default_dtype(),
        num_positions or max_position,
    )


@lru_cache(maxsize=8)
def _cached_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool,
    rope_parameters: str,
    dtype: torch.dtype,
    num_positions: int,
) -> RotaryEmbedding:
    params = json.loads(rope_parameters)
    rotary_dim = int(head_size * params.get("partial_rotary_factor", 1.0))
    if rotary_dim % 2:
        raise ValueError(
            f"rotary size {rotary_dim} of head size {head_size} is odd: elements are "
            "rotated in pairs, correct partial_rotary_factor"
        )
    inv_freq, attention_factor = rope_frequencies(
        params.get("rope_type", params.get("type", "default")),
        RopeRequest(
            rotary_dim=rotary_dim,
            base=float(params.get("rope_theta", 10000.0)),
            max_position=max_position,
            num_positions=num_positions,
            params=params,
        ),
    )
    return RotaryEmbedding(
        head_size,
        rotary_dim,
        num_positions,
        is_neox_style,
        dtype,
        inv_freq,
        attention_factor,
    )
