"""The routed experts of one layer: stacked weights, and a product per expert hit.

Knows shapes and how checkpoint tensors fall into the stacks. Refuses to know how tokens
are routed.
"""

import torch
import torch.nn.functional as F
from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe.cpu_experts import (
    PackedExperts,
    activation_of,
    moe_experts,
    serves,
)
from vllm.model_executor.layers.packed_weight import PackedWeight, pack_weight
from vllm.model_executor.step import NotPlanned, Slot, ops, traces

# (expert, which of its three matrices): "w1" gate, "w2" down, "w3" up
ExpertShard = tuple[int, str]


@traces
class FusedMoE(nn.Module):
    """x [T, hidden], weights [T, k], experts [T, k] -> [T, hidden].

    `w13_weight` [E, 2 * intermediate, hidden] holds gate rows, then up rows;
    `w2_weight` [E, hidden, intermediate]. One parameter each, so that a model of many
    experts is built at once. After loading, weights on the CPU are kept packed only:
    for the C++ kernel where it serves them, else bfloat16 ones for oneDNN.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        params_dtype: torch.dtype | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.prefix = prefix
        self.act_fn = get_act_and_mul_fn(activation)
        dtype = params_dtype or torch.get_default_dtype()
        w13 = torch.empty(num_experts, 2 * intermediate_size, hidden_size, dtype=dtype)
        w2 = torch.empty(num_experts, hidden_size, intermediate_size, dtype=dtype)
        self.w13_weight: nn.Parameter | None = self._loadable(w13)
        self.w2_weight: nn.Parameter | None = self._loadable(w2)
        self.packed_experts: PackedExperts | None = None
        self._packed: list[tuple[PackedWeight, PackedWeight]] = []

    def _loadable(self, tensor: torch.Tensor) -> nn.Parameter:
        param = nn.Parameter(tensor, requires_grad=False)
        param.weight_loader = self.weight_loader
        return param

    def checkpoint_pieces(self, name: str) -> dict[ExpertShard, tuple[int, ...]]:
        """Shape of every checkpoint tensor that fills the parameter `name`."""
        up, down = (
            (self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        )
        shards = {"w13_weight": {"w1": up, "w3": up}, "w2_weight": {"w2": down}}[name]
        return {
            (expert, which): shape
            for expert in range(self.num_experts)
            for which, shape in shards.items()
        }

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard: ExpertShard
    ) -> None:
        """Copies one matrix of one expert into its rows of the stack."""
        expert, which = shard
        rows = {"w1": slice(0, self.intermediate_size), "w2": slice(None)}.get(
            which, slice(self.intermediate_size, None)
        )
        target = param.data[expert, rows]
        if target.shape != loaded.shape:
            raise ValueError(
                f"layer {self.prefix!r}, expert {expert}, {which}: the checkpoint "
                f"holds shape {tuple(loaded.shape)}, expected {tuple(target.shape)}"
            )
        target.copy_(loaded)

    def process_weights_after_loading(self) -> None:
        """Keeps every expert's weights prepacked only, where that is faster."""
        if self.w13_weight is None or self.w2_weight is None:
            return
        if serves(self.w13_weight, self.act_fn):
            biases = self._biases()
            self.packed_experts = PackedExperts(
                self.w13_weight, self.w2_weight, *biases
            )
            self.w13_weight = self.w2_weight = None
            return
        packed = []
        for w13, w2 in zip(self.w13_weight, self.w2_weight, strict=True):
            pair = pack_weight(w13), pack_weight(w2)
            if pair[0] is None or pair[1] is None:
                return
            packed.append((pair[0], pair[1]))
        self._packed, self.w13_weight, self.w2_weight = packed, None, None

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of every token's experts, summed in float32."""
        if self.packed_experts is None:
            return self._by_expert(x, weights, experts)
        out = torch.empty_like(x)
        activation = activation_of(self.act_fn)
        moe_experts(out, x, self.packed_experts, experts, weights, activation)
        return out

    def emit(self, x: Slot, weights: Slot, ids: Slot) -> Slot:
        packed, activation = self.packed_experts, activation_of(self.act_fn)
        if packed is None or activation is None or packed.dtype != x.dtype:
            raise NotPlanned(f"the experts of {self.prefix} have no kernel")
        return ops.experts(x, weights, ids, packed.args(activation), packed)

    def _biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of w13 and w2."""
        return None, None

    def _by_expert(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """One product per expert that is hit, over all of its tokens at once; then
        each token sums its experts' outputs, in the order of `experts`."""
        tokens, top_k = experts.shape
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self.num_experts)
        rows = x.index_select(0, order // top_k)
        outputs = torch.empty_like(rows)
        start = 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                part = rows[start : start + count]
                outputs[order[start : start + count]] = self._expert(expert, part)
                start += count
        by_token = outputs.view(tokens, top_k, x.shape[-1])
        summed = torch.einsum("tkh,tk->th", by_token.float(), weights)
        return summed.to(x.dtype)

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            w13, w2 = self._packed[expert]
            return w2.linear(self.act_fn(w13.linear(x, None)), None)
        up = F.linear(x, self.w13_weight[expert])
        return F.linear(self.act_fn(up), self.w2_weight[expert])

    def extra_repr(self) -> str:
        return (
            f"{self.num_experts} experts, {self.hidden_size} -> "
            f"{self.intermediate_size}"
        )
