"""Which attention backend was asked for."""

from dataclasses import field
from typing import Any

from vllm.config.utils import config


@config
class AttentionConfig:
    """`backend` is a member of AttentionBackendEnum or its name; None lets the platform
    choose. `backend_per_kind` names one for a KV-cache spec kind."""

    backend: Any = None
    backend_per_kind: dict[str, Any] = field(default_factory=dict)
    flash_attn_version: int | None = None
    use_prefill_decode_attention: bool = False
    flash_attn_max_num_splits_for_cuda_graph: int = 32
    tq_max_kv_splits_for_cuda_graph: int = 32
    use_trtllm_attention: bool | None = None
    disable_flashinfer_q_quantization: bool = False
    mla_prefill_backend: Any = None
    use_prefill_query_quantization: bool = False
    use_non_causal: bool = False
    sparse_mla_force_mqa: bool = False
