"""Rotary frequencies of every scaling scheme, in float32.

Knows the formulas, one function per `rope_type`. Refuses to know caches and tensors of
a batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class RopeRequest:
    """What a scheme may look at.

    `rotary_dim` elements of each head are rotated; `max_position` is the config's
    max_position_embeddings; `num_positions` is how many positions will be used.
    """

    rotary_dim: int
    base: float
    max_position: int
    num_positions: int
    params: dict[str, Any]

    def need(self, key: str) -> Any:
        value = self.params.get(key)
        if value is None:
            raise ValueError(
                f"rope_parameters {self.params} lack {key!r}, which rope_type "
                f"{self.params.get('rope_type')!r} needs: correct the model's config"
            )
        return value


# Inverse frequencies [rotary_dim / 2], and the factor on cos and sin.
RopeFrequencies = tuple[torch.Tensor, float]


def rope_frequencies(rope_type: str, request: RopeRequest) -> RopeFrequencies:
    """Frequencies of a scheme; ValueError lists the schemes when it is unknown."""
    scheme = ROPE_SCHEMES.get(rope_type)
    if scheme is None:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported: expected one of "
            f"{', '.join(ROPE_SCHEMES)}"
        )
    return scheme(request)


def _wavelengths(request: RopeRequest, base: float | None = None) -> torch.Tensor:
    """base ** (2i / d): the inverse of the plain frequencies."""
    dim = request.rotary_dim
    steps = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
    return (request.base if base is None else base) ** steps


def _default(request: RopeRequest) -> RopeFrequencies:
    return 1.0 / _wavelengths(request), 1.0


def _linear(request: RopeRequest) -> RopeFrequencies:
    return 1.0 / _wavelengths(request) / request.need("factor"), 1.0


def _dynamic(request: RopeRequest) -> RopeFrequencies:
    """NTK-aware base for the whole length that will be used.

    Keys are cached rotated, so one base holds for all positions; up to max_position it
    is the plain one.
    """
    factor, dim = request.need("factor"), request.rotary_dim
    length = max(request.num_positions, request.max_position)
    stretch = factor * length / request.max_position - (factor - 1)
    return 1.0 / _wavelengths(request, request.base * stretch ** (dim / (dim - 2))), 1.0


def _llama3(request: RopeRequest) -> RopeFrequencies:
    """Long waves are divided by `factor`, short ones kept, a ramp in between."""
    factor, low, high = (
        request.need(key) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = request.need("original_max_position_embeddings")
    inv_freq = 1.0 / _wavelengths(request)
    wavelength = 2 * math.pi / inv_freq
    keep = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * inv_freq / factor + keep * inv_freq, 1.0


def _yarn(request: RopeRequest) -> RopeFrequencies:
    """Slow waves are interpolated, fast ones kept, by rotations in `original`."""
    params, dim = request.params, request.rotary_dim
    original = request.need("original_max_position_embeddings")
    factor = params.get("factor") or request.max_position / original
    low, high = (
        dim
        * math.log(original / (rotations * 2 * math.pi))
        / (2 * math.log(request.base))
        for rotations in (params.get("beta_fast") or 32, params.get("beta_slow") or 1)
    )
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = 0.001 if low == high else high - low
    indices = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    interpolated = ((indices - low) / width).clamp(0, 1)
    wavelengths = _wavelengths(request)
    inv_freq = (
        interpolated / (factor * wavelengths) + (1 - interpolated) * 1.0 / wavelengths
    )
    return inv_freq, _yarn_attention_factor(params, factor)


def _yarn_attention_factor(params: dict[str, Any], factor: float) -> float:
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    scale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
    if scale and all_dim:
        return yarn_mscale(factor, scale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    """How much longer contexts sharpen attention: 0.1 * scale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(request: RopeRequest) -> RopeFrequencies:
    """One factor per frequency: the long set when longer than the original length.

    Chosen once for the engine's maximum length, since keys are cached rotated.
    """
    params = request.params
    original = request.need("original_max_position_embeddings")
    is_long = request.num_positions > original
    factors = torch.tensor(
        request.need("long_factor" if is_long else "short_factor"),
        dtype=torch.float32,
        device="cpu",
    )
    if factors.shape != (request.rotary_dim // 2,):
        raise ValueError(
            f"rope_parameters have {factors.numel()} longrope factors, expected "
            f"{request.rotary_dim // 2}, one per rotated pair"
        )
    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        factor = params.get("factor") or request.max_position / original
        attention_factor = (
            1.0
            if factor <= 1.0
            else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    return 1.0 / (factors * _wavelengths(request)), float(attention_factor)


ROPE_SCHEMES: dict[str, Callable[[RopeRequest], RopeFrequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
