"""What form of output a request asks for: OpenAI's `response_format` and vLLM's
`structured_outputs`, as parameters of the sampler."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.text_utils import short_repr

# The members of each type of response_format; of a tag they are the library's matter.
_FORMATS: dict[str, tuple[str, ...] | None] = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
    "structural_tag": None,
}
_JSON_SCHEMA = ("name", "description", "schema", "strict")
_FIELDS = [field.name for field in fields(StructuredOutputsParams) if field.init]


def structured_outputs(
    given: dict[str, Any] | None, response_format: dict[str, Any] | None
) -> StructuredOutputsParams | None:
    """The form that both fields ask for; None for free text. VLLMValidationError where
    they are malformed or ask for two forms."""
    wanted = _of_response_format(response_format)
    if given is None:
        return StructuredOutputsParams.of(wanted, "response_format") if wanted else None
    if wanted:
        raise VLLMValidationError(
            "structured_outputs and response_format each ask for a form: give one",
            parameter="structured_outputs",
        )
    _refuse_unknown("structured_outputs", given, _FIELDS)
    return StructuredOutputsParams.of(given)


def _refuse_unknown(name: str, given: dict[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise VLLMValidationError(
            f"{name} has no field {short_repr(unknown[0])}: expected one of "
            f"{', '.join(known)}",
            parameter=name.split(".")[0],
        )


def _of_response_format(wanted: dict[str, Any] | None) -> dict[str, Any]:
    if wanted is None:
        return {}
    kind = wanted.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise VLLMValidationError(
            f"response_format type {short_repr(kind)} is unknown: expected one of "
            f"{', '.join(_FORMATS)}",
            parameter="response_format",
        )
    known = _FORMATS[kind]
    if known is None:
        return {"structural_tag": json.dumps(wanted)}
    _refuse_unknown("response_format", wanted, known)
    if kind == "json_object":
        return {"json_object": True}
    return {"json": _schema(wanted)} if kind == "json_schema" else {}


def _schema(wanted: dict[str, Any]) -> dict[str, Any]:
    given = wanted.get("json_schema")
    if isinstance(given, dict):
        _refuse_unknown("response_format.json_schema", given, _JSON_SCHEMA)
        if isinstance(given.get("schema"), dict):
            return given["schema"]
    raise VLLMValidationError(
        "response_format.json_schema.schema must be a JSON schema, got "
        f"{short_repr(given)}",
        parameter="response_format",
    )
