"""The mixer of Mamba-2: a short convolution, then a scan, both with states in pages.

Knows what its two states are and how a step moves them. Refuses to know where pages
lie and which of them are cached.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.ssd import ScanInputs, scan, step
from vllm.model_executor.step import traces
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mamba2_attn import (
    Mamba2AttentionBackend,
    Mamba2AttentionMetadata,
    StateSegment,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class Mamba2Sizes:
    """`num_heads` of `head_dim` elements; `num_groups` of `state_size` states; a
    convolution over `conv_kernel` tokens; scans in chunks of `chunk_size` tokens."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int
    chunk_size: int

    @property
    def intermediate(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.intermediate + 2 * self.num_groups * self.state_size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The last inputs of the convolution, and the state of the scan."""
        return (
            (self.conv_kernel - 1, self.conv_dim),
            (self.num_heads, self.head_dim, self.state_size),
        )


class GatedGroupNorm(nn.Module):
    """y and gate [T, d] -> weight * rms norm of y * silu(gate) within each group."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.groups = groups
        self.eps = eps

    def forward(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = (y.float() * F.silu(gate.float())).unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(gated, gated.shape[-1:], None, self.eps).flatten(-2)
        return self.weight * normed.to(gate.dtype)


class CausalConv(nn.Module):
    """One filter per channel: `weight` [channels, 1, kernel], `bias` [channels]."""

    def __init__(self, channels: int, kernel: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(channels, 1, kernel), requires_grad=False
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(channels), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, kernel - 1 + L, channels] -> silu of the filtered [B, L, channels]."""
        channels = x.shape[-1]
        y = F.conv1d(x.transpose(1, 2), self.weight, self.bias, groups=channels)
        return F.silu(y).transpose(1, 2)


@traces
class MambaMixer2(nn.Module, AttentionLayerBase):
    """x [T, hidden] -> [T, hidden]; registers itself under `prefix`.

    `kv_cache` is [conv states [blocks, kernel - 1, conv_dim], scan states [blocks, H,
    P, N]]. `dt_limit` bounds the time steps.
    """

    def __init__(
        self,
        sizes: Mamba2Sizes,
        rms_norm_eps: float,
        use_conv_bias: bool = True,
        use_bias: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        prefix: str = "",
    ) -> None:
        super().__init__()
        vllm_config = get_current_vllm_config()
        self.sizes = sizes
        self.layer_name = prefix
        self.dt_limit = dt_limit
        heads, inner = sizes.num_heads, sizes.intermediate
        self.in_proj = ColumnParallelLinear(
            sizes.hidden_size,
            inner + sizes.conv_dim + heads,
            bias=use_bias,
            prefix=f"{prefix}.in_proj",
            return_bias=False,
        )
        self.conv1d = CausalConv(sizes.conv_dim, sizes.conv_kernel, use_conv_bias)
        for name in ("dt_bias", "A_log", "D"):
            setattr(self, name, nn.Parameter(torch.empty(heads), requires_grad=False))
        self.norm = GatedGroupNorm(inner, sizes.num_groups, rms_norm_eps)
        self.out_proj = RowParallelLinear(
            inner,
            sizes.hidden_size,
            bias=use_bias,
            prefix=f"{prefix}.out_proj",
            return_bias=False,
        )
        self.state_dtypes = _state_dtypes(vllm_config)
        self.impl = None
        self.kv_cache: list[torch.Tensor] = []
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"duplicate layer name {prefix!r}: each needs its own")
        layers[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return Mamba2AttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        """Both states in one page. Without caching of states one block serves a whole
        request, whatever its length."""
        cache = vllm_config.cache_config
        whole = vllm_config.model_config.max_model_len
        caches = cache.mamba_cache_mode != "none"
        return MambaSpec(
            block_size=(cache.mamba_block_size or whole) if caches else whole,
            shapes=self.sizes.state_shapes,
            dtypes=self.state_dtypes,
            page_size_padded=cache.mamba_page_size_padded,
            mamba_type=MambaAttentionBackendEnum.MAMBA2,
            mamba_cache_mode=cache.mamba_cache_mode,
        )

    def forward(self, x: torch.Tensor, rope: Any = None) -> torch.Tensor:
        """`rope` is there for layers that rotate. Zeros without attention metadata."""
        context = get_forward_context()
        if not context.attn_metadata:
            return torch.zeros_like(x)
        sizes = self.sizes
        gate, mixed, dt = self.in_proj(x).split(
            [sizes.intermediate, sizes.conv_dim, sizes.num_heads], dim=-1
        )
        dt = F.softplus(dt.float() + self.dt_bias.float()).clamp(*self.dt_limit)
        y = torch.empty(
            (x.shape[0], sizes.num_heads, sizes.head_dim),
            dtype=torch.float32,
            device=x.device,
        )
        metadata: Mamba2AttentionMetadata = context.attn_metadata[self.layer_name]
        if metadata.decode_tokens.numel():
            self._step(metadata, mixed, dt, y)
        for segment in metadata.segments:
            self._scan(segment, mixed, dt, y)
        return self.out_proj(self.norm(y.flatten(1), gate))

    def _step(
        self,
        metadata: Mamba2AttentionMetadata,
        mixed: torch.Tensor,
        dt: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """Requests that go on by one token, together; writes their rows of `y`."""
        tokens, source = metadata.decode_tokens, metadata.decode_sources
        conv_states, scan_states = self.kv_cache
        window = torch.cat(
            [conv_states[source].to(mixed.dtype), mixed[tokens, None]], dim=1
        )
        inputs = self._scan_inputs(self.conv1d(window)[:, 0], dt[tokens])
        y[tokens], states = step(inputs, scan_states[source].float())
        conv_states[metadata.decode_targets] = window[:, 1:].to(conv_states.dtype)
        scan_states[metadata.decode_targets] = states.to(scan_states.dtype)

    def _scan(
        self,
        segment: StateSegment,
        mixed: torch.Tensor,
        dt: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """Several tokens of one request, in chunks; writes their rows of `y`."""
        part = slice(segment.start, segment.stop)
        conv_states, scan_states = self.kv_cache
        if segment.source < 0:
            before = mixed.new_zeros(conv_states.shape[1:])
            state = y.new_zeros(scan_states.shape[1:])
        else:
            before = conv_states[segment.source].to(mixed.dtype)
            state = scan_states[segment.source].float()
        window = torch.cat([before, mixed[part]])
        inputs = self._scan_inputs(self.conv1d(window[None])[0], dt[part])
        y[part], state = scan(inputs, state, self.sizes.chunk_size)
        kept = window[len(window) - len(before) :]
        conv_states[segment.target] = kept.to(conv_states.dtype)
        scan_states[segment.target] = state.to(scan_states.dtype)

    def _scan_inputs(self, mixed: torch.Tensor, dt: torch.Tensor) -> ScanInputs:
        sizes = self.sizes
        states = sizes.num_groups * sizes.state_size
        x, b, c = mixed.float().split([sizes.intermediate, states, states], dim=-1)
        return ScanInputs(
            x=x.unflatten(-1, (sizes.num_heads, sizes.head_dim)),
            dt=dt,
            b=b.unflatten(-1, (sizes.num_groups, sizes.state_size)),
            c=c.unflatten(-1, (sizes.num_groups, sizes.state_size)),
            a=-self.A_log.float().exp(),
            d=self.D.float(),
        )

    def extra_repr(self) -> str:
        return f"{self.sizes}"


def _state_dtypes(vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of convolution and scan states; "auto" is the model's, or the other's."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    conv = _DTYPES.get(cache.mamba_cache_dtype, model.dtype)
    return conv, _DTYPES.get(cache.mamba_ssm_cache_dtype, conv)
