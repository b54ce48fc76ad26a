"""The list of formats. Knows every name and id; the only lookup by name there is."""

import torch

from vllm.v1.kv_formats import dense, ds_mla, fp8, nvfp4, per_token_head, turboquant
from vllm.v1.kv_formats.base import DEFAULT_ARRANGEMENT, KVFormat
from vllm.v1.kv_formats.layout import StateLayout
from vllm.v1.kv_formats.mode import CACHE_DTYPES, KVQuantMode, unknown_name_message
from vllm.v1.kv_formats.paging import as_bytes

# Accepted by --kv-cache-dtype, in the order of the help text.
_ACCEPTED: dict[str, KVFormat] = {
    fmt.name: fmt
    for fmt in (
        *dense.FORMATS,
        *fp8.FORMATS,
        *per_token_head.FORMATS,
        *nvfp4.FORMATS,
        *ds_mla.FORMATS,
        *turboquant.FORMATS,
    )
}
# Chosen by a model's layer, never by a user.
_BY_MODEL: dict[str, KVFormat] = {fmt.name: fmt for fmt in ds_mla.MODEL_FORMATS}


def all_formats() -> tuple[KVFormat, ...]:
    """Every accepted format in its default arrangement, plugins included."""
    return tuple(_ACCEPTED.values())


def model_formats() -> tuple[KVFormat, ...]:
    """Formats that only a model's layer asks for, by name."""
    return tuple(_BY_MODEL.values())


def by_name(name: str, arrangement: str = DEFAULT_ARRANGEMENT) -> KVFormat:
    """The format of a cache-dtype string.

    Raises ValueError listing the accepted names, or the arrangements of that format.
    """
    fmt = _ACCEPTED.get(name) or _BY_MODEL.get(name)
    if fmt is None:
        raise ValueError(unknown_name_message(name, _ACCEPTED))
    return fmt if arrangement == fmt.arrangement else fmt.arranged(arrangement)


def by_id(format_id: str) -> KVFormat:
    """The format of an id such as "nvfp4:linear"."""
    name, _, arrangement = format_id.partition(":")
    return by_name(name, arrangement or DEFAULT_ARRANGEMENT)


def by_mode(mode: KVQuantMode, dtype: torch.dtype | None = None) -> KVFormat:
    """The format that a mode stands for, for hooks that see a spec only.

    `dtype` is the storage dtype of the spec: it names the dense format of mode NONE
    ("auto" without it). Formats published by name are never returned.
    """
    if mode is KVQuantMode.NONE:
        auto = by_name("auto")
        return auto if dtype is None else auto.resolve(dtype)
    for fmt in _ACCEPTED.values():
        if fmt.mode is mode and not fmt.opaque:
            return fmt
    raise ValueError(f"no KV cache format has mode {mode!r}: register one first")


def register_kv_format(fmt: KVFormat) -> None:
    """Adds an out-of-tree format: its name becomes an accepted cache dtype.

    Raises ValueError when another format has the name. A mode that an earlier format
    has stays with that one in `by_mode`: set `opaque` to say so.
    """
    known = _ACCEPTED.get(fmt.name) or _BY_MODEL.get(fmt.name)
    if known is not None and known != fmt:
        raise ValueError(
            f"KV cache format {fmt.name!r} is already registered: choose another name"
        )
    _ACCEPTED[fmt.name] = fmt
    CACHE_DTYPES[fmt.name] = fmt.mode


def rearrange(
    source: KVFormat,
    source_pages: torch.Tensor,
    target: KVFormat,
    target_pages: torch.Tensor,
    head_size: int,
    head_size_v: int,
    model_dtype: torch.dtype,
) -> None:
    """Copies pages [B, H, N, C] into pages of another arrangement, field by field.

    Both tensors are of equal shape in bytes; padding becomes 0. Raises ValueError
    unless the formats differ in nothing but arrangement.
    """
    if source.arranged(DEFAULT_ARRANGEMENT) != target.arranged(DEFAULT_ARRANGEMENT):
        raise ValueError(
            f"cannot rearrange {source.format_id} into {target.format_id}: the formats "
            "differ; convert through decode and encode"
        )
    old = source.layout(head_size, head_size_v, model_dtype)
    new = target.layout(head_size, head_size_v, model_dtype)
    source_pages, target_pages = as_bytes(source_pages), as_bytes(target_pages)
    for side, plane in new.planes():
        names = [f.name for f in new.rows(side, plane)]
        records = torch.cat([_bytes_of(source_pages, old, name) for name in names], -1)
        padding = new.plane_widths(side)[plane] - records.shape[-1]
        records = torch.nn.functional.pad(records, (0, padding))
        for start, part in new.parts(target_pages, side, plane):
            width = part.shape[-2] * part.shape[-1]
            taken = records[..., start : start + width].unflatten(2, part.shape[2:5])
            part.copy_(taken.unflatten(-1, part.shape[-2:]))


def _bytes_of(pages: torch.Tensor, layout: StateLayout, name: str) -> torch.Tensor:
    """A field's bytes of every state: uint8 [B, heads, N, nbytes]."""
    f = layout.field(name)
    start = layout.record_offset(name)
    parts = (part for _, part in layout.parts(pages, f.side, f.plane))
    slices = [part.flatten(5).flatten(2, 4) for part in parts]
    return torch.cat(slices, -1)[..., start : start + f.nbytes]
