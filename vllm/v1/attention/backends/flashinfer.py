"""FLASHINFER: facts of the FlashInfer kernels, the pages of NVFP4, and which of two
families of kernels reads which format. Publishing imports no flashinfer."""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve
from vllm.v1.attention.backend import (
    AttentionMetadataBuilder,
    CacheDType,
    MultipleOf,
)
from vllm.v1.attention.backends.optional import OptionalBackend
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_formats import KVFormat, KVQuantMode, by_mode, by_name
from vllm.v1.kv_formats.nvfp4 import LINEAR

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability

_IMPL = "vllm.v1.attention.backends.flashinfer_impl"
_DISTRIBUTION = "flashinfer-python"
_OLDEST_VERSION = (0, 7)  # its arguments are those of ops.flashinfer_calls
_TRTLLM_MAJOR = 10  # SM 10.0 and 10.3
_FA2_FROM = (8, 0)
_TRTLLM_ELEMENTS = {"f16", "bf16", "e4m3"}
_TRTLLM_HEAD_SIZES = (64, 128, 256)


class Kernels(StrEnum):
    """FlashInfer's names of its kernel families."""

    FA2 = "fa2"
    TRTLLM = "trtllm-gen"


def kernels_for(fmt: KVFormat, capability: DeviceCapability | None) -> Kernels:
    """The family that reads a format on such a device: trtllm-gen on 10.x for dense,
    e4m3 and NVFP4 pages; fa2 for the rest."""
    if capability is None or capability[0] != _TRTLLM_MAJOR:
        return Kernels.FA2
    if fmt.mode.is_nvfp4:
        return Kernels.TRTLLM
    elements = {row.dtype for row in fmt.rows(torch.bfloat16)}
    plain = fmt.mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
    served = plain and elements <= _TRTLLM_ELEMENTS
    return Kernels.TRTLLM if served else Kernels.FA2


class FlashInferBackend(OptionalBackend):
    """Compute capability 7.5 to 12.1; quantised pages from 8.0 on."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "nvfp4",
        "nvfp4_4over6",
        "fp8_per_token_head",
    ]
    #: Heads before states within a page: what trtllm-gen and NVFP4 pages need.
    supported_kv_cache_layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    supported_devices = ("cuda",)
    required_packages = ("flashinfer", "triton")  # Triton's kernels write the pages
    impl_path = f"{_IMPL}:FlashInferImpl"
    fallback = "TRITON_ATTN"

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"

    @classmethod
    def unavailable_reason(cls) -> str | None:
        reason = super().unavailable_reason()
        if reason is not None:
            return reason
        found = version(_DISTRIBUTION)
        if tuple(int(part) for part in found.split(".")[:2]) >= _OLDEST_VERSION:
            return None
        oldest = ".".join(map(str, _OLDEST_VERSION))
        return (
            f"FLASHINFER calls {_DISTRIBUTION} {oldest} or newer, but {found} is "
            f"installed; upgrade it or choose {cls.fallback}"
        )

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return resolve(f"{_IMPL}:FlashInferMetadataBuilder")

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        mode = spec.kv_quant_mode
        mine = mode.is_nvfp4 or mode is KVQuantMode.FP8_PER_TOKEN_HEAD
        return spec.packed(by_mode(mode)) if mine and not spec.is_packed else spec

    @classmethod
    def arranged(
        cls, fmt: KVFormat, model_dtype: torch.dtype | None = None
    ) -> KVFormat:
        """fa2 reads the V scales of NVFP4 state by state."""
        capability = current_platform.get_device_capability()
        linear = fmt.mode.is_nvfp4 and kernels_for(fmt, capability) is Kernels.FA2
        return fmt.arranged(LINEAR) if linear else super().arranged(fmt, model_dtype)

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [16, 32, 64]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 128, 256, 512]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return (7, 5) <= capability <= (12, 1)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        device_capability: DeviceCapability | None,
    ) -> str | None:
        if device_capability is None or kv_cache_dtype is None:
            return None
        fmt = by_name(kv_cache_dtype).resolve(dtype)
        if fmt.mode.is_quantized and device_capability < _FA2_FROM:
            return f"{kv_cache_dtype} needs compute capability 8.0"
        kernels = kernels_for(fmt, device_capability)
        if has_sink and kernels is Kernels.FA2:
            return f"attention sinks over {kv_cache_dtype} pages need trtllm-gen (10.x)"
        if kernels is Kernels.TRTLLM and head_size not in _TRTLLM_HEAD_SIZES:
            return f"trtllm-gen takes head sizes {_TRTLLM_HEAD_SIZES}, not {head_size}"
        return None
