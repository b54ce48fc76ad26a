"""C functions of the CPU library that other modules bind, with the structs they mirror.

Knows how a library built from other sources is noticed. Refuses to know the structs.
"""

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.attention.ops import cpu_kernels


def bound(
    abi: str, expected: int, arguments: Mapping[str, Sequence[Any]]
) -> SimpleNamespace | None:
    """The functions of `arguments` by name, each with the types that it takes and an
    int64 result.

    `abi` names the function that tells the sizes of the structs. None where it does not
    say `expected`, and where the library is missing or lacks one of the functions.
    """
    if not cpu_kernels.available():
        return None
    handle = cpu_kernels.loaded().handle
    try:
        sizes = getattr(handle, abi)
        functions = {name: getattr(handle, name) for name in arguments}
    except AttributeError:
        return None
    sizes.restype = ctypes.c_int64
    if sizes() != expected:
        return None
    for name, function in functions.items():
        function.argtypes = tuple(arguments[name])
        function.restype = ctypes.c_int64
    return SimpleNamespace(**functions)


def required(functions: SimpleNamespace | None, what: str) -> SimpleNamespace:
    """What `bound` found. RuntimeError says why there is nothing."""
    if functions is None:
        reason = cpu_kernels.why_unavailable() or "it was built from other sources"
        raise RuntimeError(f"{what} is not available: {reason}")
    return functions
