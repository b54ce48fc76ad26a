"""A Hugging Face model over a cache in any format: K and V go through
`decode(encode(.))` before they are attended to, in plain torch; and how an engine's
run is compared with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from tests.e2e.teacher_forcing import ForcedRun, States, forced_run
from vllm import LLM
from vllm.v1.kv_formats import KVFormat, KVScales, by_name

# Vectors that differ by less than this, relative to their largest element, are equal.
SAME = 1e-4
_NAME = "through_kv_format"
_DRAWS = 16

KeyValue = tuple[torch.Tensor, torch.Tensor]


def layer_formats(fmt: KVFormat, num_layers: int) -> list[KVFormat]:
    """The format of each layer: TurboQuant leaves the first two and last two dense."""
    ends = {0, 1, num_layers - 2, num_layers - 1} if fmt.mode.is_turboquant else set()
    return [by_name("auto") if i in ends else fmt for i in range(num_layers)]


@dataclass(kw_only=True)
class FormatRun:
    """One forward of a Hugging Face model over caches, from position `start` on.

    Layer i stores `formats[i]`, with `scales[i]` where given. Without `stored`, K and V
    are the model's own, changed by `noise` relative to each vector's largest element
    before they are encoded. With it, every vector that the engine stored is compared
    with the model's own, and then attended to: so one code that fell to the other side
    of a tie moves neither the rest of the run nor the verdict over it. `flips` counts
    such vectors of `num_vectors`; `not_ties` those among them whose codes no change of
    the vector by SAME would have changed.
    """

    model: torch.nn.Module
    formats: Sequence[KVFormat]
    scales: Sequence[KVScales] | None = None
    start: int = 0
    stored: States | None = None
    noise: float = 0.0
    flips: int = 0
    not_ties: int = 0
    num_vectors: int = 0

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits [T - start, vocab] of the tokens from `start` on."""
        positions = torch.arange(self.start, len(token_ids))
        with _attention(self.model, self._attend):
            output = self.model(
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
        layer = module.layer_idx
        own = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if self.noise:
            own = _moved(own[0], layer, self.noise), _moved(own[1], layer, self.noise)
        states = self._roundtrip(layer, own)
        if self.stored is not None:
            for side in range(2):
                written = self.stored[layer][side][self.start :]
                self._compare(layer, own, states, side, written)
            states = self.stored[layer]
        keys, values = (x.transpose(0, 1) for x in states)
        groups = query.shape[1] // keys.shape[0]
        keys, values = (x.repeat_interleave(groups, 0) for x in (keys, values))
        scores = query[0] @ keys.transpose(1, 2) * scaling
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(self.start)
        if window := _window(module):
            seen = seen.triu(self.start - window + 1)
        scores = scores.masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ values).transpose(0, 1)[None], None

    def _roundtrip(self, layer: int, states: KeyValue) -> KeyValue:
        scales = self.scales[layer] if self.scales else KVScales()
        return self.formats[layer].roundtrip(*states, scales)

    def _compare(
        self,
        layer: int,
        own: KeyValue,
        states: KeyValue,
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
        moved = torch.zeros_like(flipped[tokens])
        for draw in range(_DRAWS):
            near = (
                _moved(own[0][tokens], draw, SAME),
                _moved(own[1][tokens], draw, SAME),
            )
            codes = self._roundtrip(layer, near)[side]
            moved |= _differ(codes, states[side][tokens])
        self.not_ties += int((flipped[tokens] & ~moved).sum())


def _window(attention: Any) -> int | None:
    """How many tokens a layer of the model sees, its own among them; None: all."""
    return getattr(attention, "sliding_window", None)


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


# --- the engine against it ------------------------------------------------------------

MEAN_KL = 1e-5
LARGEST_DIFFERENCE = 1e-2
_MOST_TIES = 0.1 / 64  # of elements
_ROWS = 64  # of logits at a time: 64 MiB with 262,144 words


def kl(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """KL [T] of our predictions from theirs, in nats."""
    rows = [
        (q.exp() * (q - p.log_softmax(-1))).sum(-1).clamp_min(0)
        for p, q in (
            (p, q.log_softmax(-1))
            for p, q in zip(ours.split(_ROWS), theirs.split(_ROWS), strict=True)
        )
    ]
    return torch.cat(rows)


def check_logits(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Asserts that logits [T, vocab] are those of the reference; prints how near."""
    mean = kl(ours, theirs).mean().item()
    largest = max(
        (p - q).abs().max().item()
        for p, q in zip(ours.split(_ROWS), theirs.split(_ROWS), strict=True)
    )
    print(f"  {what:24} mean KL {mean:.1e}, largest logit difference {largest:.1e}")
    assert mean < MEAN_KL, what
    assert largest < LARGEST_DIFFERENCE, what


def check_engine(
    llm: LLM,
    model: torch.nn.Module,
    formats: Sequence[KVFormat],
    token_ids: list[int],
    num_decoded: int,
    scales: Sequence[KVScales] | None = None,
) -> ForcedRun:
    """Asserts that the engine's logits are the reference's in prefill, in `num_decoded`
    steps of decoding, and in both after a prefix-cache hit. Returns the first run."""
    prompt_len = len(token_ids) - num_decoded
    cold = forced_run(llm, token_ids, prompt_len, whole_prompt=True)
    assert cold.num_cached_tokens == 0
    run = FormatRun(model=model, formats=formats, scales=scales, stored=cold.states)
    logits = run.logits(token_ids)
    print(f"{run.flips} of {run.num_vectors} vectors at a tie")
    assert run.not_ties == 0
    # float16 has the most ties: its steps are hardly larger than SAME. The longer a
    # vector, the likelier one of its elements lies at a tie.
    elements = cold.states[0][0].shape[-1]
    assert run.flips <= _MOST_TIES * elements * run.num_vectors
    check_logits("prefill", cold.logits[:-num_decoded], logits[:-num_decoded])
    check_logits("decode", cold.logits[-num_decoded:], logits[-num_decoded:])

    hit = forced_run(llm, token_ids, prompt_len, whole_prompt=False)
    start = hit.num_cached_tokens
    block_size = llm.llm_engine.cache_config.block_size
    assert start == (prompt_len - 1) // block_size * block_size
    layers = zip(model.model.layers, hit.states, cold.states, strict=True)
    for layer, again, before in layers:
        window = _window(layer.self_attn)
        seen = slice(max(0, start - window + 1) if window else 0, start)
        for side in range(2):
            assert torch.equal(again[side][seen], before[side][seen])
    run = FormatRun(
        model=model, formats=formats, scales=scales, stored=hit.states, start=start
    )
    logits = run.logits(token_ids)[hit.first - start :]
    assert run.not_ties == 0
    check_logits("after a prefix-cache hit", hit.logits, logits)
    return cold
