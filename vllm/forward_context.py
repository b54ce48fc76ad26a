"""What the attention layers of a running forward pass may look up by layer name."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.config.vllm import VllmConfig


@dataclass
class ForwardContext:
    """Metadata of one forward pass.

    `attn_metadata` and `slot_mapping` (int64 [T], -1 for tokens without a slot) are
    keyed by layer name; both are empty in a profile run, where attention computes
    nothing.
    """

    no_compile_layers: dict[str, Any]
    attn_metadata: dict[str, Any] | None
    slot_mapping: dict[str, torch.Tensor] = field(default_factory=dict)
    virtual_engine: int = 0


_current: ContextVar[ForwardContext | None] = ContextVar(
    "forward_context", default=None
)


@contextmanager
def set_forward_context(
    attn_metadata: dict[str, Any] | None,
    vllm_config: VllmConfig,
    *,
    slot_mapping: dict[str, torch.Tensor] | None = None,
    **_: Any,
) -> Iterator[ForwardContext]:
    """Makes a context current while the model runs."""
    context = ForwardContext(
        no_compile_layers=vllm_config.compilation_config.static_forward_context,
        attn_metadata=attn_metadata,
        slot_mapping=slot_mapping or {},
    )
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def is_forward_context_available() -> bool:
    return _current.get() is not None


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass; RuntimeError outside of one."""
    context = _current.get()
    if context is None:
        raise RuntimeError(
            "no forward context: run the model inside `with set_forward_context(...)`"
        )
    return context
