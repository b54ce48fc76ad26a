"""The experts of a layer in C++: packed weights, and one call for all tokens.

Knows the packing and the C ABI of `csrc/cpu/experts.h`. Refuses to know how tokens are
routed and where weights come from.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace

import torch
from torch import nn

from vllm.model_executor.layers.activation import ClampedSwigluAndMul, SiluAndMul
from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.attention.ops import cpu_functions, cpu_kernels

PANEL = 32  # outputs of a panel: `kPanel`
# Elements per 32-bit unit, and the number of the type.
_UNITS = {torch.float32: (1, 0), torch.float16: (2, 1), torch.bfloat16: (2, 2)}
_LINE = 16  # units of a cache line
_OUT_OF_MEMORY = 2
_STATUS = {
    1: "no kernel for this type",
    6: "an expert outside the layer is named",
}


class ExpertsArgs(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("w13", ctypes.c_void_p),
        ("w2", ctypes.c_void_p),
        ("bias13", ctypes.c_void_p),
        ("bias2", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


@dataclass(frozen=True, kw_only=True)
class GatedActivation:
    """A number of `csrc/cpu/experts.h` and its constants."""

    number: int
    alpha: float = 1.0
    limit: float = 0.0


SILU = GatedActivation(number=0)


def clamped_swiglu(alpha: float, limit: float) -> GatedActivation:
    return GatedActivation(number=1, alpha=alpha, limit=limit)


def activation_of(act_fn: nn.Module) -> GatedActivation | None:
    """The kernel's form of a gated activation; None where it has none."""
    if isinstance(act_fn, ClampedSwigluAndMul):
        return clamped_swiglu(act_fn.alpha, act_fn.limit)
    return SILU if isinstance(act_fn, SiluAndMul) else None


