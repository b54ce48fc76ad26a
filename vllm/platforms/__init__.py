"""`current_platform`: the device kind of this process, found on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm.utils.import_utils import resolve

if TYPE_CHECKING:
    from vllm.platforms.interface import Platform

    current_platform: Platform

__all__ = ["current_platform", "detect_platform"]


def detect_platform() -> Platform:
    """A new platform object: CUDA where torch sees a device, the CPU elsewhere."""
    path = (
        "vllm.platforms.cuda:CudaPlatform"
        if torch.cuda.is_available()
        else "vllm.platforms.cpu:CpuPlatform"
    )
    return resolve(path)()


def __getattr__(name: str) -> Any:
    if name != "current_platform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = detect_platform()
    return globals()[name]
