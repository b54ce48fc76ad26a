"""Which experts a token goes to, and with which weights.

Knows scores, groups and biases. Refuses to know experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm.model_executor.step import Slot, ops

# logits [T, E] -> scores [T, E], both float32
_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1, dtype=torch.float32),
    "sigmoid": lambda logits: logits.float().sigmoid(),
}
_MIN_SUM = 1e-20  # keeps the sum of weights above 0

# weights float32 [T, k], experts int64 [T, k]
Selection = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a model routes.

    Scores come from `scoring` ("softmax" or "sigmoid"). With `num_groups`, experts
    outside of the best `topk_groups` groups are left out; a group is as good as the sum
    of its best `scores_per_group`. `renormalize` makes weights sum to one before they
    are multiplied by `scale`. Of equal ones the first is chosen.
    """

    top_k: int
    scoring: str = "softmax"
    num_groups: int | None = None
    topk_groups: int | None = None
    scores_per_group: int = 1
    renormalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in _SCORES:
            raise ValueError(
                f"scoring function {self.scoring!r} is not supported: expected one of "
                f"{', '.join(_SCORES)}"
            )

    def select(
        self, logits: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Selection:
        """Weights and experts of router logits [T, E]; `bias` [E] shifts the choice,
        not the weights."""
        if isinstance(logits, Slot):
            return self.emit(logits, bias)
        scores = _SCORES[self.scoring](logits)
        choice = scores if bias is None else scores + bias
        if self.num_groups is not None:
            choice = self._within_groups(choice, lowest=0.0 if bias is None else None)
        experts = _largest(choice, self.top_k)
        weights = (choice if bias is None else scores).gather(1, experts)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _MIN_SUM)
        return weights * self.scale, experts

    def emit(self, logits: Slot, bias: torch.Tensor | None) -> tuple[Slot, Slot]:
        return ops.route(
            logits,
            bias,
            top_k=self.top_k,
            sigmoid=self.scoring == "sigmoid",
            num_groups=self.num_groups or 0,
            topk_groups=self.topk_groups or 1,
            scores_per_group=self.scores_per_group,
            renormalize=self.renormalize,
            scale=self.scale,
        )

    def _within_groups(
        self, choice: torch.Tensor, lowest: float | None
    ) -> torch.Tensor:
        """`choice` [T, E] with every expert outside of the chosen groups at `lowest`
        (-inf if None)."""
        grouped = choice.unflatten(-1, (self.num_groups, -1))
        best = grouped.topk(self.scores_per_group, dim=-1).values.sum(-1)
        chosen = _largest(best, self.topk_groups or 1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
        fill = float("-inf") if lowest is None else lowest
        return grouped.masked_fill(~kept.unsqueeze(-1), fill).flatten(-2)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Which of the last axis are largest; topk would choose any of equal ones."""
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].contiguous()


def fused_topk(
    gating_output: torch.Tensor, topk: int, renormalize: bool = False
) -> Selection:
    """The `topk` experts of largest softmax probability; logits [T, E]."""
    return Routing(top_k=topk, renormalize=renormalize).select(gating_output)


def grouped_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> Selection:
    """DeepSeek's choice within groups: by the best expert of a group, or, with a bias,
    by its two best."""
    routing = Routing(
        top_k=topk,
        scoring=scoring_func,
        num_groups=num_expert_group,
        topk_groups=topk_group,
        scores_per_group=1 if e_score_correction_bias is None else 2,
        renormalize=renormalize,
        scale=routed_scaling_factor,
    )
    return routing.select(gating_output, e_score_correction_bias)
