"""What every body of the HTTP API shares: unknown fields, ids, valid Unicode."""

import uuid
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

logger = init_logger(__name__)


def random_uuid() -> str:
    return uuid.uuid4().hex


def _surrogate_in(value: Any, where: str) -> str | None:
    """Where a body holds text that is not Unicode, such as "messages.0.content"."""
    if isinstance(value, str):
        return where if any("\ud800" <= char <= "\udfff" for char in value) else None
    if isinstance(value, dict):
        parts: Any = ((f"{where}.{k}".lstrip("."), v) for k, v in value.items())
    elif isinstance(value, list):
        parts = ((f"{where}.{i}", v) for i, v in enumerate(value))
    else:
        return None
    return next((found for k, v in parts if (found := _surrogate_in(v, k))), None)


class OpenAIModel(BaseModel):
    """A body that keeps unknown fields out of the way and says so once."""

    model_config = ConfigDict(extra="allow")

    known_extras: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, body: Any) -> Any:
        if isinstance(body, dict) and (where := _surrogate_in(body, "")):
            raise VLLMValidationError(
                f"{where} holds half of a surrogate pair: expected valid Unicode",
                parameter=where,
            )
        return body

    @model_validator(mode="after")
    def _say_unknown(self) -> "OpenAIModel":
        unknown = sorted(set(self.model_extra or {}) - self.known_extras)
        if unknown:
            logger.warning_once(
                "%s: fields %s are unknown and ignored",
                type(self).__name__,
                ", ".join(unknown),
            )
        return self
