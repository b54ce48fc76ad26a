"""The Triton backends on the host, interpreted: for tests of whole engines only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend

NAME = "CUSTOM"


class HostTriton(TritonAttentionBackend):
    supported_devices = ("cpu",)

    @staticmethod
    def get_name() -> str:
        return NAME


class HostTurboQuant(TurboQuantAttentionBackend):
    """Tokens are compared in float32, where a rounding decides nothing."""

    supported_devices = ("cpu",)
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]

    @staticmethod
    def get_name() -> str:
        return NAME


class HostTritonMLA(TritonMLABackend):
    supported_devices = ("cpu",)

    @staticmethod
    def get_name() -> str:
        return NAME


@contextmanager
def registered(backend: type[Any]) -> Iterator[str]:
    """The backend under a name that engines take, for a while."""
    path = f"{backend.__module__}.{backend.__qualname__}"
    register_backend(AttentionBackendEnum[NAME], path)
    try:
        yield NAME
    finally:
        AttentionBackendEnum[NAME].clear_override()
