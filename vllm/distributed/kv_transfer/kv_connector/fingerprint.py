"""What must be equal before two engines may exchange pages.

Equal sizes do not mean equal bytes: formats of one size differ in their number format,
arrangements of one format in the order of its fields. So every layer states its format
by name, beside its geometry.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class LayerFingerprint:
    """The bytes of one layer's block.

    `format_id` includes the arrangement ("nvfp4:cells"); H, N, C are head slots, states
    and bytes of a state; `axis_order` is the order of H, N, C within a page.
    """

    layer_name: str
    format_id: str
    head_slots: int
    states: int
    state_bytes: int
    axis_order: str
    block_size: int
    group_id: int


class FingerprintMismatch(ValueError):
    """Pages of one engine would be misread by another."""


@dataclass(frozen=True, kw_only=True)
class LayoutFingerprint:
    """The bytes of all layers, in the order in which a block's rows follow."""

    layers: tuple[LayerFingerprint, ...]

    @property
    def digest(self) -> str:
        """A short name of all of it."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return {"layers": [asdict(layer) for layer in self.layers]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LayoutFingerprint":
        """The reverse of `to_dict`. ValueError for anything else."""
        try:
            layers = tuple(LayerFingerprint(**layer) for layer in values["layers"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a layout fingerprint: {error}") from error
        return cls(layers=layers)

    def check_same(self, other: "LayoutFingerprint", whose: str) -> None:
        """Raises FingerprintMismatch naming the first layer and field that differ.

        `whose` says what the other fingerprint belongs to, for the message.
        """
        if len(self.layers) != len(other.layers):
            raise FingerprintMismatch(
                f"{whose} has pages of {len(other.layers)} layers, this engine of "
                f"{len(self.layers)}: their KV pages cannot be exchanged"
            )
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for name, value in asdict(mine).items():
                other_value = getattr(theirs, name)
                if value != other_value:
                    raise FingerprintMismatch(
                        f"{whose} has {name} {other_value} in layer "
                        f"{theirs.layer_name!r}, this engine {value}: their KV pages "
                        "cannot be exchanged"
                    )


def _geometry(spec: KVCacheSpec) -> tuple[int, int, int]:
    """H, N, C. A recurrent state is one state of one slot."""
    if hasattr(spec, "num_heads"):
        attention: Any = spec
        return (
            attention.num_heads,
            attention.num_states,
            attention.state_content_size_bytes,
        )
    return 1, 1, spec.unpadded_page_size_bytes


def _format_id(name: str, spec: KVCacheSpec, formats: Mapping[str, str]) -> str:
    """The recorded format; of a recurrent state, its shapes and dtypes."""
    if name in formats:
        return formats[name]
    shapes = getattr(spec, "shapes", None)
    if shapes is None:
        raise ValueError(
            f"layer {name!r} has no format id in KVCacheConfig.layer_formats: its "
            "bytes cannot be named, so they cannot leave the engine"
        )
    dtypes: Any = spec.dtypes  # type: ignore[attr-defined]
    parts = [
        f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return f"states:{'+'.join(parts)}"


def layout_fingerprint(kv_cache_config: KVCacheConfig) -> LayoutFingerprint:
    """The fingerprint of a worker's plan, in which formats and layout are recorded.

    ValueError when they are not: before the caches are initialized.
    """
    layout = kv_cache_config.kv_cache_layout
    if layout is None:
        raise ValueError(
            "KVCacheConfig.kv_cache_layout is not recorded: the axis order is known "
            "once the worker has initialized its KV cache"
        )
    axis_order = "".join(axis for axis in layout.upper() if axis in "HNC")
    layers = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            spec = group.layer_spec(name)
            head_slots, states, state_bytes = _geometry(spec)
            layers.append(
                LayerFingerprint(
                    layer_name=name,
                    format_id=_format_id(name, spec, kv_cache_config.layer_formats),
                    head_slots=head_slots,
                    states=states,
                    state_bytes=state_bytes,
                    axis_order=axis_order,
                    block_size=spec.block_size,
                    group_id=group_id,
                )
            )
    return LayoutFingerprint(layers=tuple(layers))
