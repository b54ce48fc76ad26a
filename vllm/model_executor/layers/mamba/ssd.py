"""State-space duality in plain torch: the scan of Mamba-2, in chunks or by one token.

Shapes: T tokens, H heads of P elements, G groups of N states. A state is [H, P, N]:
S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, and y_t = S_t C_t + D x_t. All in float32.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ScanInputs:
    """x [T, H, P]; dt [T, H], positive; b and c [T, G, N]; a (negative) and d [H]."""

    x: torch.Tensor
    dt: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    a: torch.Tensor
    d: torch.Tensor

    def tokens(self, start: int, stop: int) -> "ScanInputs":
        part = slice(start, stop)
        return ScanInputs(
            x=self.x[part],
            dt=self.dt[part],
            b=self.b[part],
            c=self.c[part],
            a=self.a,
            d=self.d,
        )

    def by_head(self, y: torch.Tensor) -> torch.Tensor:
        """[T, G, N] -> [T, H, N]: every group serves consecutive heads."""
        return y.repeat_interleave(self.x.shape[1] // y.shape[1], dim=1)


def scan(
    inputs: ScanInputs, state: torch.Tensor, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [T, H, P] and the state after the last token, from `state` before the first.

    Within a chunk all pairs of tokens meet in matrix products; chunks meet in the
    state.
    """
    outputs = []
    for start in range(0, inputs.x.shape[0], chunk_size):
        part = inputs.tokens(start, start + chunk_size)
        y, state = _scan_chunk(part, state)
        outputs.append(y)
    return torch.cat(outputs), state


def _scan_chunk(
    inputs: ScanInputs, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dt = inputs.dt.t()  # [H, L]
    decay = (dt * inputs.a[:, None]).cumsum(-1)  # log of what is left since the start
    between = decay[:, :, None] - decay[:, None, :]
    length = decay.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=decay.device).triu(1)
    weights = between.masked_fill(later, float("-inf")).exp() * dt[:, None, :]
    b = inputs.by_head(inputs.b).transpose(0, 1)  # [H, L, N]
    c = inputs.by_head(inputs.c).transpose(0, 1)
    x = inputs.x.transpose(0, 1)  # [H, L, P]
    y = (c @ b.transpose(1, 2) * weights) @ x
    y = y + decay.exp()[..., None] * (c @ state.transpose(1, 2))
    left = (decay[:, -1:] - decay).exp() * dt
    added = (x * left[..., None]).transpose(1, 2) @ b
    state = state * decay[:, -1].exp()[:, None, None] + added
    return y.transpose(0, 1) + inputs.d[:, None] * inputs.x, state


def step(inputs: ScanInputs, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of T sequences: y [T, H, P] and new states [T, H, P, N]."""
    left = (inputs.dt * inputs.a).exp()[..., None, None]
    scaled = (inputs.dt[..., None] * inputs.x)[..., None]
    states = states * left + scaled * inputs.by_head(inputs.b)[:, :, None]
    y = (states * inputs.by_head(inputs.c)[:, :, None]).sum(-1)
    return y + inputs.d[:, None] * inputs.x, states
