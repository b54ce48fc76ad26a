"""Names of attention backends and where their classes live.

Knows names and dotted paths only: it imports neither torch nor a backend, so that
configuration and `--help` can list backends. A class is resolved when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, EnumMeta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.utils.import_utils import resolve_qualname

if TYPE_CHECKING:
    from vllm.config import AttentionConfig

_BACKENDS = "vllm.v1.attention.backends"


class _AttentionBackendEnumMeta(EnumMeta):
    """Turns an unknown name into an error that lists the known ones."""

    def __getitem__(cls, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            usable = ", ".join(m.name for m in cls if m.is_importable())
            raise ValueError(
                f"Unknown attention backend {name!r}. Backends in this build: "
                f"{usable or 'none'}. Register your own under CUSTOM with "
                "register_backend()."
            ) from None


class _BackendEnum(Enum):
    """Shared behaviour of the registries; a value is the default dotted path."""

    def get_path(self, include_classname: bool = True) -> str:
        """Dotted path of the class, or of its module.

        Raises ValueError when nothing is registered under this name.
        """
        path = _OVERRIDES.get(self, self.value)
        if not path:
            raise ValueError(
                f"Attention backend {self.name} has no class. Register one with "
                f"register_backend({type(self).__name__}.{self.name}, "
                "'package.module.Class') before use."
            )
        return path if include_classname else path.rpartition(".")[0]

    def get_class(self) -> type[Any]:
        """The backend class, a subclass of AttentionBackend.

        Raises ValueError naming this member and the usable ones when the class's
        module is not part of this build.
        """
        path = self.get_path()
        if not self.is_importable():
            usable = ", ".join(m.name for m in type(self) if m.is_importable())
            raise ValueError(
                f"Attention backend {self.name} ({path}) is not part of this build. "
                f"Choose one of: {usable or 'none'}."
            )
        return resolve_qualname(path)

    def is_importable(self) -> bool:
        """True if the module of this backend exists (it is not imported)."""
        path = _OVERRIDES.get(self, self.value)
        return bool(path) and _module_exists(path.rpartition(".")[0])

    def is_overridden(self) -> bool:
        """True if register_backend replaced the default class."""
        return self in _OVERRIDES

    def clear_override(self) -> None:
        """Go back to the default class; does nothing if there was no override."""
        _OVERRIDES.pop(self, None)
        _changed()


class AttentionBackendEnum(_BackendEnum, metaclass=_AttentionBackendEnumMeta):
    """Every attention backend by name; `AttentionBackendEnum[name]` looks one up."""

    FLASH_ATTN = f"{_BACKENDS}.flash_attn.FlashAttentionBackend"
    FLASH_ATTN_DIFFKV = f"{_BACKENDS}.flash_attn_diffkv.FlashAttentionDiffKVBackend"
    TRITON_ATTN = f"{_BACKENDS}.triton_attn.TritonAttentionBackend"
    TRITON_ATTN_DIFFKV = f"{_BACKENDS}.triton_attn_diffkv.TritonAttentionDiffKVBackend"
    ROCM_ATTN = f"{_BACKENDS}.rocm_attn.RocmAttentionBackend"
    ROCM_AITER_MLA = f"{_BACKENDS}.mla.rocm_aiter_mla.AiterMLABackend"
    ROCM_AITER_TRITON_MLA = f"{_BACKENDS}.mla.aiter_triton_mla.AiterTritonMLABackend"
    ROCM_AITER_FA = f"{_BACKENDS}.rocm_aiter_fa.AiterFlashAttentionBackend"
    ROCM_AITER_MLA_SPARSE = (
        f"{_BACKENDS}.mla.rocm_aiter_mla_sparse.ROCMAiterMLASparseBackend"
    )
    XPU_MLA_SPARSE = f"{_BACKENDS}.mla.xpu_mla_sparse.XPUMLASparseBackend"
    TORCH_SDPA = ""
    FLASHINFER = f"{_BACKENDS}.flashinfer.FlashInferBackend"
    FLASHINFER_MLA = f"{_BACKENDS}.mla.flashinfer_mla.FlashInferMLABackend"
    TOKENSPEED_MLA = f"{_BACKENDS}.mla.tokenspeed_mla.TokenspeedMLABackend"
    FLASHINFER_MLA_SPARSE = (
        f"{_BACKENDS}.mla.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend"
    )
    FLASHINFER_MLA_SPARSE_SM120 = (
        f"{_BACKENDS}.mla.flashinfer_mla_sparse.FlashInferMLASparseSM120Backend"
    )
    TRITON_MLA = f"{_BACKENDS}.mla.triton_mla.TritonMLABackend"
    CUTLASS_MLA = f"{_BACKENDS}.mla.cutlass_mla.CutlassMLABackend"
    FLASHMLA = f"{_BACKENDS}.mla.flashmla.FlashMLABackend"
    FLASHMLA_SPARSE = f"{_BACKENDS}.mla.flashmla_sparse.FlashMLASparseBackend"
    FLASHMLA_SPARSE_DSV4 = (
        "vllm.models.deepseek_v4.sparse_mla.DeepseekV4FlashMLABackend"
    )
    FLASHINFER_MLA_SPARSE_DSV4 = (
        "vllm.models.deepseek_v4.nvidia.flashinfer_sparse."
        "DeepseekV4FlashInferMLASparseBackend"
    )
    ROCM_FLASHMLA_SPARSE_DSV4 = (
        "vllm.models.deepseek_v4.amd.rocm.DeepseekV4ROCMAiterMLASparseBackend"
    )
    FLASH_ATTN_MLA = f"{_BACKENDS}.mla.flashattn_mla.FlashAttnMLABackend"
    FLASH_ATTN_MLA_SPARSE = (
        f"{_BACKENDS}.mla.flashattn_mla_sparse.FlashAttnMLASparseBackend"
    )
    MINIMAX_M3_SPARSE = (
        "vllm.models.minimax_m3.common.sparse_attention.MiniMaxM3SparseBackend"
    )
    CUTLASS_MSA = (
        "vllm.models.minimax_m3.nvidia.sparse_attention_msa."
        "MiniMaxM3SparseCutlassBackend"
    )
    TRITON_MSA = (
        "vllm.models.minimax_m3.nvidia.sparse_attention_msa."
        "MiniMaxM3SparseTritonBackend"
    )
    NO_ATTENTION = f"{_BACKENDS}.no_attention.NoAttentionBackend"
    FLEX_ATTENTION = f"{_BACKENDS}.flex_attention.FlexAttentionBackend"
    HPC_ATTN = f"{_BACKENDS}.hpc_attn.HpcAttentionBackend"
    ROCM_AITER_UNIFIED_ATTN = (
        f"{_BACKENDS}.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend"
    )
    CPU_ATTN = f"{_BACKENDS}.cpu_attn.CPUAttentionBackend"
    CPU_MLA = f"{_BACKENDS}.mla.cpu_mla.CPUMLABackend"
    TURBOQUANT = f"{_BACKENDS}.turboquant_attn.TurboQuantAttentionBackend"
    REFERENCE = f"{_BACKENDS}.reference.ReferenceAttentionBackend"
    CUSTOM = None


class MambaAttentionBackendEnum(_BackendEnum, metaclass=_AttentionBackendEnumMeta):
    """Backends of layers that keep a recurrent state instead of keys and values."""

    MAMBA1 = f"{_BACKENDS}.mamba1_attn.Mamba1AttentionBackend"
    MAMBA2 = f"{_BACKENDS}.mamba2_attn.Mamba2AttentionBackend"
    SHORT_CONV = f"{_BACKENDS}.short_conv_attn.ShortConvAttentionBackend"
    LINEAR = f"{_BACKENDS}.linear_attn.LinearAttentionBackend"
    GDN_ATTN = f"{_BACKENDS}.gdn_attn.GDNAttentionBackend"
    CUSTOM = None


_OVERRIDES: dict[_BackendEnum, str] = {}
_changes = 0


def _changed() -> None:
    global _changes
    _changes += 1


def registry_changes() -> int:
    """How often a class was put behind a name, or taken back: for caches of choices."""
    return _changes


def register_backend(
    backend: AttentionBackendEnum | MambaAttentionBackendEnum,
    class_path: str | None = None,
    is_mamba: bool = False,
) -> Callable[[type], type]:
    """Put a class behind a name, by path at once or as a class decorator.

    `register_backend(AttentionBackendEnum.CUSTOM, "package.module.Class")` or
    `@register_backend(AttentionBackendEnum.CUSTOM)` above the class. `is_mamba`
    asserts that `backend` is a member of MambaAttentionBackendEnum.
    """
    if is_mamba and not isinstance(backend, MambaAttentionBackendEnum):
        raise ValueError(
            f"{backend} is not a member of MambaAttentionBackendEnum: drop is_mamba "
            "or pass a Mamba backend."
        )
    if class_path is not None:
        _OVERRIDES[backend] = class_path
        _changed()
        return lambda cls: cls

    def decorator(cls: type) -> type:
        _OVERRIDES[backend] = f"{cls.__module__}.{cls.__qualname__}"
        _changed()
        return cls

    return decorator


def as_backend(
    backend: AttentionBackendEnum | str | None,
) -> AttentionBackendEnum | None:
    """The member for a member or its name in any case; None and "" stay None.

    Raises ValueError listing the usable names for an unknown one.
    """
    if isinstance(backend, str):
        return AttentionBackendEnum[backend.upper()] if backend else None
    return backend


def requested_backend(
    attention_config: AttentionConfig | None, kind: str = ""
) -> AttentionBackendEnum | None:
    """What the user asked for: for this kind of spec, else in general, else through
    VLLM_ATTENTION_BACKEND. None leaves the choice to the platform."""
    asked = None
    if attention_config is not None:
        asked = attention_config.backend_per_kind.get(kind) or attention_config.backend
    return as_backend(asked or envs.VLLM_ATTENTION_BACKEND)


def _module_exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False
