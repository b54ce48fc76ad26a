"""`current_platform`: the device kind of this process, found on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm import envs
from vllm.utils.import_utils import resolve

if TYPE_CHECKING:
    from vllm.platforms.interface import Platform

    current_platform: Platform

__all__ = ["current_platform", "detect_platform"]

_PLATFORMS = {
    "cpu": "vllm.platforms.cpu:CpuPlatform",
    "cuda": "vllm.platforms.cuda:CudaPlatform",
    "rocm": "vllm.platforms.rocm:RocmPlatform",
}


def detect_platform() -> Platform:
    """A new platform object: of VLLM_TARGET_DEVICE, else of the GPU that torch sees,
    else of the CPU.

    Raises ValueError where the wanted device is not here, or is none that is known.
    """
    found = "cpu"
    if torch.cuda.is_available():  # torch calls AMD's devices so, too
        found = "rocm" if torch.version.hip else "cuda"
    wanted = envs.VLLM_TARGET_DEVICE or found
    if wanted not in _PLATFORMS:
        raise ValueError(
            f"VLLM_TARGET_DEVICE={wanted}: expected one of {', '.join(_PLATFORMS)}"
        )
    if wanted not in ("cpu", found):
        raise ValueError(
            f"VLLM_TARGET_DEVICE={wanted}, but torch {torch.__version__} sees no such "
            "device: install the driver and a torch built for it, or unset the "
            "variable to serve on the CPU"
        )
    return resolve(_PLATFORMS[wanted])()


def __getattr__(name: str) -> Any:
    if name != "current_platform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = detect_platform()
    return globals()[name]
