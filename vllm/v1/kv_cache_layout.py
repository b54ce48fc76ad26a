"""In which order the axes of a cache lie in memory, and which order an engine uses.

Knows axes, strides and sets of accepted orders. Refuses to know formats, specs and
where a wish comes from: the caller passes declarations and preferences in.

The logical axes are always L layers, B blocks, H head slots, N states, C bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

L, B, H, N, C = range(5)
_AXIS_NAMES = "LBHNC"


class KVCacheLayout(Enum):
    """A value is the logical axis at each physical position, outermost first."""

    LBHNC = (L, B, H, N, C)
    LBNHC = (L, B, N, H, C)
    LHBNC = (L, H, B, N, C)
    BLHNC = (B, L, H, N, C)
    BLNHC = (B, L, N, H, C)
    BHLNC = (B, H, L, N, C)
    # Names of the order within one layer, from before the L axis.
    NHD = LBNHC
    HND = LBHNC

    @property
    def layer_outermost(self) -> bool:
        """True if every layer is one contiguous region."""
        return self.value[0] == L

    @property
    def block_outermost(self) -> bool:
        """True if one block of all layers is one contiguous region."""
        return self.value[0] == B

    @property
    def block_compact(self) -> bool:
        """True if one block of one layer is one contiguous page."""
        return set(self.value[:2]) == {L, B}

    @property
    def head_major(self) -> bool:
        """True if the states of one head slot lie together: the tail is H, N, C."""
        return self.value[2:] == (H, N, C)

    @classmethod
    def from_name(cls, name: str) -> KVCacheLayout:
        """The layout of a name or alias, in any case. ValueError lists the names."""
        found = cls.__members__.get(name.upper())
        if found is None:
            raise ValueError(
                f"unknown KV cache layout {name!r}: expected one of "
                f"{', '.join(cls.__members__)} (VLLM_KV_CACHE_LAYOUT)"
            )
        return found


#: Most preferred first, where nobody declares anything.
DEFAULT_LAYOUTS: tuple[KVCacheLayout, ...] = (
    KVCacheLayout.LBNHC,
    KVCacheLayout.LBHNC,
    KVCacheLayout.BLNHC,
    KVCacheLayout.BLHNC,
    KVCacheLayout.BHLNC,
    KVCacheLayout.LHBNC,
)


def compute_layout_strides(
    layout: KVCacheLayout,
    shape: Sequence[int],
    *,
    page_size_padded: int | None = None,
    fixed: Mapping[int, int] | None = None,
) -> tuple[int, int, int, int, int]:
    """Byte strides of (L, B, H, N, C) in a cache of shape [L, B, H, N, C bytes].

    `page_size_padded` is the distance of neighbouring (layer, block) pages where it is
    more than H*N*C; `fixed` maps an axis to a stride that the plan dictates (blocks of
    a shared backing, for example). Strides of axes outside of a fixed one build on it.

    ValueError: shape is not 5-D, the padded page is too small, or the order spreads a
    padded page over the grid of layers and blocks.
    """
    if len(shape) != 5:
        raise ValueError(
            f"a cache has the axes L, B, H, N, C, not shape {tuple(shape)}"
        )
    fixed = fixed or {}
    strides = [0] * 5
    running = 1
    padded_here = page_size_padded is not None
    for position in range(4, -1, -1):
        axis = layout.value[position]
        if padded_here and axis in (L, B):
            running = _padded_page(layout, shape, position, running, page_size_padded)
            padded_here = False
        strides[axis] = fixed.get(axis, running)
        running = strides[axis] * shape[axis]
    return strides[L], strides[B], strides[H], strides[N], strides[C]


def _padded_page(
    layout: KVCacheLayout,
    shape: Sequence[int],
    position: int,
    running: int,
    padded: int | None,
) -> int:
    """The page distance, once every axis inside of `position` has been walked."""
    page = prod(shape[H:])
    outside = [axis for axis in layout.value[:position] if axis not in (L, B)]
    torn = [axis for axis in outside if shape[axis] != 1]
    if torn:
        names = ", ".join(f"{_AXIS_NAMES[axis]} of {shape[axis]}" for axis in torn)
        raise ValueError(
            f"layout {layout.name} puts {names} outside of blocks, so a page padded to "
            f"{padded} bytes is not one run of bytes: choose a block-compact layout"
        )
    if padded is None or padded < running:
        raise ValueError(
            f"page_size_padded {padded} is below the page of {page} bytes "
            f"(H, N, C = {tuple(shape[H:])})"
        )
    return padded


@dataclass(frozen=True, kw_only=True)
class LayoutDeclaration:
    """Orders that a backend or a format accepts, most preferred first; empty: any."""

    owner: str
    layouts: tuple[KVCacheLayout, ...] = ()


def resolve_kv_cache_layout(
    declarations: Sequence[LayoutDeclaration] = (),
    *,
    recorded: KVCacheLayout | None = None,
    env: str | None = None,
    connector: str | None = None,
    pages_differ: bool = False,
    needs_block_outermost: bool = False,
) -> KVCacheLayout:
    """The one order of an engine. A pure function: the caller records the answer.

    `env` is VLLM_KV_CACHE_LAYOUT, `connector` the preference of a KV connector.
    `pages_differ` (layers with unlike pages) keeps block-compact orders only,
    `needs_block_outermost` those with B first. An order that was recorded before wins;
    then `env`, which must be possible; then `connector`, if possible; then the order
    that most declarations prefer. ValueError lists the declarations that exclude it.
    """
    candidates = _candidates(declarations)
    if pages_differ:
        candidates = [c for c in candidates if c.block_compact]
        _check(
            candidates, declarations, "pages of different sizes need a block in one run"
        )
    if needs_block_outermost:
        candidates = [c for c in candidates if c.block_outermost]
        _check(candidates, declarations, "packed groups need blocks outermost")
    if recorded is not None:
        if recorded not in candidates:
            raise ValueError(
                f"KV cache layout {recorded.name} was resolved before, but is not "
                f"possible now: {_listed(declarations)}"
            )
        return recorded
    if env:
        wanted = KVCacheLayout.from_name(env)
        if wanted not in candidates:
            raise ValueError(
                f"VLLM_KV_CACHE_LAYOUT={env} is not possible here: expected one of "
                f"{', '.join(c.name for c in candidates)} ({_listed(declarations)})"
            )
        return wanted
    if connector:
        wanted = KVCacheLayout.from_name(connector)
        if wanted in candidates:
            return wanted
    return candidates[0]


def _candidates(declarations: Sequence[LayoutDeclaration]) -> list[KVCacheLayout]:
    """Orders accepted by all, the one that most put first in front."""
    lists = [d.layouts for d in declarations if d.layouts]
    if not lists:
        return list(DEFAULT_LAYOUTS)
    if len(set(lists)) == 1:
        return list(lists[0])
    shared = set(lists[0]).intersection(*lists[1:])
    votes = Counter(layouts[0] for layouts in lists)
    ranked = sorted(
        (c for c in KVCacheLayout if c in shared), key=lambda c: votes[c], reverse=True
    )
    _check(ranked, declarations, "the layers of a model share one layout")
    return ranked


def _check(
    candidates: Sequence[KVCacheLayout],
    declarations: Sequence[LayoutDeclaration],
    rule: str,
) -> None:
    if not candidates:
        raise ValueError(
            f"no KV cache layout is possible, {rule}: {_listed(declarations)}. Choose "
            "another attention backend or KV cache dtype."
        )


def _listed(declarations: Sequence[LayoutDeclaration]) -> str:
    return (
        "; ".join(
            f"{d.owner} takes {', '.join(c.name for c in d.layouts) or 'any'}"
            for d in declarations
        )
        or "nothing is declared"
    )
