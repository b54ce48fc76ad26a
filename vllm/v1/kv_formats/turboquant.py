"""TurboQuant: keys as rotated codebook indices with a norm, values as uniform codes.

A key is normalised, rotated by the Hadamard matrix (block-diagonal where the head size
is no power of two) and each coordinate becomes the index of its nearest Lloyd-Max
centroid for N(0, 1 / head size). The 8-bit preset stores keys as plain e4m3 instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch

from vllm.v1.kv_formats.base import UNIT_SCALES, KVFormat, KVScales, Tolerance
from vllm.v1.kv_formats.casts import finite, saturate, tree_sum, widen
from vllm.v1.kv_formats.codebook import cell_index, get_centroids, get_midpoints
from vllm.v1.kv_formats.hadamard import block_size, hadamard
from vllm.v1.kv_formats.layout import Field
from vllm.v1.kv_formats.mode import KVQuantMode
from vllm.v1.kv_formats.packing import look_up, pack_bits, unpack_bits

FP8_KEY_BITS = 8
NORM_EPSILON = 1e-8
_CODEBOOK_EPSILON = 1e-16
MIN_STEP = 1e-8
# The squares of a head's coordinates stay finite below this.
KEY_LIMIT = 2.0**58
FLOAT16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class TurboQuant(KVFormat):
    """A preset: bits of a key index (8: e4m3, no norm) and of a value code.

    `norm_correction` rescales the decoded direction to unit length. Norms above the
    float16 range are stored as its largest value: the direction of a huge key survives.
    """

    key_bits: int = 4
    value_bits: int = 4
    norm_correction: bool = True

    align = 2
    latent_capable = False
    default_dense_boundary_layers = 2
    fits = "any head size of K and V heads (it stores no MLA latent)"

    @property
    def key_fp8(self) -> bool:
        """True where keys are stored as e4m3."""
        return self.stores_fp8(self.key_bits)

    @staticmethod
    def stores_fp8(key_bits: int) -> bool:
        """True for the number of key bits that means e4m3."""
        return key_bits == FP8_KEY_BITS

    def rows(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        if self.key_fp8:
            key = (Field("k_codes", "e4m3", of="k", note="key"),)
        else:
            key = (
                Field("k_codes", f"u{self.key_bits}", of="k", note="centroid indices"),
                Field("k_norm", "f16", 1, of="k", note="length of the key"),
            )
        return (
            *key,
            Field("v_codes", f"u{self.value_bits}", of="v", note="value codes"),
            Field("v_scale", "f16", 1, of="v", note="value step"),
            Field("v_zero", "f16", 1, of="v", note="smallest value"),
        )

    def encode(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> dict[str, torch.Tensor]:
        if value is None:
            raise self._misfit(key.shape[-1], 0)
        return self.encode_key(key) | self.encode_value(value)

    def encode_key(self, key: torch.Tensor) -> dict[str, torch.Tensor]:
        """Fields k_codes and k_norm of keys [T, heads, head_size]."""
        key = finite(key, KEY_LIMIT)
        if self.key_fp8:
            return {"k_codes": saturate(key, torch.float8_e4m3fn)}
        size = key.shape[-1]
        norm = tree_sum(key.square()).sqrt_()
        rotated = rotate(key / (norm + NORM_EPSILON))
        bounds = get_midpoints(size, self.key_bits).to(key.device)
        return {
            "k_codes": pack_bits(cell_index(rotated, bounds), self.key_bits),
            "k_norm": saturate(norm, torch.float16),
        }

    def encode_value(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Fields v_codes, v_scale and v_zero of values [T, heads, head_size_v]."""
        value = finite(value, FLOAT16_MAX)
        top = 2**self.value_bits - 1
        low = value.amin(-1, keepdim=True)
        step = (value.amax(-1, keepdim=True) - low) / top
        step.clamp_(min=MIN_STEP)
        codes = ((value - low) / step).add_(0.5).floor_().clamp_(0, top)
        return {
            "v_codes": pack_bits(codes.to(torch.uint8), self.value_bits),
            "v_scale": saturate(step, torch.float16),
            "v_zero": saturate(low, torch.float16),
        }

    def decode(
        self,
        fields: Mapping[str, torch.Tensor],
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.key_fp8:
            key = widen(fields["k_codes"])
        else:
            key = rotate(self.decode_rotated_key(fields, head_size))
        codes = unpack_bits(fields["v_codes"], self.value_bits, head_size_v)
        value = codes.float() * fields["v_scale"].float() + fields["v_zero"].float()
        return saturate(key, out_dtype), saturate(value, out_dtype)

    def decode_rotated_key(
        self, fields: Mapping[str, torch.Tensor], head_size: int
    ) -> torch.Tensor:
        """Float32 keys in rotated space: q . k == rotate(q) . decode_rotated_key."""
        centroids = get_centroids(head_size, self.key_bits)
        table = centroids.to(fields["k_codes"].device)
        direction = look_up(fields["k_codes"], self.key_bits, head_size, table)
        if self.norm_correction:
            length = (tree_sum(direction.square()) + _CODEBOOK_EPSILON).sqrt_()
            direction = direction / length
        return direction * fields["k_norm"].float()


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal block Hadamard rotation of the last axis; its own inverse."""
    return hadamard(x) * (1.0 / sqrt(block_size(x.shape[-1])))


FORMATS: tuple[TurboQuant, ...] = (
    TurboQuant(
        "turboquant_k8v4",
        KVQuantMode.TURBOQUANT_K8V4,
        key_bits=FP8_KEY_BITS,
        value_bits=4,
        norm_correction=False,
        tolerance=Tolerance(key=0.03, value=0.11),
        summary="e4m3 keys, 4-bit values",
    ),
    TurboQuant(
        "turboquant_4bit_nc",
        KVQuantMode.TURBOQUANT_4BIT_NC,
        key_bits=4,
        value_bits=4,
        tolerance=Tolerance(key=0.11, value=0.11),
        summary="4-bit key indices with a norm, 4-bit values",
    ),
    TurboQuant(
        "turboquant_k3v4_nc",
        KVQuantMode.TURBOQUANT_K3V4_NC,
        key_bits=3,
        value_bits=4,
        tolerance=Tolerance(key=0.2, value=0.11),
        summary="3-bit key indices with a norm, 4-bit values",
    ),
    TurboQuant(
        "turboquant_3bit_nc",
        KVQuantMode.TURBOQUANT_3BIT_NC,
        key_bits=3,
        value_bits=3,
        tolerance=Tolerance(key=0.2, value=0.22),
        summary="3-bit key indices with a norm, 3-bit values",
    ),
)
