"""Lloyd-Max codebooks for the coordinates of a rotated unit vector, N(0, 1 / d).

Bytes in a cache mean what this procedure computes, so its coarse integration rule is
kept exactly: 200 trapezoids per cell, summed left to right in float64.
"""

from functools import lru_cache
from math import pi, sqrt

import torch

_START = 3.5  # first centroids spread over +-3.5 sigma
_EDGE = 3.0  # the outer cells reach 3 times as far
_INTERVALS = 200
_EMPTY = 1e-15
_SEARCH_BELOW = 1 << 14  # elements


def _integral(samples: torch.Tensor) -> torch.Tensor:
    """Trapezoid sums over the last axis, without the width: a fixed order of adds."""
    ends = 0.5 * (samples[:, :1] + samples[:, -1:])
    return torch.cat((ends, samples[:, 1:-1]), dim=1).cumsum(1)[:, -1]


def _cell_means(edges: torch.Tensor, old: torch.Tensor, sigma: float) -> torch.Tensor:
    low, high = edges[:-1, None], edges[1:, None]
    width = (high - low) / _INTERVALS
    steps = torch.arange(_INTERVALS + 1, dtype=torch.float64)
    x = low + steps * width
    x[:, -1:] = high
    scale = 1.0 / sqrt(2 * pi * sigma * sigma)
    density = scale * torch.exp(-x * x / (2 * sigma * sigma))
    mass = _integral(density) * width[:, 0]
    moment = _integral(x * density) * width[:, 0]
    return torch.where(mass > _EMPTY, moment / mass, old)


def solve_lloyd_max(
    d: int, bits: int, max_iter: int = 200, tol: float = 1e-10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centroids [2**bits] and their float64 midpoints [2**bits - 1], both as float32.

    Stops when no centroid moves by `tol`, keeping the centroids before that move.
    """
    sigma = 1.0 / sqrt(d)
    low, high = -_START * sigma, _START * sigma
    cells = torch.arange(2**bits, dtype=torch.float64)
    centroids = low + (high - low) * (cells + 0.5) / 2**bits
    outer = torch.tensor([_EDGE * low, _EDGE * high], dtype=torch.float64)
    for _ in range(max_iter):
        middle = (centroids[:-1] + centroids[1:]) / 2
        edges = torch.cat((outer[:1], middle, outer[1:]))
        moved = _cell_means(edges, centroids, sigma)
        if float((moved - centroids).abs().max()) < tol:
            break
        centroids = moved
    middle = (centroids[:-1] + centroids[1:]) / 2
    return centroids.float(), middle.float()


@lru_cache(maxsize=32)
def get_centroids(d: int, bits: int) -> torch.Tensor:
    """Float32 [2**bits], ascending: the codebook of a head of size d. Do not modify."""
    return solve_lloyd_max(d, bits)[0]


def cell_index(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """How many of the ascending `bounds` are <= x, as uint8: a tie goes up."""
    if x.numel() < _SEARCH_BELOW:
        return torch.bucketize(x, bounds, right=True, out_int32=True).to(torch.uint8)
    # Same result: counting with vector compares beats a search on large tensors.
    index = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    reached = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    for bound in bounds.tolist():
        torch.ge(x, bound, out=reached)
        index.add_(reached.view(torch.uint8))
    return index


@lru_cache(maxsize=32)
def get_midpoints(d: int, bits: int) -> torch.Tensor:
    """Float32 [2**bits - 1]: decision boundaries, from the float32 centroids."""
    centroids = get_centroids(d, bits)
    return (centroids[:-1] + centroids[1:]) / 2
