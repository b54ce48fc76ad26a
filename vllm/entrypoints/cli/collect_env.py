"""`vllm collect-env`: versions and hardware, to paste into a report."""

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.mem_utils import format_bytes, total_memory_bytes
from vllm.v1.attention.ops import cpu_kernels
from vllm.version import __version__

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "gguf",
    "triton",
    "flashinfer-python",
)


def add_arguments(parser: FlexibleArgumentParser) -> None:
    """Takes no options."""


def run(args: argparse.Namespace) -> int:
    kernels = (
        cpu_kernels.isa()
        if cpu_kernels.available()
        else (f"not built ({cpu_kernels.why_unavailable()})")
    )
    rows = {
        "vllm": __version__,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "processors": str(os.cpu_count()),
        "memory": format_bytes(total_memory_bytes()),
        "C++ kernels": kernels,
        "torch threads": str(torch.get_num_threads()),
        "CUDA": str(torch.version.cuda) if torch.cuda.is_available() else "none",
        **{name: _version(name) for name in _PACKAGES},
    }
    for name, value in rows.items():
        print(f"{name:20} {value}")
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
