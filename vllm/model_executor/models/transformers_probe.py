"""Asks a transformers model what its attention layers do, by running it once.

Knows transformers' attention and mask interfaces. Heads, sizes, scale, caps and sinks
are what the model passes; windows and chunks are what its mask functions answer. So
nothing is guessed from the names of config keys.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
)
from transformers.modeling_utils import AttentionInterface

IMPLEMENTATION = "vllm"  # the name under which transformers finds `attend`
LAYER = "_paged_attention"  # a module's own `Attention`, kept out of its state dict

_FAR = 1 << 22  # a position beyond every window
# Arguments that change attention in ways that pages do not know.
_BIASES = ("position_bias", "alibi", "head_mask", "shared_kv")


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """How one module calls attention. `window` and `chunk` are tokens, or None."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    window: int | None
    chunk: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None

    @property
    def facts(self) -> tuple[Any, ...]:
        """All but the module and its weights."""
        values = vars(self).items()
        return tuple(v for name, v in values if name not in ("module", "sinks"))


@dataclass
class _Probe:
    """`segments`: lengths of the sequences that lie flattened in the batch."""

    segments: list[int]
    calls: list[AttentionCall] = field(default_factory=list)


@dataclass(frozen=True)
class _Reach:
    """What a mask lets a token see: a window, a chunk, or everything before it."""

    window: int | None = None
    chunk: int | None = None


_PROBE: ContextVar[_Probe | None] = ContextVar("transformers_probe", default=None)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, Hq, T, D], key and value likewise ->
    [1, T, Hq, Dv], through the module's own `Attention` and its pages."""
    probe = _PROBE.get()
    if probe is not None:
        probe.calls.append(_call(module, query, key, value, attention_mask, kwargs))
        return _within_segments(probe.segments, query, key, value), None
    rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    output = module.__dict__[LAYER](*rows)
    return output.view(1, query.shape[2], query.shape[1], -1), None


AttentionInterface.register(IMPLEMENTATION, attend)


def attention_calls(
    run: Callable[..., Any], config: Any, device: torch.device
) -> list[AttentionCall]:
    """The calls of one forward pass, in order. `run(ids, positions)` takes [1, T].

    On the meta device it also gets an `attention_mask` of ones, or transformers would
    look for packed sequences in the values of the positions.

    Raises ValueError for attention that pages cannot serve.
    """
    probe = _Probe([3])
    ids, positions = _batch([[0, 1, 2]], device)
    extra = {"attention_mask": torch.ones_like(ids)} if device.type == "meta" else {}
    with _probing(probe), _masks_that_tell(config), torch.no_grad():
        run(ids, positions, **extra)
    return probe.calls


def depends_on_place(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], device: Any
) -> bool:
    """Whether outputs change when the sequences of a flattened batch change places:
    then something but attention mixes tokens, or positions are counted, not read."""
    with torch.no_grad():
        with _probing(_Probe([3, 2])):
            first = run(*_batch([[4, 5, 6], [0, 1]], device))[0]
        with _probing(_Probe([2, 3])):
            second = run(*_batch([[0, 1], [4, 5, 6]], device))[0]
    moved = torch.cat([second[2:], second[:2]])
    scale = first.float().abs().max().clamp(min=1e-6)
    return bool((first - moved).float().abs().max() > 0.05 * scale)


@contextmanager
def _probing(probe: _Probe) -> Iterator[None]:
    token = _PROBE.set(probe)
    try:
        yield
    finally:
        _PROBE.reset(token)


@contextmanager
def _masks_that_tell(config: Any) -> Iterator[None]:
    """Masks are built by a function of ours, which marks them with what they allow."""

    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any],
        device: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        made = torch.ones(batch_size, 1, q_length, kv_length, device=device).bool()
        try:
            made.reach = reach_of(mask_function, config)
        except ValueError as error:  # matters only if a layer uses this mask
            made.reach = error
        return made

    AttentionMaskInterface.register(IMPLEMENTATION, mask)
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[IMPLEMENTATION]


def reach_of(mask_function: Callable[..., Any], config: Any) -> _Reach:
    """Window or chunk of a mask function (batch, head, query, key) -> visible."""

    def sees(query: int, key: int) -> bool:
        at = torch.tensor([0, 0, query, key], device="cpu")
        return bool(mask_function(*at.unbind()))

    if sees(0, 1):
        raise ValueError("its tokens attend to later ones")
    if sees(_FAR, 0):
        return _Reach()
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and sees(chunk - 1, 0) and not sees(chunk, chunk - 1):
        return _Reach(chunk=chunk)
    near, far = 0, _FAR  # sees(_FAR, _FAR - near), but not _FAR - far
    while far - near > 1:
        middle = (near + far) // 2
        near, far = (middle, far) if sees(_FAR, _FAR - middle) else (near, middle)
    if not sees(_FAR + 1, _FAR + 1 - near) or sees(_FAR + 1, _FAR + 1 - far):
        raise ValueError("its attention mask is neither causal, windowed nor chunked")
    return _Reach(window=far)


def _call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> AttentionCall:
    biases = [name for name in _BIASES if kwargs.get(name) is not None]
    if biases:
        raise ValueError(f"its attention takes {', '.join(biases)}")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise ValueError("its attention is not causal (cross or encoder attention)")
    if query.shape[2] != key.shape[2]:
        raise ValueError("its queries and keys differ in number (cross attention)")
    reach = _Reach(window=kwargs.get("sliding_window"))
    if attention_mask is not None:
        reach = getattr(attention_mask, "reach", None)
        if reach is None:
            raise ValueError("it builds attention masks of its own")
        if isinstance(reach, ValueError):
            raise reach
    scale = kwargs.get("scaling")
    return AttentionCall(
        module=module,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=query.shape[-1],
        head_size_v=value.shape[-1],
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        window=reach.window,
        chunk=reach.chunk,
        soft_cap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )


def _batch(
    sequences: list[list[int]], device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flattened ids and positions [1, T]; ids are what the lists hold, as they are
    small and every vocabulary has them."""
    ids = torch.tensor([list(chain(*sequences))], device=device)
    positions = [torch.arange(len(sequence)) for sequence in sequences]
    return ids, torch.cat(positions)[None].to(device)


def _within_segments(
    segments: list[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Plain causal attention of each segment alone: [1, T, Hq, Dv]."""
    outputs = [
        nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, enable_gqa=True
        )
        for parts in zip(
            *(x.split(segments, dim=2) for x in (query, key, value)), strict=True
        )
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()
