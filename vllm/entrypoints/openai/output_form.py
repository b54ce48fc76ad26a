"""What form of output a request asks for: OpenAI's `response_format` and vLLM's
`structured_outputs`, as parameters of the sampler."""

import json
from dataclasses import fields
from typing import Any

from pydantic import ValidationError

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.text_utils import short_repr

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_FIELDS = [field.name for field in fields(StructuredOutputsParams) if field.init]


def structured_outputs(
    given: dict[str, Any] | None, response_format: dict[str, Any] | None
) -> StructuredOutputsParams | None:
    """The form that both fields ask for; None for free text. VLLMValidationError where
    they are malformed or ask for two forms."""
    wanted = _of_response_format(response_format)
    if given is None:
        return _build(wanted, "response_format") if wanted else None
    if wanted:
        raise VLLMValidationError(
            "structured_outputs and response_format each ask for a form: give one",
            parameter="structured_outputs",
        )
    unknown = sorted(set(given) - set(_FIELDS))
    if unknown:
        raise VLLMValidationError(
            f"structured_outputs has no field {short_repr(unknown[0])}: expected one "
            f"of {', '.join(_FIELDS)}",
            parameter="structured_outputs",
        )
    return _build(given, "structured_outputs")


def _of_response_format(wanted: dict[str, Any] | None) -> dict[str, Any]:
    kind = "text" if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        schema = wanted.get("json_schema")
        if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
            return {"json": schema["schema"]}
        raise VLLMValidationError(
            "response_format.json_schema.schema must be a JSON schema, got "
            f"{short_repr(schema)}",
            parameter="response_format",
        )
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(wanted)}
    raise VLLMValidationError(
        f"response_format type {short_repr(kind)} is unknown: expected one of "
        f"{', '.join(_FORMATS)}",
        parameter="response_format",
    )


def _build(values: dict[str, Any], name: str) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:1])
        raise VLLMValidationError(
            f"{name}.{place}: {first['msg']}", parameter=name
        ) from error
