"""The structs of `csrc/cpu/step.h`, field by field, and the function that takes them.

Knows the C ABI. Refuses to know layers and models.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch

from vllm.v1.attention.ops import cpu_functions, cpu_kernels

# Kinds of operations, in the order of `StepKind`.
EMBED, NORM, LINEAR, ROTATE, STORE, ATTEND, GATE, ADD, SOFT_CAP, PICK = range(10)
ROUTE, EXPERTS, HEAD_LINEAR, COPY, HADAMARD, WIDEN = range(10, 16)
SCALE, SPREAD, SUM_HEADS, LARGEST, LIKELIEST = range(16, 21)
KINDS = (
    *("embed", "norm", "linear", "rotate", "store", "attend", "gate", "add"),
    *("soft cap", "pick", "route", "experts", "head linear", "copy", "hadamard"),
    *("widen", "scale", "spread", "sum heads", "largest", "likeliest"),
)
PICK_WANTED, PICKED = 0, 1
NORM_ROUNDED, NORM_WHOLE = 0, 1
ROTATE_HALVES, ROTATE_PAIRS = 0, 1
SIGNS_FIRST, SIGNS_LAST = 0, 1
GATE_SILU, GATE_GELU, GATE_GELU_TANH = 0, 1, 2
# For which tokens an operation is: `StepTokens`.
ALL_TOKENS, WANTED, WANTED_LOGITS, WANTED_TOKENS = range(4)

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_STATUS = {
    7: "token {} of the step is outside the vocabulary",
    8: "token {} of the step lies beyond the table of its positions",
}


class StepRows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class StepOp(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("out_size", ctypes.c_int32),
        ("limit", ctypes.c_int64),
        ("out", StepRows),
        ("x", StepRows),
        ("y", StepRows),
        ("sum", StepRows),
        ("weight", ctypes.c_void_p),
        ("weight_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("args", ctypes.c_void_p),
    )


class RouteArgs(ctypes.Structure):
    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_experts", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("sigmoid", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("topk_groups", ctypes.c_int32),
        ("scores_per_group", ctypes.c_int32),
        ("renormalize", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class CopyArgs(ctypes.Structure):
    _fields_ = (("out", cpu_kernels.Rows), ("x", cpu_kernels.Rows))


class StepBatch(ctypes.Structure):
    _fields_ = (
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("block_table_width", ctypes.c_int32),
        ("num_requests", ctypes.c_int32),
    )


class StepInputs(ctypes.Structure):
    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("batches", ctypes.POINTER(StepBatch)),
        ("num_tokens", ctypes.c_int32),
        ("num_wanted", ctypes.c_int32),
        ("num_batches", ctypes.c_int32),
        ("only_tokens", ctypes.c_int32),
    )


StepFunction = Callable[..., int]


@lru_cache(maxsize=1)
def step_function() -> StepFunction | None:
    """(ops, their number, inputs) -> status; None where the library is missing or was
    built from other sources."""
    structs = (StepOp, RouteArgs, StepBatch, StepInputs)
    sizes = [*(ctypes.sizeof(s) for s in structs), len(KINDS)]
    pointers = ctypes.POINTER(StepOp), ctypes.POINTER(StepInputs)
    functions = cpu_functions.bound(
        "vllm_cpu_step_abi",
        sum(size << 12 * i for i, size in enumerate(sizes)),
        {"vllm_cpu_step": (pointers[0], ctypes.c_int32, pointers[1])},
    )
    return None if functions is None else functions.vllm_cpu_step


def raise_for(result: int) -> None:
    """ValueError for what a step was called with; MemoryError for scratch."""
    status, where = result & 0xFF, result >> 8
    if status in _STATUS:
        raise ValueError(_STATUS[status].format(where))
    cpu_kernels.raise_for(result)
