"""Every environment variable, in one typed table, read when it is asked for.

`vllm.envs.VLLM_LOGGING_LEVEL` reads the environment at that moment, so tests and
plugins may set variables after import.
"""

import os
from collections.abc import Callable
from typing import Any


def _text(name: str, default: str | None = None) -> Callable[[], str | None]:
    return lambda: os.environ.get(name, default)


def _number(name: str, default: int | float) -> Callable[[], int | float]:
    def read() -> int | float:
        text = os.environ.get(name)
        if text is None or not text.strip():
            return default
        try:
            return type(default)(text)
        except ValueError:
            raise ValueError(
                f"environment variable {name}={text!r}: expected a number"
            ) from None

    return read


_FLAGS = dict.fromkeys(("1", "true", "yes", "on"), True)
_FLAGS |= dict.fromkeys(("", "0", "false", "no", "off"), False)


def _flag(name: str, default: bool) -> Callable[[], bool]:
    def read() -> bool:
        text = os.environ.get(name)
        if text is None:
            return default
        if (word := text.strip().lower()) not in _FLAGS:
            raise ValueError(f"environment variable {name}={text!r}: expected 1 or 0")
        return _FLAGS[word]

    return read


def _names(name: str) -> Callable[[], list[str] | None]:
    def read() -> list[str] | None:
        text = os.environ.get(name)
        return (
            None if text is None else [n.strip() for n in text.split(",") if n.strip()]
        )

    return read


environment_variables: dict[str, Callable[[], Any]] = {
    # logging
    "VLLM_LOGGING_LEVEL": _text("VLLM_LOGGING_LEVEL", "INFO"),
    "VLLM_LOG_STATS_INTERVAL": _number("VLLM_LOG_STATS_INTERVAL", 10.0),
    # files that can be made again; by default ~/.cache/vllm
    "VLLM_CACHE_ROOT": _text("VLLM_CACHE_ROOT"),
    # KV cache
    "VLLM_KV_CACHE_LAYOUT": _text("VLLM_KV_CACHE_LAYOUT"),
    "VLLM_CPU_KVCACHE_SPACE": _number("VLLM_CPU_KVCACHE_SPACE", 0.0),  # GiB, 0: choose
    # cpu | cuda | rocm: what to build for and to run on; unset: build for the CPU, run
    # on the GPU that torch sees
    "VLLM_TARGET_DEVICE": _text("VLLM_TARGET_DEVICE"),
    # CPU kernels and threads
    "VLLM_CPU_ISA": _text("VLLM_CPU_ISA"),  # avx2 | avx512, for tests
    "VLLM_CPU_OMP_THREADS_BIND": _text("VLLM_CPU_OMP_THREADS_BIND"),
    "VLLM_ATTENTION_BACKEND": _text("VLLM_ATTENTION_BACKEND"),
    # engine processes
    "VLLM_ENABLE_V1_MULTIPROCESSING": _flag("VLLM_ENABLE_V1_MULTIPROCESSING", False),
    "VLLM_ENGINE_READY_TIMEOUT_S": _number("VLLM_ENGINE_READY_TIMEOUT_S", 600),
    "VLLM_HOST_IP": _text("VLLM_HOST_IP", "127.0.0.1"),
    # NixlConnector: where other engines reach this one, and how many seconds the KV
    # pages of a finished prompt wait for one of them
    "VLLM_NIXL_SIDE_CHANNEL_HOST": _text("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"),
    "VLLM_NIXL_SIDE_CHANNEL_PORT": _number("VLLM_NIXL_SIDE_CHANNEL_PORT", 5600),
    "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": _number("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", 480),
    # server
    "VLLM_API_KEY": _text("VLLM_API_KEY"),
    "VLLM_SERVER_DEV_MODE": _flag("VLLM_SERVER_DEV_MODE", False),
    # plugins: names allowed to load, all when unset
    "VLLM_PLUGINS": _names("VLLM_PLUGINS"),
}


def __getattr__(name: str) -> Any:
    if name in environment_variables:
        return environment_variables[name]()
    raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(environment_variables)


def is_set(name: str) -> bool:
    """Says whether the variable is set; AttributeError for a name not in the table."""
    if name not in environment_variables:
        raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")
    return name in os.environ
