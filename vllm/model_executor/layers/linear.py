"""Linear layers, alone or fused, and how checkpoint tensors fall into their rows.

Knows shapes and shards. The tensor-parallel names are the public ones; one rank holds
everything. After loading, weights on the CPU are kept prepacked only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm.model_executor.layers.packed_weight import PackedWeight, pack_weight
from vllm.model_executor.step import NotPlanned, Slot, ops, traces

# Rows of a fused linear by name or number; (expert, matrix) of stacked experts.
ShardId = str | int | tuple[int, str] | None
LinearOutput = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


@traces
class LinearBase(nn.Module):
    """y = x W^T + b, with `weight` [output_size, input_size] in `params_dtype`.

    Returns (y, bias): bias is None unless `skip_bias_add` leaves the addition to the
    caller. With `return_bias=False` returns y alone. Input [..., input_size].
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError(
                f"linear layer {prefix!r}: quantised weights are not supported; load "
                "an unquantised checkpoint or a GGUF file"
            )
        self.input_size = input_size
        self.output_size = output_size
        self.skip_bias_add = skip_bias_add
        self.return_bias = return_bias
        self.prefix = prefix
        self.packed: PackedWeight | None = None
        # True where somebody reads the rows of the weight itself.
        self.keeps_dense = False
        dtype = params_dtype or torch.get_default_dtype()
        weight = torch.empty(output_size, input_size, dtype=dtype)
        self.weight: nn.Parameter | None = _loadable(weight, self)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = _loadable(torch.empty(output_size, dtype=dtype), self)

    def shard_rows(self, shard: ShardId) -> tuple[int, int]:
        """(first row, number of rows) of a checkpoint tensor; None is all of them."""
        if shard is None:
            return 0, self.output_size
        raise ValueError(f"layer {self.prefix!r} has no shard {shard!r}")

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard: ShardId = None
    ) -> None:
        """Copies `loaded` into its rows of `param`, which is this weight or bias."""
        start, rows = self.shard_rows(shard)
        target = param.data[start : start + rows]
        if target.shape != loaded.shape:
            raise ValueError(
                f"layer {self.prefix!r}, shard {shard!r}: the checkpoint holds shape "
                f"{tuple(loaded.shape)}, expected {tuple(target.shape)}"
            )
        target.copy_(loaded)

    def process_weights_after_loading(self) -> None:
        """Keeps the weight prepacked only, where that is faster. Idempotent."""
        if self.packed is None and self.weight is not None and not self.keeps_dense:
            self.packed = pack_weight(self.weight)
            if self.packed is not None:
                self.weight = None

    def dense_weight(self) -> torch.Tensor:
        """The weight [output_size, input_size], unpacked if need be."""
        if self.weight is not None:
            return self.weight
        assert self.packed is not None
        return self.packed.to_dense()

    def forward(self, x: torch.Tensor) -> LinearOutput:
        bias = None if self.skip_bias_add else self.bias
        if self.packed is not None:
            y = self.packed.linear(x, bias)
        else:
            y = F.linear(x, self.weight, bias)
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None

    def emit(self, x: Slot) -> Slot:
        if self.return_bias:
            raise NotPlanned(f"{self.prefix} returns its bias")
        return ops.linear(x, self.packed, self.bias, self.prefix)

    def extra_repr(self) -> str:
        return f"{self.input_size} -> {self.output_size}, bias={self.bias is not None}"


def _loadable(tensor: torch.Tensor, layer: LinearBase) -> nn.Parameter:
    param = nn.Parameter(tensor, requires_grad=False)
    param.weight_loader = layer.weight_loader
    param.shard_rows = layer.shard_rows
    return param


class ReplicatedLinear(LinearBase):
    """Every rank holds the whole weight."""


class ColumnParallelLinear(LinearBase):
    """Split by output rows across ranks; one rank holds them all."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several linears of one input, stacked by rows; shard i has output_sizes[i]."""

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        self.output_sizes = list(output_sizes)
        super().__init__(
            input_size,
            sum(output_sizes),
            bias,
            gather_output,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    def shard_rows(self, shard: ShardId) -> tuple[int, int]:
        if isinstance(shard, int) and 0 <= shard < len(self.output_sizes):
            return sum(self.output_sizes[:shard]), self.output_sizes[shard]
        return super().shard_rows(shard)


class QKVParallelLinear(ColumnParallelLinear):
    """Q, K and V projections stacked by rows; shards "q", "k" and "v"."""

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        v_head_size: int | None = None,
    ) -> None:
        kv_heads = total_num_kv_heads or total_num_heads
        self.head_size = head_size
        self.v_head_size = v_head_size or head_size
        self.num_heads = self.total_num_heads = total_num_heads
        self.num_kv_heads = self.total_num_kv_heads = kv_heads
        q, k, v = (
            total_num_heads * head_size,
            kv_heads * head_size,
            kv_heads * self.v_head_size,
        )
        self.shards = {"q": (0, q), "k": (q, k), "v": (q + k, v)}
        super().__init__(
            hidden_size,
            q + k + v,
            bias,
            False,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    def shard_rows(self, shard: ShardId) -> tuple[int, int]:
        if isinstance(shard, str) and shard in self.shards:
            return self.shards[shard]
        return super().shard_rows(shard)


class RowParallelLinear(LinearBase):
    """Split by input columns across ranks; one rank holds them all."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
