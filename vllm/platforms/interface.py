"""Facts about a device, and the checks that need them.

Knows names, capabilities and how a device picks an attention backend. Page arithmetic
is `page_planning`'s; the methods of that kind here only pass layers on.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from vllm import envs
from vllm.config.scheduler import SchedulerConfig
from vllm.logger import init_logger
from vllm.platforms import block_size
from vllm.platforms.kv_checks import check_kv_cache_config
from vllm.v1.attention.backends.registry import (
    AttentionBackendEnum,
    requested_backend,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


class PlatformEnum(Enum):
    """Kinds of device; OOT is one that a plugin brings."""

    CUDA = auto()
    ROCM = auto()
    TPU = auto()
    XPU = auto()
    CPU = auto()
    OOT = auto()
    UNSPECIFIED = auto()


class DeviceCapability(NamedTuple):
    """Compute capability; compares like the tuple (major, minor)."""

    major: int
    minor: int

    def as_version_str(self) -> str:
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        """90 for 9.0; `minor` has one digit."""
        return self.major * 10 + self.minor


class AttentionSelectorConfig(NamedTuple):
    """What a layer asks of its attention backend; sizes as in validate_configuration.

    `block_size` is None while the user has not fixed one.
    """

    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str | None
    block_size: int | None
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_per_head_quant_scales: bool = False
    attn_type: str = "decoder"
    has_sliding_window: bool = False
    use_non_causal: bool = False
    use_batch_invariant: bool = False
    use_kv_connector: bool = False
    use_pcp: bool = False


class Platform:
    """One device kind; every method is a class method and holds no state."""

    _enum: PlatformEnum
    device_name: str
    device_type: str
    dispatch_key: str = "CPU"
    ray_device_key: str = ""
    device_control_env_var: str = "VLLM_DEVICE_CONTROL_ENV_VAR_PLACEHOLDER"
    ray_noset_device_env_vars: ClassVar[list[str]] = []
    simple_compile_backend: str = "inductor"
    dist_backend: str = ""
    supported_quantization: ClassVar[list[str]] = []
    # Tokens of a step unless the user says otherwise.
    default_step_tokens: ClassVar[int] = SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS
    additional_env_vars: ClassVar[list[str]] = []
    _global_graph_pool: Any | None = None

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """Model dtypes, best first."""
        return [torch.bfloat16, torch.float16, torch.float32]

    # --- which device -----------------------------------------------------------

    def is_cuda(self) -> bool:
        return self._enum is PlatformEnum.CUDA

    def is_rocm(self) -> bool:
        return self._enum is PlatformEnum.ROCM

    def is_tpu(self) -> bool:
        return self._enum is PlatformEnum.TPU

    def is_xpu(self) -> bool:
        return self._enum is PlatformEnum.XPU

    def is_cpu(self) -> bool:
        return self._enum is PlatformEnum.CPU

    def is_out_of_tree(self) -> bool:
        return self._enum is PlatformEnum.OOT

    def is_unspecified(self) -> bool:
        return self._enum is PlatformEnum.UNSPECIFIED

    def is_cuda_alike(self) -> bool:
        return self._enum in (PlatformEnum.CUDA, PlatformEnum.ROCM)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """A name for people."""
        return cls.device_name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of memory on the device."""
        raise NotImplementedError

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """Compute capability, None where devices have none."""
        return None

    @classmethod
    def has_device_capability(
        cls, capability: tuple[int, int] | int, device_id: int = 0
    ) -> bool:
        """True if the device has at least this capability; an int means 90 for 9.0."""
        found = cls.get_device_capability(device_id)
        if found is None:
            return False
        if isinstance(capability, int):
            return found.to_int() >= capability
        return found >= capability

    # --- running ----------------------------------------------------------------

    @classmethod
    def inference_mode(cls) -> AbstractContextManager[None]:
        """Context in which a model runs: no autograd bookkeeping."""
        return torch.inference_mode(mode=True)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Make `device` current in this thread."""

    @classmethod
    def seed_everything(cls, seed: int | None) -> None:
        """Seed Python and torch; None leaves them alone."""
        if seed is not None:
            random.seed(seed)
            torch.manual_seed(seed)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def get_current_memory_usage(cls, device: torch.device | None = None) -> float:
        """Peak bytes that torch has allocated on the device."""
        raise NotImplementedError

    # --- configuration ----------------------------------------------------------

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Called before command lines are parsed; plugins add choices here."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuses by name what this device cannot serve, and fills in its defaults.

        Runs before the model is loaded. Raises ValueError with the way out.
        """
        if envs.VLLM_KV_CACHE_LAYOUT is not None:
            KVCacheLayout.from_name(envs.VLLM_KV_CACHE_LAYOUT)
        if vllm_config.model_config is not None:
            check_kv_cache_config(vllm_config)
            cls.check_attention_backend(vllm_config)

    @classmethod
    def verify_model_arch(cls, model_arch: str) -> None:
        """Raises ValueError if an architecture cannot run on this device."""

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Raises ValueError if a weight quantisation cannot run on this device."""
        if cls.supported_quantization and quant not in cls.supported_quantization:
            raise ValueError(
                f"Quantization {quant} is not supported on {cls.device_name}: expected "
                f"one of {', '.join(cls.supported_quantization)}."
            )

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Raises ValueError if models of this dtype cannot run on this device."""

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: VllmConfig) -> None:
        """Called once before planning; plugins register their spec classes here."""

    # --- page sizes -------------------------------------------------------------

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Settles block and page sizes in `cache_config`, from every loaded layer."""
        if vllm_config.model_config is None:
            return
        layers = block_size.attention_layers(vllm_config)
        block_size.choose_block_size(vllm_config, layers)
        block_size.share_page_with_states(vllm_config, layers)
        block_size.share_page_between_formats(vllm_config, layers)
        vllm_config.cache_config._block_size_resolved = True

    @classmethod
    def per_token_page_bytes(
        cls,
        vllm_config: VllmConfig,
        backend_cls: Any,
        dtype: torch.dtype | None = None,
        cache_dtype: str | None = None,
    ) -> int:
        """Bytes that one token of a plain layer takes, as its backend publishes them.

        `dtype` of the model and `cache_dtype` default to the configured ones.
        """
        return block_size.plain_layer(
            vllm_config, backend_cls, dtype, cache_dtype
        ).bytes_per_token

    @classmethod
    def _align_hybrid_block_size(
        cls, vllm_config: VllmConfig, backend_cls: Any
    ) -> None:
        """Makes attention pages hold the recurrent state; see `page_planning`."""
        layers = block_size.attention_layers(vllm_config, backend_cls)
        block_size.share_page_with_states(vllm_config, layers)

    @classmethod
    def _align_heterogeneous_kv_block_size(
        cls, vllm_config: VllmConfig, backend_cls: Any
    ) -> None:
        """Makes layers of unlike KV cache dtypes share a page; see `page_planning`."""
        layers = block_size.attention_layers(vllm_config, backend_cls)
        block_size.share_page_between_formats(vllm_config, layers)

    # --- attention backends -----------------------------------------------------

    @classmethod
    def attn_backend_priority(
        cls, attn_selector_config: AttentionSelectorConfig
    ) -> list[AttentionBackendEnum]:
        """Backends to try in turn for such a layer."""
        return [AttentionBackendEnum.REFERENCE]

    @classmethod
    def attn_backend_refusals(
        cls,
        backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
    ) -> list[str]:
        """Every reason why a backend cannot serve such a layer here; empty: it can."""
        backend_cls = backend.get_class()
        devices = backend_cls.supported_devices
        if devices and cls.device_name not in devices:
            return [f"it runs on {' or '.join(devices)}, not on {cls.device_name}"]
        return backend_cls.validate_configuration(
            device_capability=cls.get_device_capability(),
            **attn_selector_config._asdict(),
        )

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """Dotted path of the class for such a layer: the selected one, or the first
        of the priority list that serves it.

        Raises ValueError with every backend of this build that does not serve it, and
        all its reasons: the selected one first, then the others, then the way out.
        """
        chosen_by = "as asked" if selected_backend else f"default on {cls.device_name}"
        candidates = (
            [selected_backend]
            if selected_backend
            else cls.attn_backend_priority(attn_selector_config)
        )
        refusals: dict[str, list[str]] = {}
        for backend in candidates:
            reasons = cls.attn_backend_refusals(backend, attn_selector_config)
            if not reasons:
                logger.info_once(
                    "Attention backend %s (%s%s).",
                    backend.name,
                    chosen_by,
                    f"; refused: {_listed(refusals)}" if refusals else "",
                )
                return backend.get_path()
            refusals[backend.name] = reasons
        cls._check_block_size(candidates, attn_selector_config)
        others = cls._other_refusals(attn_selector_config, refusals.keys())
        layer = (
            f"head size {attn_selector_config.head_size}, model dtype "
            f"{str(attn_selector_config.dtype).removeprefix('torch.')}, KV cache dtype "
            f"{attn_selector_config.kv_cache_dtype}"
        )
        if selected_backend is None:
            raise ValueError(
                f"No attention backend on {cls.device_name} serves {layer}. "
                f"{_listed(refusals | others)}."
            )
        listed = f" Other backends, for {layer}: {_listed(others)}." if others else ""
        raise ValueError(
            f"{_listed(refusals)}.{listed}{cls._way_out(attn_selector_config)}"
        )

    @classmethod
    def _check_block_size(
        cls,
        candidates: list[AttentionBackendEnum],
        attn_selector_config: AttentionSelectorConfig,
    ) -> None:
        """ValueError with the sizes there are, where the block size alone keeps the
        candidates from a layer."""
        asked = attn_selector_config.block_size
        free = attn_selector_config._replace(block_size=None)
        sizes = {
            f"{backend.get_class().block_sizes_in_words()} tokens ({backend.name})"
            for backend in candidates
            if not cls.attn_backend_refusals(backend, free)
        }
        if asked is not None and sizes:
            raise ValueError(
                f"block size {asked} is not supported on {cls.device_name}: expected "
                f"{' or '.join(sorted(sizes))}; correct --block-size, or leave it out"
            )

    @classmethod
    def _other_refusals(
        cls, attn_selector_config: AttentionSelectorConfig, told: Collection[str]
    ) -> dict[str, list[str]]:
        """Why the other backends of this build do not serve the layer either."""
        others = (
            backend
            for backend in AttentionBackendEnum
            if backend.is_importable() and backend.name not in told
        )
        refusals = {
            backend.name: cls.attn_backend_refusals(backend, attn_selector_config)
            for backend in others
        }
        return {name: reasons for name, reasons in refusals.items() if reasons}

    @classmethod
    def check_attention_backend(cls, vllm_config: VllmConfig) -> None:
        """Finds a backend for a plain decoder layer of the model, before loading."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        selector = AttentionSelectorConfig(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=cache.cache_dtype,
            block_size=cache.block_size if cache.user_specified_block_size else None,
            use_mla=model.use_mla,
            use_non_causal=vllm_config.attention_config.use_non_causal,
        )
        asked = requested_backend(vllm_config.attention_config)
        cls.get_attn_backend_cls(asked, selector)

    @classmethod
    def _way_out(cls, attn_selector_config: AttentionSelectorConfig) -> str:
        """Backends that serve a layer for which another one was asked."""
        candidates = cls.attn_backend_priority(attn_selector_config)
        serving = [
            backend.name
            for backend in candidates
            if not cls.attn_backend_refusals(backend, attn_selector_config)
        ]
        if serving:
            return f" Choose {' or '.join(serving)} instead."
        names = " or ".join(backend.name for backend in candidates)
        return f" On {cls.device_name}, mend what keeps {names} from it."


def _listed(refusals: dict[str, list[str]]) -> str:
    return "; ".join(f"{name}: {', '.join(why)}" for name, why in refusals.items())
