"""Lloyd-Max codebooks of TurboQuant keys, under the name that callers know."""

from vllm.v1.kv_formats.codebook import get_centroids, solve_lloyd_max

__all__ = ["get_centroids", "solve_lloyd_max"]
