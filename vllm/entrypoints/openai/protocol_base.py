"""What every body of the HTTP API shares: unknown fields, ids, valid Unicode."""

import uuid
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.utils.text_utils import is_unicode, short_repr, shorten

logger = init_logger(__name__)


def random_uuid() -> str:
    return uuid.uuid4().hex


_NO_UNICODE = "half of a surrogate pair: expected valid Unicode"
_TOO_LARGE = "a whole number of more than 64 bits"
_MOST_LEVELS = 100
_TOO_DEEP = f"lists and objects nested more than {_MOST_LEVELS} levels deep"


def _fault_in(value: Any, where: str, level: int = 0) -> tuple[str, str] | None:
    """Where a body holds what no message between processes can, and what it is, such as
    ("messages.0.content", "half of a surrogate pair")."""
    if isinstance(value, str):
        return None if is_unicode(value) else (where, _NO_UNICODE)
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else (where, _TOO_LARGE)
    if isinstance(value, dict):
        parts: Any = ((f"{where}.{k}".lstrip("."), v) for k, v in value.items())
    elif isinstance(value, list):
        # Very many may be token ids, or texts without a fault.
        kinds = set(map(type, value))
        if kinds == {int} and min(value) >= -(2**63) and max(value) < 2**64:
            return None
        if kinds == {str} and is_unicode("".join(value)):
            return None
        parts = ((f"{where}.{i}", v) for i, v in enumerate(value))
    else:
        return None
    if level == _MOST_LEVELS:
        return where.split(".")[0], _TOO_DEEP
    for place, part in parts:
        if found := _fault_in(part, place, level + 1):
            return found
    return None


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


# JSON keeps true and 1 apart; Python would not.
Int = Annotated[int, BeforeValidator(_no_boolean)]
Float = Annotated[float, BeforeValidator(_no_boolean)]
# There may be very many of these: pydantic alone looks at them.
TokenId = Annotated[int, Strict()]
_T = TypeVar("_T")
# Of many faults the first is enough: to tell of a million takes half a minute.
ListOf = Annotated[list[_T], Field(fail_fast=True)]
_FLOAT: TypeAdapter[float] = TypeAdapter(Float)


def _biases(given: dict[str, Any]) -> dict[str, float]:
    for token, bias in given.items():
        try:
            given[token] = _FLOAT.validate_python(bias)
        except ValidationError as error:
            why = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise VLLMValidationError(
                f"logit_bias.{shorten(token, 100)}: {why}, got {short_repr(bias)}",
                parameter="logit_bias",
            ) from None
    return given


MAX_REQUEST_ID = 256


def checked_request_id(given: str, name: str = "request_id") -> str:
    """The id, which logs and metrics can hold. VLLMValidationError for another one."""
    if not 1 <= len(given) <= MAX_REQUEST_ID or not given.isprintable():
        raise VLLMValidationError(
            f"{name} must have 1 to {MAX_REQUEST_ID} printable characters, got "
            f"{short_repr(given)} ({len(given):,} characters)",
            parameter=name,
        )
    return given


RequestId = Annotated[str, AfterValidator(checked_request_id)]
Biases = Annotated[dict[str, Any], AfterValidator(_biases)]


def check_messages(messages: list[dict[str, Any]]) -> None:
    """VLLMValidationError for a conversation that no template can render: one without
    messages, or with a role that is no text. Which roles there are, a template says."""
    if not messages:
        raise VLLMValidationError(
            "messages must hold at least one message", parameter="messages"
        )
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role.strip():
            raise VLLMValidationError(
                f"messages[{i}].role must be a non-empty string, got "
                f"{short_repr(role)}",
                parameter=f"messages[{i}].role",
            )


class OpenAIModel(BaseModel):
    """A body that keeps unknown fields out of the way and says so once."""

    model_config = ConfigDict(extra="allow")

    known_extras: ClassVar[frozenset[str]] = frozenset()
    # What changes an answer, and would be missed in it.
    refused_extras: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _can_be_sent(cls, body: Any) -> Any:
        if isinstance(body, dict) and (fault := _fault_in(body, "")):
            where, what = fault
            raise VLLMValidationError(f"{where} holds {what}", parameter=where)
        return body

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, body: Any) -> Any:
        """OpenAI's clients send null for what they leave to the server."""
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if value is not None or not cls._leaves_out_null(name)
        }

    @classmethod
    def _leaves_out_null(cls, name: str) -> bool:
        """Whether a field has a default, and a type that does not take null."""
        field = cls.model_fields.get(name)
        if field is None or field.is_required():
            return False
        return type(None) not in get_args(field.annotation)

    @model_validator(mode="after")
    def _say_unknown(self) -> "OpenAIModel":
        given = {name for name, value in (self.model_extra or {}).items() if value}
        for name in sorted(given & self.refused_extras):
            raise VLLMValidationError(
                f"{name} is not supported: leave it out", parameter=name
            )
        unknown = sorted(set(self.model_extra or {}) - self.known_extras)
        if unknown:
            logger.warning_once(
                "%s: fields %s are unknown and ignored",
                type(self).__name__,
                shorten(", ".join(unknown)),
            )
        return self
