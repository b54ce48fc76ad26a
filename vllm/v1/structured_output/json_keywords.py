"""Keywords of JSON schemas that a grammar enforces, and which values a schema means.

Tables and what follows from them for one part of a schema. Refuses to know where parts
lie, and what to say of a faulty one.
"""

from typing import Any

NUMBERS = frozenset({"integer", "number"})
STRINGS = frozenset({"string"})
ARRAYS = frozenset({"array"})
OBJECTS = frozenset({"object"})
ANY = frozenset({*NUMBERS, *STRINGS, *ARRAYS, *OBJECTS, "boolean", "null"})

#: Keywords that the grammar enforces, with the types whose values they constrain.
ENFORCED: dict[str, frozenset[str]] = {
    "type": ANY,
    "enum": ANY,
    "const": ANY,
    "$ref": ANY,
    "anyOf": ANY,
    "oneOf": ANY,
    "allOf": ANY,
    "minimum": NUMBERS,
    "maximum": NUMBERS,
    "exclusiveMinimum": NUMBERS,
    "exclusiveMaximum": NUMBERS,
    "multipleOf": NUMBERS,
    "minLength": STRINGS,
    "maxLength": STRINGS,
    "pattern": STRINGS,
    "format": STRINGS,
    "items": ARRAYS,
    "prefixItems": ARRAYS,
    "unevaluatedItems": ARRAYS,
    "minItems": ARRAYS,
    "maxItems": ARRAYS,
    "properties": OBJECTS,
    "additionalProperties": OBJECTS,
    "unevaluatedProperties": OBJECTS,
    "required": OBJECTS,
    "minProperties": OBJECTS,
    "maxProperties": OBJECTS,
}

#: Keywords that leave every value valid; "x-" begins further ones.
ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$dynamicAnchor",
        "$vocabulary",
        "$defs",
        "definitions",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "discriminator",
        "xml",
        "externalDocs",
    ]
)

#: Keywords that forbid values which the grammar would allow.
NOT_ENFORCED = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "additionalItems",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "patternProperties",
        "propertyNames",
        "$dynamicRef",
        "$recursiveRef",
        "$recursiveAnchor",
        "nullable",
    ]
)

FORMATS = frozenset(
    [
        "email",
        "date",
        "time",
        "date-time",
        "duration",
        "ipv4",
        "ipv6",
        "hostname",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
    ]
)

# The grammar follows one of these and nothing beside it but what is named here.
BESIDE: dict[str, frozenset[str]] = {
    "$ref": frozenset(),
    "const": frozenset({"type", "enum"}),
    "enum": frozenset({"type"}),
    "anyOf": frozenset({"type"}),
    "oneOf": frozenset({"type"}),
    "allOf": frozenset({"type"}),
}
# Without a "type", these imply one.
IMPLIED = (
    ("object", {"properties", "additionalProperties", "unevaluatedProperties"}),
    ("array", {"items", "prefixItems", "unevaluatedItems"}),
)
COUNTS = tuple(f"{m}{w}" for m in ("min", "max") for w in ("Length", "Items"))
COUNTS += ("minProperties", "maxProperties")
RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ONE = ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties")
SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")


def types_of(part: dict[str, Any]) -> frozenset[str] | None:
    """The types of values that are meant; None for any."""
    stated = part.get("type")
    if stated is None:
        implied = [kind for kind, names in IMPLIED if names & part.keys()]
        return frozenset(implied[:1]) or None
    types = frozenset(stated if isinstance(stated, list) else [stated])
    return types | {"integer"} if "number" in types else types


def values_of(part: dict[str, Any]) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    values = part.get("enum")
    return values if isinstance(values, list) else None


def kinds_of(value: object) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, (int, float)):
        whole = isinstance(value, int) or value.is_integer()
        return NUMBERS if whole else frozenset({"number"})
    named = {str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset({named[type(value)]})


def all_kinds_of(part: dict[str, Any]) -> frozenset[str]:
    values = values_of(part)
    if values is not None:
        return frozenset().union(*(kinds_of(value) for value in values))
    return types_of(part) or ANY
