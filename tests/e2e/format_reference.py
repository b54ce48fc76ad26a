"""Hugging Face's SmolLM2 over a cache in any format: K and V go through
`decode(encode(.))` before they are attended to, in plain torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from tests.e2e.teacher_forcing import States
from tests.smollm2 import hf_smollm2
from vllm.v1.kv_formats import KVFormat, by_name

# Vectors that differ by less than this, relative to their largest element, are equal.
SAME = 1e-4
_NAME = "through_kv_format"
_DRAWS = 16


@dataclass(kw_only=True)
class FormatRun:
    """One forward of the reference over `fmt`, from position `start` on.

    Without `stored`, K and V are the reference's own, changed by `noise` relative to
    each vector's largest element before they are encoded. With it, every vector that
    the engine stored is compared with the reference's own, and then attended to: so one
    code that fell to the other side of a tie moves neither the rest of the run nor the
    verdict over it. `flips` counts such vectors of `num_vectors`; `not_ties` those
    among them whose codes no change of the vector by SAME would have changed.
    """

    fmt: KVFormat
    start: int = 0
    stored: States | None = None
    noise: float = 0.0
    flips: int = 0
    not_ties: int = 0
    num_vectors: int = 0
    first_flip: int | None = None

    def format_of(self, layer: int, num_layers: int) -> KVFormat:
        """TurboQuant leaves the first two and the last two layers dense."""
        at_an_end = layer < 2 or layer >= num_layers - 2
        dense = self.fmt.mode.is_turboquant and at_an_end
        return by_name("auto") if dense else self.fmt

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits [T - start, vocab] of the tokens from `start` on."""
        model = hf_smollm2()
        positions = torch.arange(self.start, len(token_ids))
        with _attention(model, self._attend):
            output = model(
                torch.tensor([token_ids[self.start :]]),
                position_ids=positions[None],
                use_cache=False,
            )
        return output.logits[0]

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, Hq, n, D], key and value [1, Hkv, n, D] -> [1, n, Hq, D]."""
        layer, num_layers = module.layer_idx, module.config.num_hidden_layers
        fmt = self.format_of(layer, num_layers)
        own = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if self.noise:
            own = _moved(own[0], layer, self.noise), _moved(own[1], layer, self.noise)
        states = fmt.roundtrip(*own)
        if self.stored is not None:
            for side in range(2):
                written = self.stored[layer][side][self.start :]
                self._compare(fmt, own, states, side, written)
            states = self.stored[layer]
        keys, values = (x.transpose(0, 1) for x in states)
        groups = query.shape[1] // keys.shape[0]
        keys, values = (x.repeat_interleave(groups, 0) for x in (keys, values))
        scores = query[0] @ keys.transpose(1, 2) * scaling
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(self.start)
        scores = scores.masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ values).transpose(0, 1)[None], None

    def _compare(
        self,
        fmt: KVFormat,
        own: tuple[torch.Tensor, torch.Tensor],
        states: tuple[torch.Tensor, torch.Tensor],
        side: int,
        written: torch.Tensor,
    ) -> None:
        """Counts stored vectors [T, heads, size] that are not the reference's."""
        flipped = _differ(written, states[side])
        self.num_vectors += flipped.numel()
        if not flipped.any():
            return
        self.flips += int(flipped.sum())
        tokens = flipped.any(1)
        first = self.start + int(tokens.nonzero()[0])
        self.first_flip = min(first, self.first_flip or first)
        moved = torch.zeros_like(flipped[tokens])
        for draw in range(_DRAWS):
            near = [_moved(x[tokens], draw, SAME) for x in own]
            moved |= _differ(fmt.roundtrip(*near)[side], states[side][tokens])
        self.not_ties += int((flipped[tokens] & ~moved).sum())


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Bool [T, heads]: which vectors differ by more than SAME of their largest."""
    return (a - b).abs().amax(-1) > SAME * b.abs().amax(-1)


def _moved(x: torch.Tensor, seed: int, by: float) -> torch.Tensor:
    """Vectors at most `by` from `x`, relative to their largest element."""
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return x + by * noise * x.abs().amax(-1, keepdim=True)


@contextmanager
def _attention(model: Any, attend: Any) -> Iterator[None]:
    """The model attends through `attend` inside."""
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attend)
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
