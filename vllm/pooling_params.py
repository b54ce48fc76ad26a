"""Parameters of pooling requests: names that callers may pass; no pooling runs here."""

from typing import Any

import msgspec


class PoolingParams(msgspec.Struct, omit_defaults=True, array_like=True):
    """What an embedding or scoring request asks for."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
