"""Which JSON schemas are followed to the letter.

Knows every keyword of JSON Schema and what the grammar library makes of it. Refuses to
know grammars: a schema that passes still has to compile.
"""

import difflib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from vllm.utils.text_utils import short_repr, shorten
from vllm.v1.structured_output.json_keywords import (
    ANNOTATIONS,
    ANY,
    BESIDE,
    COUNTS,
    ENFORCED,
    FORMATS,
    NOT_ENFORCED,
    NUMBERS,
    OBJECTS,
    ONE,
    RANGE,
    SEVERAL,
    all_kinds_of,
    kinds_of,
    types_of,
    values_of,
)
from vllm.v1.structured_output.regular_expression import check_regex, check_together

_REFERENCES_IN_A_ROW = 8
# The library follows each inside the one before it, and has a stack for 2,000.
_MOST_REFERENCES = 500
# Each is compared with all the others.
_MOST_EXCLUSIVE = 128


def check_schema(schema: object) -> None:
    """ValueError for a JSON schema, as json.loads gives it, whose grammar would allow
    values that the schema forbids; it names the keyword and its path."""
    parts = all_parts(schema)
    for path, part in parts:
        _check_neighbours(part, path, schema)
        _check_typed(part, path)
    check_together([part["pattern"] for _, part in parts if "pattern" in part])


def all_parts(schema: object) -> list[tuple[str, dict[str, Any]]]:
    """What constrains a value: the schema and all below it, with their paths, each of
    the right shape; of definitions those that are referred to."""
    waiting: list[tuple[str, object]] = [("$", schema)]
    followed: set[str] = set()
    found = []
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise ValueError(
                f"schema at {_short(path)} must be an object, true or false, got "
                f"{short_repr(part)}"
            )
        _check_names(part, path)
        _check_shapes(part, path)
        found.append((path, part))
        waiting += _parts(part, path)
        reference = part.get("$ref")
        if reference is not None and reference not in followed:
            waiting.append((_path_of(reference), _target(reference, path, schema)))
            followed.add(reference)
            if len(followed) > _MOST_REFERENCES:
                raise _fault(
                    "$ref",
                    path,
                    f"leads to one more than {_MOST_REFERENCES} definitions: write "
                    "some where they are used",
                )
    return found


def _short(path: str) -> str:
    return shorten(path, 200)


def _fault(name: str, path: str, reason: str) -> ValueError:
    return ValueError(f"schema keyword {name!r} at {_short(path)} {reason}")


# --- one part of a schema, without what is below it -----------------------------------


def _check_names(part: dict[str, Any], path: str) -> None:
    for name in part:
        if name in ENFORCED or name in ANNOTATIONS or name.startswith("x-"):
            continue
        if name in NOT_ENFORCED:
            raise _fault(name, path, "is not enforced here; remove it")
        close = difflib.get_close_matches(name[:100], ENFORCED, 1)
        hint = f"did you mean {close[0]!r}?" if close else "remove it"
        raise _fault(shorten(name, 100), path, f"is unknown; {hint}")


def _check_shapes(part: dict[str, Any], path: str) -> None:
    for name in COUNTS:
        value = part.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _fault(
                name, path, f"must be a whole number >= 0, got {short_repr(value)}"
            )
    for name in ("pattern", "format", "$ref"):
        if not isinstance(part.get(name, ""), str):
            raise _fault(name, path, f"must be text, got {short_repr(part[name])}")
    for name in (*SEVERAL, "enum", "required"):
        if not isinstance(part.get(name, []), list):
            raise _fault(name, path, f"must be a list, got {short_repr(part[name])}")
    if not all(isinstance(name, str) for name in part.get("required", [])):
        raise _fault("required", path, "must be a list of names")
    if not isinstance(part.get("properties", {}), dict):
        given = short_repr(part["properties"])
        raise _fault("properties", path, f"must be an object, got {given}")
    types = part.get("type", "null")
    names = types if isinstance(types, list) else [types]
    if not names or not all(isinstance(n, str) and n in ANY for n in names):
        raise _fault(
            "type",
            path,
            f"must be one or several of {', '.join(sorted(ANY))}, got "
            f"{short_repr(types)}",
        )


def _check_neighbours(part: dict[str, Any], path: str, root: object) -> None:
    """What stands beside a keyword that the grammar follows alone."""
    alone = next((name for name in BESIDE if name in part), None)
    if alone is None:
        return
    beside = [n for n in part if n in ENFORCED and n not in BESIDE[alone] | {alone}]
    if beside:
        raise _fault(
            beside[0], path, f"is not enforced here beside {alone!r}; move it into that"
        )
    if alone in ("const", "enum"):
        _check_values(part, path)
    elif alone != "$ref":
        _check_branches(alone, part, path, root)


def _check_values(part: dict[str, Any], path: str) -> None:
    types = types_of(part)
    for value in values_of(part) or []:
        if types is not None and not kinds_of(value) & types:
            raise _fault(
                "const" if "const" in part else "enum",
                path,
                f"holds {short_repr(value)}, which is no {' or '.join(sorted(types))}; "
                "remove it or change the type",
            )
    if "const" in part and "enum" in part:
        allowed = {_text(value) for value in part["enum"]}
        if _text(part["const"]) not in allowed:
            raise _fault("const", path, "is not in 'enum'; remove one of them")


