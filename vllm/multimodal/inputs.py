"""Plain data that names multimodal inputs in requests and block hashes."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PlaceholderRange:
    """Prompt positions [offset, offset + length) that stand for an item."""

    offset: int
    length: int
    is_embed: Any = None


class MultiModalKwargsItem(UserDict):
    """Processed fields of one item, by name."""


@dataclass
class MultiModalFeatureSpec:
    """One item of a prompt: what it is, what identifies it, and where it lies."""

    data: MultiModalKwargsItem | None
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None
