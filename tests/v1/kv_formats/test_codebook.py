"""The codebooks are what the exact procedure gives, to the last bit."""

import math
import struct
from itertools import pairwise

import pytest
import torch

from vllm.v1.kv_formats.codebook import (
    cell_index,
    get_centroids,
    get_midpoints,
    solve_lloyd_max,
)

# (head size, bits) -> positive centroids as big-endian float32
POSITIVE = {
    (64, 3): "3cfadcfb 3dc171fc 3e2bed53 3e899f54",
    (64, 4): "3c83828a 3d46b9ff 3da82948 3df1444a 3e20cd0c 3e4f16c0 3e846170 3eaec76e",
    (128, 3): "3cb16317 3d88c955 3df3243d 3e42a09f",
    (128, 4): "3c39fbae 3d0c8559 3d6dd0e1 3daa99f2 3de3682b 3e126f17 3e3b36e7 3e772cc4",
    (256, 3): "3c7adcfb 3d4171fc 3dabed53 3e099f54",
    (256, 4): "3c03828a 3cc6b9ff 3d282948 3d71444a 3da0cd0c 3dcf16c0 3e046170 3e2ec76e",
}


def _reference(d: int, bits: int) -> list[float]:
    """The procedure written out in scalar arithmetic."""
    sigma = 1 / math.sqrt(d)
    low, high, levels = -3.5 * sigma, 3.5 * sigma, 2**bits

    def density(x: float) -> float:
        root = math.sqrt(2 * math.pi * sigma * sigma)
        return 1 / root * math.exp(-x * x / (2 * sigma * sigma))

    def trapezoid(samples: list[float], width: float) -> float:
        total = 0.5 * (samples[0] + samples[-1])
        for sample in samples[1:-1]:
            total += sample
        return total * width

    centroids = [low + (high - low) * (i + 0.5) / levels for i in range(levels)]
    for _ in range(200):
        middle = [(a + b) / 2 for a, b in pairwise(centroids)]
        edges = [3 * low, *middle, 3 * high]
        moved = []
        for i, old in enumerate(centroids):
            width = (edges[i + 1] - edges[i]) / 200
            x = [edges[i] + step * width for step in range(200)] + [edges[i + 1]]
            mass = trapezoid([density(v) for v in x], width)
            moment = trapezoid([v * density(v) for v in x], width)
            moved.append(moment / mass if mass > 1e-15 else old)
        if max(abs(a - b) for a, b in zip(moved, centroids, strict=True)) < 1e-10:
            break
        centroids = moved
    return centroids


@pytest.mark.parametrize(("d", "bits"), POSITIVE)
def test_known_centroids(d: int, bits: int) -> None:
    centroids = get_centroids(d, bits)
    words = [struct.pack(">f", c).hex() for c in centroids[2 ** (bits - 1) :].tolist()]
    assert " ".join(words) == POSITIVE[d, bits]
    assert torch.equal(centroids, -centroids.flip(0))


@pytest.mark.parametrize(("d", "bits"), [(72, 3), (80, 4)])
def test_centroids_equal_the_scalar_procedure(d: int, bits: int) -> None:
    wanted = torch.tensor(_reference(d, bits), dtype=torch.float64).float()
    assert torch.equal(solve_lloyd_max(d, bits)[0], wanted)


def test_boundaries_come_from_float32_centroids() -> None:
    bounds = get_midpoints(128, 4)
    centroids = get_centroids(128, 4)
    assert torch.equal(bounds, (centroids[1:] + centroids[:-1]) / 2)
    assert bounds[7] == 0
    assert bounds[8].item() == pytest.approx(0.0228291824)


@pytest.mark.parametrize("count", [100, 40_000])
def test_cells_of_small_and_large_tensors(count: int) -> None:
    bounds = get_midpoints(64, 3)
    x = torch.cat((torch.randn(count) / 8, bounds, -bounds))
    wanted = (x[:, None] >= bounds).sum(1)
    assert torch.equal(cell_index(x, bounds).long(), wanted)
