"""Token embedding and output head. One rank holds the whole vocabulary, unpadded."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm.model_executor.layers.packed_weight import PackedWeight, pack_weight
from vllm.model_executor.layers.panel_weight import PanelWeight
from vllm.model_executor.step import Slot, TokenIds, ops, traces


@traces
class VocabParallelEmbedding(nn.Module):
    """ids [T] -> [T, embedding_dim]; `weight` is [num_embeddings, embedding_dim], or
    None once a head that shares it keeps it in `panels`."""

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
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(num_embeddings, embedding_dim, dtype=dtype), requires_grad=False
        )
        self.panels: PanelWeight | None = None

    def dense_weight(self) -> torch.Tensor:
        """The weight [num_embeddings, embedding_dim], unpacked if need be."""
        if self.panels is not None:
            return self.panels.to_dense()
        assert self.weight is not None
        return self.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.panels is not None:
            return self.panels.rows(input_ids)
        return F.embedding(input_ids, self.weight)

    def emit(self, ids: TokenIds) -> Slot:
        if self.panels is not None:
            return ops.embed_panels(ids, self.panels)
        return ops.embed_dense(ids, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} x {self.embedding_dim}"


class ParallelLMHead(VocabParallelEmbedding):
    """hidden [T, d] -> logits [T, vocabulary], through `LogitsProcessor`.

    A tied head shares the embedding's parameter. Prepacking for the CPU drops the
    parameter: lookups read panels too, so that a tied weight is kept once. Only beside
    oneDNN's packing a tied parameter stays, because that has no rows to look up.
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
        self._tied_to: tuple[VocabParallelEmbedding, ...] = ()
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
        self._tied_to = (embedding,)  # a tuple: the model registers the module
        return self

    def dense_weight(self) -> torch.Tensor:
        return super().dense_weight() if self.packed is None else self.packed.to_dense()

    def process_weights_after_loading(self) -> None:
        """Prepacks the weight where that is faster. Idempotent."""
        if self.packed is not None or self.weight is None:
            return
        self.packed = pack_weight(self.weight, dropped_by=1 + len(self._tied_to))
        if isinstance(self.packed, PanelWeight):
            for embedding in self._tied_to:
                embedding.panels, embedding.weight = self.packed, None
            self.weight = None
        elif self.packed is not None and not self._tied_to:
            self.weight = None

    def logits(
        self, hidden: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden [T, d] -> [T, num_embeddings] in the dtype of `hidden`."""
        bias = self.bias if bias is None else bias
        if isinstance(hidden, Slot):
            return ops.linear(hidden, self.packed, bias, "the output head")
        if self.packed is not None:
            return self.packed.linear(hidden, bias)
        return F.linear(hidden, self.weight, bias)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("an output head embeds no tokens: call logits(hidden)")