class PackedMatrices:
    """A stack of weights [E, N, K], of a type in `_UNITS`, in panels of `PANEL` rows.

    `gated`: rows are N / 2 gates, then N / 2 ups, and a panel holds `PANEL` / 2 of each
    that go together. N and K are filled up with zeros.
    """

    def __init__(self, weight: torch.Tensor, *, gated: bool) -> None:
        if weight.dtype not in _UNITS or weight.dim() != 3:
            raise ValueError(
                f"experts' weights are {weight.dtype} of shape {tuple(weight.shape)}: "
                "expected float32, bfloat16 or float16 [experts, outputs, inputs]"
            )
        self.shape = weight.shape
        self.dtype = weight.dtype
        self.gated = gated
        experts, outputs, inputs = weight.shape
        elems, _ = _UNITS[weight.dtype]
        self._sides = 2 if gated else 1
        self._panels = cdiv(outputs // self._sides, PANEL // self._sides)
        steps = cdiv(inputs, elems)
        self.data = torch.empty(
            experts, self._panels, steps, PANEL * elems, dtype=weight.dtype
        )
        cpu_kernels.advise_huge_pages(self.data)
        rows = self._rows()
        wide = rows.flatten(1, 2)
        dense = weight.detach().unflatten(1, (self._sides, -1))
        for expert in range(experts):
            wide[:, : dense.shape[2], :inputs] = dense[expert]
            self._units(self.data[expert]).copy_(self._transposed(rows))

    def to_dense(self) -> torch.Tensor:
        """A fresh row-major copy, [E, N, K]."""
        experts, _, inputs = self.shape
        dense = torch.empty(self.shape, dtype=self.dtype)
        sides = dense.view(experts, self._sides, -1, inputs)
        rows = self._rows()
        wide = rows.flatten(1, 2)
        for expert in range(experts):
            self._transposed(rows).copy_(self._units(self.data[expert]))
            sides[expert] = wide[:, : sides.shape[2], :inputs]
        return dense

    def pack_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """[E, N] in any float type -> float32 [E, panels * PANEL], in their order."""
        experts = self.shape[0]
        half = PANEL // self._sides
        sides = bias.detach().float().view(experts, self._sides, -1)
        padded = nn.functional.pad(sides, (0, self._panels * half - sides.shape[2]))
        by_panel = padded.view(experts, self._sides, self._panels, half)
        return by_panel.transpose(1, 2).reshape(experts, -1).contiguous()

    def _rows(self) -> torch.Tensor:
        """Zeros for one expert, filled up: [sides, panels, PANEL / sides, inputs].

        Rows lie a cache line further apart than they are long: a power of two apart,
        all of a panel's would share one set of the cache.
        """
        elems, _ = _UNITS[self.dtype]
        inputs = round_up(self.shape[2], elems)
        shape = (self._sides, self._panels, PANEL // self._sides)
        apart = torch.zeros(*shape, inputs + _LINE * elems, dtype=self.dtype)
        return apart[..., :inputs]

    def _transposed(self, rows: torch.Tensor) -> torch.Tensor:
        """One expert's filled rows as units [panels, steps, sides, PANEL / sides]."""
        return rows.view(torch.int32).permute(1, 3, 0, 2)

    def _units(self, expert: torch.Tensor) -> torch.Tensor:
        """One packed expert, seen the same way."""
        units = expert.view(torch.int32)
        return units.unflatten(-1, (self._sides, PANEL // self._sides))


class PackedExperts:
    """The weights of a layer's experts, ready for `moe_experts`.

    w13: [E, 2 * intermediate, hidden], gates first; w2: [E, hidden, intermediate], both
    in one type of `_UNITS`; biases [E, 2 * intermediate] and [E, hidden] or None.
    """

    def __init__(
        self,
        w13: torch.Tensor,
        w2: torch.Tensor,
        bias13: torch.Tensor | None = None,
        bias2: torch.Tensor | None = None,
    ) -> None:
        experts, hidden, intermediate = w2.shape
        if w13.shape != (experts, 2 * intermediate, hidden) or w13.dtype != w2.dtype:
            raise ValueError(
                f"w13 is {w13.dtype} {tuple(w13.shape)}, w2 {w2.dtype} "
                f"{tuple(w2.shape)}: expected [E, 2 * I, H] and [E, H, I] in one type"
            )
        self.w13 = PackedMatrices(w13, gated=True)
        self.w2 = PackedMatrices(w2, gated=False)
        self.bias13 = None if bias13 is None else self.w13.pack_bias(bias13)
        self.bias2 = None if bias2 is None else self.w2.pack_bias(bias2)

    @property
    def dtype(self) -> torch.dtype:
        return self.w2.dtype

    def args(self, activation: GatedActivation) -> ExpertsArgs:
        """The kernel's arguments, without tokens; valid as long as this."""
        experts, hidden, intermediate = self.w2.shape
        return ExpertsArgs(
            w13=self.w13.data.data_ptr(),
            w2=self.w2.data.data_ptr(),
            bias13=None if self.bias13 is None else self.bias13.data_ptr(),
            bias2=None if self.bias2 is None else self.bias2.data_ptr(),
            num_experts=experts,
            hidden=hidden,
            intermediate=intermediate,
            dtype=_UNITS[self.dtype][1],
            activation=activation.number,
            alpha=activation.alpha,
            limit=activation.limit,
        )


def serves(weight: torch.Tensor, act_fn: nn.Module) -> bool:
    """Whether there is a kernel for experts of this weight's type and activation."""
    fits = weight.device.type == "cpu" and weight.dtype in _UNITS
    return fits and activation_of(act_fn) is not None and _functions() is not None


def moe_experts(
    out: torch.Tensor,
    x: torch.Tensor,
    packed: PackedExperts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: GatedActivation = SILU,
) -> None:
    """Writes every token's weighted sum of its experts' outputs.

    out, x: [T, hidden] in the weights' type, rows contiguous. topk_ids: int64 [T, k],
    contiguous; topk_weights: [T, k].

    Sums are fp32 and taken over experts in ascending order, so that a token's bits
    depend on nothing else in the batch. Only the output is rounded, and with bfloat16
    on AVX-512 the activations between the two products. ValueError for shapes, types
    and experts that do not fit.
    """
    functions = cpu_functions.required(_functions(), "the kernel of experts")
    _check(out, x, packed, topk_ids, topk_weights)
    experts = packed.w2.shape[0]
    weights = topk_weights.to(torch.float32).contiguous()
    address = cpu_kernels.address_of
    args = packed.args(activation)
    args.out = address("out", out, packed.dtype)
    args.x = address("x", x, packed.dtype)
    args.ids = address("topk_ids", topk_ids, torch.int64)
    args.weights = address("topk_weights", weights, torch.float32)
    args.out_stride, args.x_stride = out.stride(0), x.stride(0)
    args.num_tokens, args.top_k = topk_ids.shape
    status = functions.vllm_cpu_experts(args)
    if status == _OUT_OF_MEMORY:
        raise MemoryError("out of memory for the experts' scratch space")
    if status:
        raise ValueError(f"experts 0 to {experts - 1}: {_STATUS[status]}")


def _check(
    out: torch.Tensor,
    x: torch.Tensor,
    packed: PackedExperts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    hidden = packed.w2.shape[1]
    tokens = topk_ids.shape[0]
    for name, rows in (("out", out), ("x", x)):
        if rows.shape != (tokens, hidden) or (hidden > 1 and rows.stride(1) != 1):
            raise ValueError(
                f"{name} has shape {tuple(rows.shape)} and strides {rows.stride()}: "
                f"expected {(tokens, hidden)} with contiguous rows"
            )
    if topk_weights.shape != topk_ids.shape or not topk_ids.is_contiguous():
        raise ValueError(
            f"topk_ids {tuple(topk_ids.shape)}, topk_weights "
            f"{tuple(topk_weights.shape)}: expected one contiguous shape [T, k]"
        )


@lru_cache(maxsize=1)
def _functions() -> SimpleNamespace | None:
    return cpu_functions.bound(
        "vllm_cpu_experts_abi",
        ctypes.sizeof(ExpertsArgs),
        {"vllm_cpu_experts": (ctypes.POINTER(ExpertsArgs),)},
    )
