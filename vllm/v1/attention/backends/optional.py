"""Backends whose kernels come with a package that may be missing.

Such a backend states its facts and publishes its pages anywhere; only asking for its
impl needs the package. Knows how to say what is missing and what to use instead.
"""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.import_utils import has_module, resolve
from vllm.v1.attention.backend import AttentionBackend, AttentionImplBase


class OptionalBackend(AttentionBackend):
    """`required_packages` are what the kernels import; `impl_path` is "module:Class",
    None while this build has no kernels under this name."""

    forward_includes_kv_cache_update = False
    required_packages: ClassVar[tuple[str, ...]] = ()
    impl_path: ClassVar[str | None] = None
    #: Backend to name in errors as the way out.
    fallback: ClassVar[str] = "REFERENCE"

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """What is missing, by name, and the backend to choose instead."""
        missing = [name for name in cls.required_packages if not has_module(name)]
        if missing:
            return (
                f"{cls.get_name()} needs the package {' and '.join(missing)}, which is "
                f"not installed; install it or choose {cls.fallback}"
            )
        if cls.impl_path is None:
            return (
                f"this build has no kernels for {cls.get_name()}; choose {cls.fallback}"
            )
        return None

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImplBase]:  # type: ignore[override]
        reason = cls.unavailable_reason()
        if reason is not None or cls.impl_path is None:
            raise ValueError(f"Attention backend {cls.get_name()}: {reason}.")
        return resolve(cls.impl_path)
