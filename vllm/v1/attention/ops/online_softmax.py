"""Attention over keys and values that arrive in chunks, in float32.

Knows the mathematics: grouped heads, masks, soft cap, sinks. Refuses to know where
keys come from. The result does not depend on how the keys are cut into chunks.
"""

from __future__ import annotations

import torch

# Scores are made for at most this many (query, key) pairs per head at once.
_MAX_PAIRS = 1 << 19


class OnlineSoftmax:
    """Running softmax of R requests with n queries each; feed chunks, then `result`."""

    def __init__(
        self,
        query: torch.Tensor,
        num_kv_heads: int,
        head_size_v: int,
        scale: float,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """`query` [R, n, Hq, D]; `sinks` [Hq], one logit that each head always sees;
        `soft_cap` bounds scores to +-soft_cap, 0 turns it off."""
        requests, queries, heads, head_size = query.shape
        if heads % num_kv_heads:
            raise ValueError(
                f"{heads} query heads cannot share {num_kv_heads} KV heads evenly"
            )
        group = heads // num_kv_heads
        scaled = query.float() * scale
        self._query = scaled.view(
            requests, queries, num_kv_heads, group, head_size
        ).permute(0, 2, 3, 1, 4)
        shape = (requests, num_kv_heads, group, queries)
        self._soft_cap = soft_cap
        self._sum = scaled.new_zeros(shape)
        self._top = scaled.new_full(shape, float("-inf"))
        self._weighted = scaled.new_zeros((*shape, head_size_v))
        if sinks is not None:
            sink = sinks.to(scaled).view(1, num_kv_heads, group, 1)
            self._top.copy_(sink.expand(shape))
            self._sum.fill_(1.0)

    def add(self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> None:
        """One chunk: float32 `key` [R, S, Hkv, D], `value` [R, S, Hkv, Dv], bool
        `mask` [R, n, S], true where a query sees a key. Masked keys may hold NaN;
        values may not."""
        queries, keys = mask.shape[1:]
        tile = max(1, _MAX_PAIRS // keys)
        key, value = key.permute(0, 2, 3, 1), value.permute(0, 2, 1, 3)
        for start in range(0, queries, tile):
            self._add_tile(
                slice(start, start + tile), key, value, mask[:, start : start + tile]
            )

    def _add_tile(
        self,
        tile: slice,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
    ) -> None:
        """`key` [R, Hkv, D, S], `value` [R, Hkv, S, Dv], `mask` [R, t, S]."""
        if not mask.any():
            return
        query = self._query[:, :, :, tile]
        requests, heads, group, queries, head_size = query.shape
        flat = (requests, heads, group * queries)
        scores = query.reshape(*flat, head_size) @ key
        if self._soft_cap:
            scores.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        scores = scores.view(requests, heads, group, queries, -1)
        scores.masked_fill_(~mask[:, None, None], float("-inf"))
        before = self._top[..., tile]
        top = torch.maximum(before, scores.amax(-1))
        # A query that has seen no key yet keeps sum 0; 0 stands in for -inf.
        base = top.masked_fill(top == float("-inf"), 0.0)
        kept = (before - base).exp_()
        scores.sub_(base[..., None]).exp_()
        weighted = scores.view(*flat, -1) @ value
        self._sum[..., tile].mul_(kept).add_(scores.sum(-1))
        self._weighted[:, :, :, tile].mul_(kept[..., None]).add_(
            weighted.view(requests, heads, group, queries, -1)
        )
        self._top[..., tile] = top

    def result(self) -> torch.Tensor:
        """Attention output [R, n, Hq, Dv] in float32."""
        out = self._weighted / self._sum[..., None]
        requests, heads, group, queries, head_size_v = out.shape
        return out.permute(0, 3, 1, 2, 4).reshape(
            requests, queries, heads * group, head_size_v
        )