def _check_branches(name: str, part: dict[str, Any], path: str, root: object) -> None:
    branches = [_resolved(branch, root) for branch in part[name]]
    if not branches:
        raise _fault(name, path, "must hold at least one schema")
    if name == "allOf" and len(branches) > 1:
        raise _fault(name, path, "with several members is not enforced; merge them")
    types = types_of(part) if "type" in part else ANY
    for branch in branches if "type" in part else []:
        if not (types_of(branch) or ANY) <= (types or ANY):
            raise _fault(
                "type", path, f"is not enforced here beside {name!r}; move it into that"
            )
    if name == "oneOf":
        if len(branches) > _MOST_EXCLUSIVE:
            raise _fault(
                name,
                path,
                f"has {len(branches):,} members, expected at most {_MOST_EXCLUSIVE}; "
                "use 'anyOf'",
            )
        for i, one in enumerate(branches):
            for j in range(i):
                if not _disjoint(branches[j], one, root):
                    raise _fault(
                        name,
                        path,
                        f"is not enforced here where a value may fit members {j} and "
                        f"{i}; use 'anyOf', or a required property whose 'const' tells "
                        "them apart",
                    )


def _check_typed(part: dict[str, Any], path: str) -> None:
    types = types_of(part)
    if types is None:
        if BESIDE.keys() & part.keys():
            return
        for name in part:
            if name in ENFORCED:
                expected = " or ".join(sorted(ENFORCED[name]))
                raise _fault(
                    name, path, f"is not enforced here without 'type': add {expected}"
                )
        return
    if "string" in types:
        _check_string(part, path)
    if types & NUMBERS and "multipleOf" in part:
        _check_multiple(part, path, types)
    if "object" in types:
        _check_object(part, path)


def _check_string(part: dict[str, Any], path: str) -> None:
    said = [n for n in ("pattern", "format", "minLength", "maxLength") if n in part]
    if len(said) > 1 and said[0] in ("pattern", "format"):
        raise _fault(
            said[1], path, f"is not enforced here beside {said[0]!r}; remove one"
        )
    if "format" in part and part["format"] not in FORMATS:
        raise _fault(
            "format",
            path,
            f"{short_repr(part['format'])} is not enforced here: expected one of "
            f"{', '.join(sorted(FORMATS))}; or remove it",
        )
    if "pattern" in part:
        try:
            check_regex(part["pattern"])
        except ValueError as error:
            raise _fault("pattern", path, f"cannot be followed: {error}") from error


def _check_multiple(part: dict[str, Any], path: str, types: frozenset[str]) -> None:
    step = part["multipleOf"]
    beside = next((name for name in RANGE if name in part), None)
    if "number" in types or not isinstance(step, int) or isinstance(step, bool):
        raise _fault(
            "multipleOf",
            path,
            f"is enforced here only as a whole number for integers, got "
            f"{short_repr(step)}; remove it",
        )
    if beside:
        raise _fault(
            "multipleOf", path, f"is not enforced here beside {beside!r}; remove one"
        )


def _check_object(part: dict[str, Any], path: str) -> None:
    required = part.get("required", [])
    named = part.get("properties", {})
    for name in required:
        if name not in named:
            raise _fault(
                "required",
                path,
                f"names {short_repr(name)}, which 'properties' lacks: add it there, or "
                "remove it here",
            )
    # Names that the schema leaves open may come twice, and count once.
    is_open = part.get("additionalProperties") or part.get("unevaluatedProperties")
    if is_open is not None and part.get("minProperties", 0) > len(required) + 1:
        raise _fault(
            "minProperties",
            path,
            "is not enforced here beside additional properties; name them in "
            "'properties'",
        )


# --- what is below, and what is meant -------------------------------------------------


def _parts(part: dict[str, Any], path: str) -> Iterator[tuple[str, object]]:
    for name in ONE:
        if name in part:
            yield f"{path}.{name}", part[name]
    for name in SEVERAL:
        for i, member in enumerate(part.get(name, [])):
            yield f"{path}.{name}[{i}]", member
    for name, member in part.get("properties", {}).items():
        yield f"{path}.properties.{name}", member


def _steps(reference: str) -> list[str]:
    steps = unquote(reference).removeprefix("#").removeprefix("/").split("/")
    return [s.replace("~1", "/").replace("~0", "~") for s in steps if reference != "#"]


def _path_of(reference: str) -> str:
    return ".".join(["$", *_steps(reference)])


def _target(reference: str, path: str, root: object) -> object:
    if reference != "#" and not reference.startswith("#/"):
        raise _fault(
            "$ref",
            path,
            f"must lead into this schema ('#/…'), got {short_repr(reference)}",
        )
    place: Any = root
    try:
        for step in _steps(reference):
            place = place[int(step) if isinstance(place, list) else step]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise _fault(
            "$ref", path, f"leads to {short_repr(reference)}, which is not there"
        ) from error
    return place


def _resolved(part: object, root: object) -> dict[str, Any]:
    """The schema behind references; an empty one where they do not end."""
    for _ in range(_REFERENCES_IN_A_ROW):
        if not isinstance(part, dict):
            return {}
        if isinstance(part.get("$ref"), str):
            part = _target(part["$ref"], "$", root)
        elif isinstance(part.get("allOf"), list) and len(part["allOf"]) == 1:
            part = part["allOf"][0]
        else:
            return part
    return {}


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _disjoint(one: dict[str, Any], other: dict[str, Any], root: object) -> bool:
    """Says whether no value can fit both, as far as that is plain."""
    first, second = values_of(one), values_of(other)
    if first is not None and second is not None:
        return {_text(v) for v in first}.isdisjoint({_text(v) for v in second})
    first_types, second_types = all_kinds_of(one), all_kinds_of(other)
    if first_types.isdisjoint(second_types):
        return True
    if first_types | second_types != OBJECTS:
        return False
    needed = set(one.get("required", [])) & set(other.get("required", []))
    for name in needed:
        tags = [p.get("properties", {}).get(name) for p in (one, other)]
        a, b = (_resolved(tag, root) for tag in tags)
        if values_of(a) is not None and _disjoint(a, b, root):
            return True
    return False
