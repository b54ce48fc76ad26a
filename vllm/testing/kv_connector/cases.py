"""Which pages a connector is checked with: kinds of layers x formats x axis orders.

Knows specs and plans of models that do not exist, and the configuration of an engine
for them. Knows no connector.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_formats import KVFormat, all_formats

BLOCK = 16
# Not a multiple of the block: a window's tail reaches into one block more.
WINDOW = 24
_LATENT = 576
_HEADS = 2
_HEAD = 64

LAYOUTS = (
    KVCacheLayout.LBNHC,
    KVCacheLayout.LBHNC,
    KVCacheLayout.LHBNC,
    KVCacheLayout.BLNHC,
    KVCacheLayout.BLHNC,
)


def formats() -> list[KVFormat]:
    """Every format in every arrangement, once for equal bytes."""
    found: dict[str, KVFormat] = {}
    for fmt in all_formats():
        resolved = fmt.resolve(torch.bfloat16)
        for arrangement in resolved.arrangements:
            arranged = resolved.arranged(arrangement)
            found.setdefault(arranged.format_id, arranged)
    return list(found.values())


def _attention(fmt: KVFormat, kind: type = FullAttentionSpec, **more: Any) -> Any:
    sizes = {"num_kv_heads": _HEADS, "head_size": _HEAD, "block_size": BLOCK}
    spec = kind(
        **(sizes | more),
        dtype=fmt.storage_dtype(torch.bfloat16),
        kv_quant_mode=fmt.mode,
    )
    return spec.packed(fmt)


def _full(fmt: KVFormat) -> dict[str, KVCacheSpec]:
    return {f"model.{i}.attn": _attention(fmt) for i in range(3)}


def _window(fmt: KVFormat) -> dict[str, KVCacheSpec]:
    windowed = _attention(fmt, SlidingWindowSpec, sliding_window=WINDOW)
    layers = [windowed, _attention(fmt)] * 2
    return {f"model.{i}.attn": spec for i, spec in enumerate(layers)}


def _latent(fmt: KVFormat) -> dict[str, KVCacheSpec]:
    spec = _attention(fmt, MLAAttentionSpec, num_kv_heads=1, head_size=_LATENT)
    return {f"model.{i}.latent": spec for i in range(3)}


def _states(fmt: KVFormat) -> dict[str, KVCacheSpec]:
    attention = _attention(fmt)
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((3, 8), (2, 4, 4)),
        dtypes=(torch.bfloat16, torch.float32),
        # Layers of several groups share their pages, which must be equally large.
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    return {
        "model.0.state": state,
        "model.1.attn": attention,
        "model.2.state": state,
        "model.3.attn": attention,
    }


def _uneven(fmt: KVFormat) -> dict[str, KVCacheSpec]:
    """Layers of one group whose pages differ in size."""
    wide = _attention(fmt, num_kv_heads=2 * _HEADS)
    return {f"model.{i}.attn": s for i, s in enumerate([_attention(fmt), wide] * 2)}


KINDS = {
    "full": _full,
    "window": _window,
    "latent": _latent,
    "states": _states,
    "uneven": _uneven,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model that does not exist."""

    kind: str
    fmt: KVFormat
    layout: KVCacheLayout

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.fmt.format_id.replace(':', '-')}-{self.layout.name}"

    def specs(self) -> dict[str, KVCacheSpec]:
        """Packed specs by layer name. ValueError where the format does not fit."""
        return KINDS[self.kind](self.fmt)

    def layer_formats(self) -> dict[str, str]:
        return {
            name: self.fmt.format_id
            for name in self.specs()
            if not name.endswith(".state")
        }


def cases() -> Iterator[Case]:
    """Every combination that an engine would start with."""
    for kind in KINDS:
        for fmt in formats():
            for layout in LAYOUTS:
                case = Case(kind=kind, fmt=fmt, layout=layout)
                if _is_possible(case):
                    yield case


def _is_possible(case: Case) -> bool:
    try:
        specs = case.specs()
    except ValueError:
        return False  # head sizes that the format does not hold
    if case.kind != "latent" and not case.fmt.extent().allows(case.layout.name):
        return False
    # Heads outside of blocks leave no place for padding, nor for a shared row.
    is_plain = case.kind in ("full", "window", "latent")
    return is_plain or case.layout.block_compact or not specs


def first_case(kind: str) -> Case:
    """Some case of a kind."""
    return next(case for case in cases() if case.kind == kind)


def few_cases() -> list[Case]:
    """Every format once, with kinds and layouts in turn: about thirty."""
    everything, chosen = list(cases()), list[Case]()
    seen: Counter[str] = Counter()
    for fmt in formats():
        fitting = [case for case in everything if case.fmt == fmt]
        # What came up least often so far.
        case = min(
            fitting,
            key=lambda case: (
                seen[f"{case.kind} {case.layout.name}"],
                seen[case.kind] + seen[case.layout.name],
            ),
        )
        seen.update([case.kind, case.layout.name, f"{case.kind} {case.layout.name}"])
        chosen.append(case)
    return chosen


def pairwise_cases() -> list[Case]:
    """A choice in which every possible pair of kind and format, of kind and layout, and
    of format and layout comes up."""
    everything = list(cases())
    wanted = {pair for case in everything for pair in _pairs(case)}
    chosen: list[Case] = []
    while wanted:
        best = max(everything, key=lambda case: len(wanted & _pairs(case)))
        wanted -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(case: Case) -> set[tuple[str, str]]:
    fmt, layout = case.fmt.format_id, case.layout.name
    return {(case.kind, fmt), (case.kind, layout), (fmt, layout)}


# --- engines ------------------------------------------------------------------------

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


def engine_config(
    folder: Path, transfer: dict[str, Any], **settings: Any
) -> VllmConfig:
    """The configuration of a fake engine. Its model is a config without weights."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(_MODEL))
    defaults: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 1 << 24,
        "num_gpu_blocks_override": 96,
        "mamba_cache_mode": "align",
    }
    args = EngineArgs(
        model=str(model), kv_transfer_config=transfer, **(defaults | settings)
    )
    return args.create_engine_config()


def in_rows(plan: KVCacheConfig) -> KVCacheConfig:
    """The plan with one block of all layers in one run of bytes.

    A block id belongs to one group, so that groups lie over the same bytes.
    """
    row_bytes, by_offset = 0, dict[int, list[str]]()
    for group in plan.kv_cache_groups:
        offset = 0
        for name in group.layer_names:
            by_offset.setdefault(offset, []).append(name)
            offset += group.layer_spec(name).page_size_bytes
        row_bytes = max(row_bytes, offset)
    tensors = [
        KVCacheTensor(
            size=row_bytes * plan.num_blocks,
            shared_by=names,
            offset=offset,
            block_stride=row_bytes,
        )
        for offset, names in by_offset.items()
    ]
    return replace(plan, kv_cache_tensors=tensors)
