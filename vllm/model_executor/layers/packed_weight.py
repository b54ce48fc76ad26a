"""Prepacked weights for the CPU: which packing serves a weight.

The C++ kernels' panels where they are built, else oneDNN's layout, through torch's own
operators, for bfloat16. `F.linear` packs a weight anew at every call; a decode step of
one token is then twice as slow as with a weight packed once. oneDNN's results are
checked once per process before the first use.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F

from vllm.logger import init_logger
from vllm.model_executor.layers import panel_weight
from vllm.model_executor.layers.panel_weight import PanelWeight

logger = init_logger(__name__)

_CHECK_TOLERANCE = 1e-2  # relative to the largest output; bf16 rounds at 4e-3
_BATCH_HINT = 32  # rows the blocking is chosen for; 1 to 256 measured the same


class OneDnnWeight:
    """A [N, K] weight in oneDNN's blocked layout; opaque, about as large as the dense
    one."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().contiguous(), _BATCH_HINT
        )

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., K] -> [..., N], both bfloat16, plus `bias` [N]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def to_dense(self) -> torch.Tensor:
        """A fresh row-major copy of the weight, [N, K] bfloat16."""
        return self._packed.to_dense()


PackedWeight = PanelWeight | OneDnnWeight


def pack_weight(weight: torch.Tensor, dropped_by: int = 1) -> PackedWeight | None:
    """The packed form of `weight`, or None where packing does not pay or work.

    As panels it may have taken the memory of a weight that `dropped_by` modules hold:
    all of them drop it then.
    """
    if panel_weight.serves(weight):
        return PanelWeight(weight, dropped_by)
    fits = (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.dim() == 2
        and min(weight.shape) > 1
    )
    return OneDnnWeight(weight) if fits and packing_works() else None


@lru_cache(maxsize=1)
def packing_works() -> bool:
    """Whether this torch on this CPU packs bfloat16 weights and computes right."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(torch.bfloat16)
    x = torch.randn(5, 64, generator=generator).to(torch.bfloat16)
    bias = torch.randn(96, generator=generator).to(torch.bfloat16)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        found = OneDnnWeight(weight).linear(x, bias).float()
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.info_once("Weights are not prepacked: %s", str(error).splitlines()[0])
        return False
    expected = F.linear(x, weight, bias).float()
    error = (found - expected).abs().max() / expected.abs().max()
    return bool(error <= _CHECK_TOLERANCE)
