"""What a pooler is told of a batch: plain data. No pooling model is built in."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm.pooling_params import PoolingParams


@dataclass
class PoolingMetadata:
    """Prompts of a batch: lengths [R], token ids [R, longest prompt] or None."""

    prompt_lens: torch.Tensor
    prompt_token_ids: torch.Tensor | None
    prompt_token_ids_cpu: torch.Tensor | None
    pooling_params: list[PoolingParams]
    pooling_states: list[Any]
    pooling_cursor: Any = None
