"""Which models, formats and parallel sizes go together; refusals before loading.

Knows facts about formats and what this build has parts for. Refuses to know devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_formats import by_name

if TYPE_CHECKING:
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig

logger = init_logger(__name__)

#: In `kv_cache_dtype_skip_layers`: no layer stays dense by default.
NO_DEFAULT_SKIP = "none"


def check_kv_cache_config(vllm_config: VllmConfig) -> None:
    """Refuses what cannot work and fills in the format's default dense layers.

    Raises ValueError naming the value, what is expected and the way out.
    """
    check_parallel_sizes(vllm_config.parallel_config)
    check_kv_cache_dtype(vllm_config.model_config, vllm_config.cache_config)
    apply_default_dense_layers(
        vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    )


def check_parallel_sizes(parallel_config: ParallelConfig) -> None:
    """Refuses the parallel dimensions that this build has no part for."""
    sizes = {
        "tensor_parallel_size": parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": parallel_config.pipeline_parallel_size,
        "prefill_context_parallel_size": parallel_config.prefill_context_parallel_size,
        "decode_context_parallel_size": parallel_config.decode_context_parallel_size,
    }
    for name, size in sizes.items():
        if size > 1:
            raise ValueError(
                f"{name}={size} is not supported: this build runs a model on one "
                f"device. Set {name}=1 and start one engine per device."
            )


def check_kv_cache_dtype(model_config: ModelConfig, cache_config: CacheConfig) -> None:
    """Refuses a format that cannot hold this model's keys and values."""
    name = cache_config.cache_dtype
    fmt = by_name(name)
    if model_config.use_mla:
        if not fmt.latent_capable:
            raise ValueError(
                f"KV cache dtype {name} stores keys and values per head, but "
                f"{model_config.model} caches one latent per token. Use auto, fp8, or "
                "a format for latents."
            )
        fmt.check_head_size(model_config.get_head_size(), 0)
        return
    if fmt.latent:
        raise ValueError(
            f"KV cache dtype {name} stores one latent per token (MLA), but "
            f"{model_config.model} caches keys and values per head. Use auto, fp8 or "
            "a per-token-head format."
        )
    head_size = model_config.get_head_size()
    fmt.check_head_size(head_size, head_size)


def apply_default_dense_layers(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    parallel_config: ParallelConfig,
) -> None:
    """Adds the layers at both ends that a format leaves dense to
    `kv_cache_dtype_skip_layers`, and removes the word "none", which forbids that.

    Hybrid models get no default: their attention layers are few already.
    """
    if cache_config._skip_layers_resolved:
        return
    cache_config._skip_layers_resolved = True
    asked = list(cache_config.kv_cache_dtype_skip_layers)
    count = model_config.get_num_layers(parallel_config)
    beyond = [entry for entry in asked if entry.isdecimal() and int(entry) >= count]
    if beyond:
        raise ValueError(
            f"kv_cache_dtype_skip_layers names layers {', '.join(beyond)}, but "
            f"{model_config.model} has layers 0 to {count - 1}: correct "
            "--kv-cache-dtype-skip-layers"
        )
    skip = [entry for entry in asked if entry != NO_DEFAULT_SKIP]
    at_each_end = by_name(cache_config.cache_dtype).default_dense_boundary_layers
    if len(skip) == len(asked) and not model_config.is_hybrid:
        layers = model_config.get_num_layers(parallel_config)
        ends = min(at_each_end, layers // 2)
        skip += [str(i) for i in (*range(ends), *range(layers - ends, layers))]
    cache_config.kv_cache_dtype_skip_layers = sorted(set(skip), key=_layer_order)
    if len(set(skip)) > len(set(asked)):
        logger.info(
            "KV cache dtype %s keeps layers %s dense by default; "
            "--kv-cache-dtype-skip-layers none turns that off.",
            cache_config.cache_dtype,
            ", ".join(cache_config.kv_cache_dtype_skip_layers),
        )


def _layer_order(entry: str) -> tuple[int, int, str]:
    """Numbers by value, then words."""
    return (0, int(entry), "") if entry.isdecimal() else (1, 0, entry)
