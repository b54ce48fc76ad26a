"""How many devices and processes serve one model."""

from dataclasses import field
from typing import Any

from pydantic import Field, model_validator

from vllm.config.utils import config


@config
class ParallelConfig:
    """Sizes of the parallel groups. `world_size` = pipeline x tensor parallel ranks."""

    pipeline_parallel_size: int = Field(default=1, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    prefill_context_parallel_size: int = Field(default=1, ge=1)
    data_parallel_size: int = Field(default=1, ge=1)
    data_parallel_size_local: int = Field(default=1, ge=0)
    data_parallel_rank: int = Field(default=0, ge=0)
    data_parallel_rank_local: int | None = None
    data_parallel_master_ip: str = "127.0.0.1"
    data_parallel_rpc_port: int = Field(default=29550, ge=1, le=65535)
    data_parallel_master_port: int = 29500
    data_parallel_backend: str = "mp"
    enable_expert_parallel: bool = False
    max_parallel_loading_workers: int | None = Field(default=None, ge=1)
    disable_custom_all_reduce: bool = False
    distributed_executor_backend: Any = None
    worker_cls: str = "auto"
    worker_extension_cls: str = ""
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    node_rank: int = Field(default=0, ge=0)
    nnodes: int = Field(default=1, ge=1)
    distributed_timeout_seconds: int | None = None
    decode_context_parallel_size: int = Field(default=1, ge=1)
    dcp_kv_cache_interleave_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    rank: int = 0
    world_size: int = field(default=1, init=False)

    @model_validator(mode="after")
    def _count_ranks(self) -> "ParallelConfig":
        self.world_size = self.pipeline_parallel_size * self.tensor_parallel_size
        return self
