"""Arrays whose items a schema leaves open, in words that the grammar library follows.

In its strict mode an array that says nothing of its items, but how many there are, has
none beyond those that are named.
"""

import json

from vllm.v1.structured_output.json_keywords import types_of
from vllm.v1.structured_output.json_schema import all_parts

_NUMBER_OF_ITEMS = ("minItems", "maxItems")
_OTHER_ITEMS = frozenset({"items", "unevaluatedItems"})


def open_arrays(schema: object) -> None:
    """Says `"items": true` in every part of a schema, as json.loads gives it, that
    needs items and does not say which. ValueError for a part of the wrong shape."""
    for _, part in all_parts(schema):
        if "array" not in (types_of(part) or ()) or _OTHER_ITEMS & part.keys():
            continue
        named = part.get("prefixItems")
        if named is None:
            needs_items = any(name in part for name in _NUMBER_OF_ITEMS)
        else:
            needs_items = part.get("minItems", 0) > len(named)
        if needs_items:
            part["items"] = True


def with_open_arrays(schema: str) -> str:
    """The text of a schema after `open_arrays`; of most it is the text itself."""
    if not any(name in schema for name in _NUMBER_OF_ITEMS):
        return schema
    loaded = json.loads(schema)
    open_arrays(loaded)
    return json.dumps(loaded)
