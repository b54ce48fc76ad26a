"""Token embedding and output head. One rank holds the whole vocabulary, unpadded."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm.model_executor.layers.packed_weight import PackedWeight, pack_weight


class VocabParallelEmbedding(nn.Module):
    """ids [T] -> [T, embedding_dim]; `weight` is [num_embeddings, embedding_dim]."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = 1,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.org_vocab_size = org_num_embeddings or num_embeddings
        self.embedding_dim = embedding_dim
        dtype = params_dtype or torch.get_default_dtype()
        self.weight = nn.Parameter(
            torch.empty(num_embeddings, embedding_dim, dtype=dtype), requires_grad=False
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} x {self.embedding_dim}"


class ParallelLMHead(VocabParallelEmbedding):
    """hidden [T, d] -> logits [T, vocabulary], through `LogitsProcessor`.

    A tied head shares the embedding's parameter. Prepacking for the CPU keeps the
    parameter when it is tied, because lookups need its rows, and drops it otherwise.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = 1,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            params_dtype,
            org_num_embeddings,
            padding_size,
            quant_config,
            prefix,
        )
        self.tied = False
        self.packed: PackedWeight | None = None
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(
                torch.empty(num_embeddings, dtype=self.weight.dtype),
                requires_grad=False,
            )

    def tie_weights(self, embedding: VocabParallelEmbedding) -> "ParallelLMHead":
        """Shares `embedding`'s parameter from now on."""
        self.weight = embedding.weight
        self.tied = True
        return self

    def process_weights_after_loading(self) -> None:
        """Prepacks the weight where that is faster. Idempotent."""
        if self.packed is None and self.weight is not None:
            self.packed = pack_weight(self.weight)
            if self.packed is not None and not self.tied:
                self.weight = None

    def logits(
        self, hidden: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden [T, d] -> [T, num_embeddings] in the dtype of `hidden`."""
        bias = self.bias if bias is None else bias
        if self.packed is not None:
            return self.packed.linear(hidden, bias)
        return F.linear(hidden, self.weight, bias)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("an output head embeds no tokens: call logits(hidden)")
